"""The contenders of the GPU benchmark: our kernels, their peers, and two bounds.

Every contender is one compiled program, on the same arrays as all others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.gpu import floor, torch_peers
from bench.gpu.device_clock import Span, Work, device_spans, host_spans
from bench.timing import BenchError
from pallas_kernels import topk_logprobs
from pallas_kernels.backends.mosaic_gpu import rows as run
from pallas_kernels.backends.mosaic_gpu.schedule import choose_schedule
from pallas_kernels.contract.types import Outputs, Rows
from pallas_kernels.testing import plain as reference
from pallas_kernels.testing.shapes import Shape

PLAIN = "log_softmax + top_k"
UNSTABLE = "log_softmax + top_k, unstable"
TORCH = ("torch eager", "torch compiled")
OURS, FUSED, FLOOR, COPY = "mosaic_gpu", "mosaic_gpu, fused greedy", "max only", "copy"
NO_ANSWER = (FLOOR, COPY)  # bounds of the speed: they compute nothing to compare
OPTIONAL = (UNSTABLE, *TORCH)  # the others are measured without them too
NO_TIE_ORDER = (UNSTABLE, *TORCH)

BUFFERS = 3
PLUG_BYTES = 512 << 20  # ten times an H100's L2 cache; about a third of a millisecond
CEILING = Shape(1024, 131_072, 0, "float32")  # 512 MiB: the copy that sets the bandwidth
ROUNDS = (7, 31)  # at least and at most

Clock = Callable[[Sequence[Work]], list[Span]]


@dataclass(frozen=True)
class Machine:
    """The measuring machine: a GPU, or a CPU that rehearses the same steps."""

    clock: Clock = device_spans
    plug_bytes: int = PLUG_BYTES
    ceiling: Shape = CEILING
    rounds: tuple[int, int] = ROUNDS
    on_gpu: bool = True


def rehearsal() -> Machine:
    """A machine with small arrays and the host's clock: it has no results."""
    return Machine(host_spans, 1 << 16, Shape(4, 4096, 0, "float32"), (1, 1), False)


@dataclass(frozen=True)
class Contender:
    """A compiled program."""

    launch: Callable[[int], Any]  # enqueues it on buffer i
    plug: Callable[[], Any]  # enqueues the kernel that runs before it
    wait: Callable[[Any], Any]  # for what `launch` returned
    result: Callable[[Any], Any]  # makes NumPy arrays of it
    temporaries: int | None = None  # bytes beyond inputs and outputs; None: unknown


def make_contenders(
    shape: Shape, machine: Machine, only: Sequence[str] = ()
) -> tuple[dict[str, Contender], dict[str, str]]:
    """The contenders for a shape, and the reasons why others are missing.

    The plain way is the first, so it is the baseline.

    Args:
      shape: of the logits.
      machine: where they run.
      only: the names of jax programs to make; () makes all contenders.
    """
    buffers = [random_logits(shape, seed) for seed in range(BUFFERS)]
    token_ids = random_ids(shape)
    k, outputs = shape.k, Outputs(shape.k)
    schedule = choose_schedule(shape.rows, shape.vocabulary, k, shape.dtype)
    rows = jnp.int32(shape.rows)
    missing: dict[str, str] = {}
    programs: dict[str, Callable[[jax.Array, jax.Array], Any]] = {
        PLAIN: lambda x, t: reference.topk_logprobs(x, t, k),
        "xla": lambda x, t: topk_logprobs(x, t, k, implementation="xla"),
        OURS: lambda x, t: run.topk_logprobs(Rows(x, t), outputs),
        FUSED: lambda x, _: run.topk_logprobs(Rows(x, num_rows=rows), outputs),
        FLOOR: lambda x, _: floor.row_maxima(schedule, x),
        COPY: lambda x, _: -x,
    }
    if reference.has_unstable_top_k():
        programs[UNSTABLE] = lambda x, t: reference.topk_logprobs(x, t, k, is_stable=False)
    else:
        missing[UNSTABLE] = f"jax {jax.__version__} has no lax.top_k(is_stable=False)"
    plug = jax_plug(machine.plug_bytes)
    contenders = {
        name: jax_contender(program, buffers, token_ids, plug)
        for name, program in programs.items()
        if not only or name in only
    }
    if only:
        return contenders, missing
    if (why := torch_peers.obstacle(machine.on_gpu)) is not None:
        return contenders, missing | dict.fromkeys(TORCH, why)
    return contenders | torch_contenders(k, buffers, token_ids, machine), missing


def jax_contender(
    program: Callable[[jax.Array, jax.Array], Any],
    buffers: Sequence[jax.Array],
    token_ids: jax.Array,
    plug: Callable[[], Any],
) -> Contender:
    """A contender compiled ahead of time, so that the compiler reports its memory."""
    compiled = jax.jit(program).lower(buffers[0], token_ids).compile()
    memory = compiled.memory_analysis()
    return Contender(
        launch=lambda i: compiled(buffers[i % BUFFERS], token_ids),
        plug=plug,
        wait=jax.block_until_ready,
        result=lambda out: jax.tree.map(np.asarray, out),
        temporaries=None if memory is None else memory.temp_size_in_bytes,
    )


def jax_plug(num_bytes: int) -> Callable[[], Any]:
    """A function that launches a kernel: it reads and writes `num_bytes`."""
    increment = jax.jit(lambda x: x + 1, donate_argnums=0)
    buffer = [jnp.zeros(num_bytes // 4, jnp.float32)]

    def plug() -> jax.Array:
        buffer[0] = increment(buffer[0])
        return buffer[0]

    return plug


def torch_contenders(
    k: int, buffers: Sequence[jax.Array], token_ids: jax.Array, machine: Machine
) -> dict[str, Contender]:
    """Contenders for PyTorch's programs, on the same memory."""
    tensors = [torch_peers.share(x) for x in buffers]
    ids = torch_peers.share(token_ids).long()
    plug = torch_peers.plug(machine.plug_bytes, machine.on_gpu)

    def bind(program: torch_peers.Program) -> Contender:
        return Contender(
            launch=lambda i: program(tensors[i % BUFFERS], ids),
            plug=plug,
            wait=torch_peers.wait,
            result=torch_peers.as_arrays,
        )

    return {name: bind(program) for name, program in torch_peers.programs(k).items()}


def check_equal(
    shape: Shape, contenders: Mapping[str, Contender]
) -> tuple[dict[str, Contender], dict[str, str]]:
    """Compare every answer with the plain way's, on every buffer; this is also the warm-up.

    Returns:
      The contenders to measure, and the reasons why optional peers are left out.

    Raises:
      BenchError: a contender that is not optional has a different answer.
    """
    failed: dict[str, str] = {}
    for i in range(BUFFERS):
        expected = contenders[PLAIN].result(contenders[PLAIN].launch(i))
        for name, contender in contenders.items():
            if name in failed:
                continue
            try:
                out = contender.launch(i)
                contender.wait(out)
                if name not in NO_ANSWER:
                    check(name, expected, contender.result(out))
            except AssertionError as error:
                text = f"{shape}: {name} differs from {PLAIN}: {error}"
                if name not in OPTIONAL:
                    raise BenchError(text) from error
                failed[name] = text
            except Exception as error:
                if name not in OPTIONAL:
                    raise
                failed[name] = f"{type(error).__name__}: {str(error)[:200]}"
    return {name: one for name, one in contenders.items() if name not in failed}, failed


def check(name: str, expected: Any, actual: Any) -> None:
    """Raises AssertionError unless ids and ranks are equal and logprobs close.

    A contender that promises no order of ties may have other ids.
    """
    first = 1 if name == FUSED else 0  # the fused path chooses its own tokens
    np.testing.assert_allclose(
        actual.logprobs[:, first:], expected.logprobs[:, first:], rtol=1e-6, atol=3e-5
    )
    if name not in NO_TIE_ORDER:
        np.testing.assert_array_equal(actual.token_ids[:, first:], expected.token_ids[:, first:])
    if not first:
        np.testing.assert_array_equal(actual.token_ranks, expected.token_ranks)


def random_logits(shape: Shape, seed: int) -> jax.Array:
    """[R, V] random logits in steps of 1/64, made on the device.

    The plain way orders logprobs, which `log_softmax` has rounded: logits that are closer would tie
    there and not in our kernels. Equal logits tie in both.
    """
    normal = jax.random.normal(jax.random.key(seed), (shape.rows, shape.vocabulary))
    return (jnp.round(256 * normal) / 64).astype(shape.dtype)


def random_ids(shape: Shape) -> jax.Array:
    """[R] int32 random token ids."""
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.integers(0, shape.vocabulary, shape.rows), jnp.int32)
