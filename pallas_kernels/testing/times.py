"""Times of calls on a device, beside peers: many calls in one compiled program, so that no host
clock need see 20 us.

A program calls again and again, on as many buffers in turn as no cache holds; each call depends on
all results of the one before. Peers in PyTorch are captured in a CUDA graph where that works, and
timed by events. Results are compared before anything is timed.
"""

import importlib
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import TopkLogprobs, greedy_topk_logprobs, topk_logprobs, use_implementation
from pallas_kernels.backends import read
from pallas_kernels.backends.groups import GroupSums
from pallas_kernels.sampling import emitted_logprobs, verify
from pallas_kernels.sampling.rows import GroupedRows
from pallas_kernels.testing import checks, plain
from pallas_kernels.testing.shapes import Shape

BF16, F32 = "bfloat16", "float32"
TOPK, SAMPLED, VERIFY, COPY = "topk_logprobs", "read of sampled rows", "verify", "copy"
SHAPES = (
    (COPY, Shape(1024, 131_072, 0, F32)),
    (TOPK, Shape(64, 131_072, 20, BF16)),
    (TOPK, Shape(1536, 151_936, 20, BF16)),
    (TOPK, Shape(64, 151_936, 0, F32)),
    (VERIFY, Shape(64, 151_936, 20, BF16)),
    (SAMPLED, Shape(64, 151_936, 20, BF16)),
    (TOPK, Shape(256, 131_072, 5, BF16)),
    (TOPK, Shape(16, 50_257, 20, F32)),
)
MORE = tuple(
    (TOPK, Shape(rows, vocabulary, k, dtype))
    for rows in (4, 16, 64, 256, 1536)
    for vocabulary in (131_072, 151_936)
    for k in (0, 1, 5, 20, 64)
    for dtype in (BF16, F32)
)
REHEARSED = (TOPK, Shape(2, 2048, 2, F32))
NO_CACHE = 128 << 20  # bytes: an H100's L2 cache has 50 MB
MOST_BUFFERS = 6
SECONDS = 0.2  # that a program's calls take together, about
ROUNDS = 5
PLAIN = "log_softmax + top_k"
PEERS = ("torch", "flashinfer", "vllm")

Call = Callable[..., Any]


def measure(job: str, shape: Shape, backend: str, rehearse: bool = False) -> dict[str, Any]:
    """Microseconds a call of each contender, and the reason for each that has none.

    Returns:
      {"us": {contender: median}, "spread": {contender: (least, most)}, "GB/s": of the first
      contender, "absent": {contender: why}}.
    """
    size = shape.rows * shape.vocabulary * jnp.dtype(shape.dtype).itemsize
    count = 1 if rehearse else max(1, min(MOST_BUFFERS, -(-NO_CACHE // size)))
    slots = 4 if job == VERIFY else 1  # rows of a slot
    flat = Shape(shape.rows * slots, shape.vocabulary, shape.k, shape.dtype)
    buffers = tuple(checks.random_logits(flat, seed) for seed in range(count))
    ids = checks.random_ids(flat)
    seconds: dict[str, list[float]] = {}
    absent: dict[str, str] = {}
    answers: dict[str, Any] = {}
    for name, call in jax_calls(job, shape, backend, rehearse).items():
        try:
            answers[name] = jax.tree.map(np.asarray, jax.jit(call)(buffers[0], ids))
            seconds[name] = jax_seconds(call, buffers, ids, rehearse)
        except Exception as error:  # a peer may want more memory than there is
            if name == backend and not rehearse:
                raise
            absent[name] = f"{type(error).__name__}: {str(error)[:200]}"
    if job == TOPK:
        for name in answers:
            if name not in (PLAIN, f"{backend}, greedy"):
                check(name, answers[PLAIN], answers[name])
        for name, make in torch_calls(shape.k, rehearse).items():
            try:
                found = _torch_seconds(make, buffers, ids, answers[PLAIN], rehearse)
                seconds[name] = found
            except Exception as error:
                absent[name] = f"{type(error).__name__}: {str(error)[:200]}"
        absent |= {
            name: "NOT INSTALLED" for name in PEERS if importlib.util.find_spec(name) is None
        }
    us = {name: round(1e6 * float(np.median(found)), 2) for name, found in seconds.items()}
    first = next(iter(us))
    moved = size * slots * (2 if job == COPY else 1)
    return {
        "us": us,
        "spread": {n: [round(1e6 * f(x), 2) for f in (min, max)] for n, x in seconds.items()},
        "GB/s": round(moved / us[first] / 1e3, 1),
        "absent": absent,
    }


def jax_calls(job: str, shape: Shape, backend: str, rehearse: bool) -> dict[str, Call]:
    """Calls of logits and token ids, by contender: the backend's kernels first."""
    k = shape.k
    ours: Any = "xla" if rehearse else backend
    if job == COPY:
        return {COPY: lambda x, _: -x}
    if job == TOPK:
        return {
            backend: lambda x, t: topk_logprobs(x, t, k, implementation=ours),
            f"{backend}, greedy": lambda x, _: greedy_topk_logprobs(x, k, implementation=ours),
            "xla": lambda x, t: topk_logprobs(x, t, k, implementation="xla"),
            PLAIN: lambda x, t: plain.topk_logprobs(x, t, k),
            "max only, by XLA": lambda x, _: jnp.max(x, axis=1),
        }
    if job == SAMPLED:

        def groups(x: jax.Array, name: Any) -> tuple[GroupSums, Any]:
            needed, inverse = jnp.full(len(x), 10, jnp.int32), jnp.ones(len(x))
            found = read.read_groups(GroupedRows.of(x).part, inverse, needed, k, name)
            return found.groups, found.top_ids

        return {
            backend: lambda x, _: groups(x, ours),
            "xla": lambda x, _: groups(x, "xla"),
        }
    _, drafts, sampling, positions = checks.verification(shape)

    def verified(x: jax.Array, name: Any) -> Any:
        with use_implementation(name):
            logits = x.reshape(shape.rows, -1, shape.vocabulary)
            found = verify(logits, drafts, sampling, positions, k=k)
            assert found.read is not None
            emitted = emitted_logprobs(logits, found.token_ids, found.read)
        return found.token_ids, found.num_tokens, emitted

    return {
        backend: lambda x, _: verified(x, ours),
        "xla": lambda x, _: verified(x, "xla"),
        "the logprobs of its rows alone": lambda x, t: topk_logprobs(x, t, k, implementation=ours),
    }


def in_one_program(call: Call, turns: int, buffers: int) -> Call:
    """A program of ids and buffers: `turns` times a call on each buffer, one after the other.

    The barrier makes each call depend on the turn, so that none is moved out of the loop; it copies
    nothing. Every call's results are the program's, so that none is left out.
    """

    def program(ids: jax.Array, *logits: jax.Array) -> Any:
        def one(turn: Any, index: int) -> Any:
            x, token_ids, _ = lax.optimization_barrier((logits[index], ids, turn))  # type: ignore[no-untyped-call]
            return call(x, token_ids)

        def body(turn: Any, _: Any) -> Any:
            return [one(turn, index) for index in range(buffers)]

        shapes = jax.eval_shape(lambda: body(jnp.int32(0), None))
        return lax.fori_loop(
            0, turns, body, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        )

    return program


def jax_seconds(
    call: Call, buffers: tuple[jax.Array, ...], ids: jax.Array, rehearse: bool = False
) -> list[float]:
    """Seconds of a call, one number a round; the number of turns is found by a first program."""
    arrays = (ids, *buffers)

    def compiled(turns: int) -> Callable[[], float]:
        program = jax.jit(in_one_program(call, turns, len(buffers)))
        jax.block_until_ready(program(*arrays))  # type: ignore[no-untyped-call]

        def run() -> float:
            begin = time.perf_counter()
            jax.block_until_ready(program(*arrays))  # type: ignore[no-untyped-call]
            return (time.perf_counter() - begin) / (turns * len(buffers))

        return run

    short = compiled(2)
    if rehearse:
        return [short()]
    once = min(short() for _ in range(3)) * len(buffers)
    run = compiled(max(4, min(20_000, int(SECONDS / once))))
    return [run() for _ in range(ROUNDS)]


def torch_calls(k: int, rehearse: bool = False) -> dict[str, Callable[[], Call]]:
    """Makers of calls of tensors: logits [R, V], ids [R] int64 -> ids, logprobs, and token ranks.

    What a library returns less of is compared as far as it goes.
    """

    def eager() -> Call:
        torch = importlib.import_module("torch")

        def topk(x: Any, ids: Any) -> Any:
            logprobs = torch.log_softmax(x, dim=-1, dtype=torch.float32)
            own = logprobs.gather(1, ids[:, None])
            ranks = (logprobs > own).sum(dim=1) + 1
            best, best_ids = torch.topk(logprobs, k, dim=-1)
            return torch.cat([ids[:, None], best_ids], 1), torch.cat([own, best], 1), ranks

        return topk

    def compiled() -> Call:
        torch = importlib.import_module("torch")
        torch._dynamo.reset()  # another k is another program
        found: Call = torch.compile(eager(), dynamic=False, fullgraph=True)
        return found

    def vllm() -> Call:
        sampler = importlib.import_module("vllm.v1.sample.sampler").Sampler

        def topk(x: Any, ids: Any) -> Any:
            found = sampler.gather_logprobs(sampler.compute_logprobs(x), k, ids)
            return found.logprob_token_ids, found.logprobs, None

        return topk

    def flashinfer() -> Call:
        library, torch = importlib.import_module("flashinfer"), importlib.import_module("torch")

        def topk(x: Any, ids: Any) -> Any:
            logprobs = torch.log_softmax(x, dim=-1, dtype=torch.float32)
            own = logprobs.gather(1, ids[:, None])
            ranks = (logprobs > own).sum(dim=1) + 1
            best, best_ids = library.top_k(logprobs, k, sorted=True)
            return torch.cat([ids[:, None], best_ids], 1), torch.cat([own, best], 1), ranks

        return topk

    found = {"torch eager": eager, "vllm sampler": vllm}
    if not rehearse:
        found["torch compiled"] = compiled
    if k:
        found["torch + flashinfer.top_k"] = flashinfer
    needs = {"vllm sampler": "vllm", "torch + flashinfer.top_k": "flashinfer"}
    return {
        name: make
        for name, make in found.items()
        if all(importlib.util.find_spec(one) for one in ("torch", needs.get(name, "torch")))
    }


def _torch_seconds(
    make: Callable[[], Call], buffers: Any, ids: Any, expected: TopkLogprobs, rehearse: bool
) -> list[float]:
    torch = importlib.import_module("torch")
    if not rehearse and not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} finds no CUDA device")
    call = make()
    tensors = [torch.from_dlpack(x) for x in buffers]
    own = torch.from_dlpack(ids).long()
    given, logprobs, ranks = call(tensors[0], own)
    np.testing.assert_allclose(logprobs.cpu(), expected.logprobs, rtol=1e-6, atol=3e-5)
    if ranks is not None:
        np.testing.assert_array_equal(ranks.cpu(), expected.token_ranks)
    del given  # ties have no promised order
    if rehearse:
        begin = time.perf_counter()
        call(tensors[0], own)
        return [time.perf_counter() - begin]

    def once() -> None:
        for x in tensors:
            call(x, own)

    for _ in range(3):
        once()
    torch.cuda.synchronize()
    launch: Callable[[], None] = once
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            once()
        launch = graph.replay
    except Exception:  # some library synchronizes: its launches count
        torch.cuda.synchronize()
    found = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(20):
            launch()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 1e3 / (20 * len(tensors)))
    return found


def check(name: str, expected: Any, found: Any) -> None:
    """Raise AssertionError unless a contender's logprobs, ranks and ids are those expected.

    Contenders that compute something else than `TopkLogprobs` are not looked at.
    """
    if not isinstance(found, TopkLogprobs):
        return
    np.testing.assert_allclose(
        found.logprobs, expected.logprobs, rtol=1e-6, atol=3e-5, err_msg=f"{name}'s logprobs"
    )
    np.testing.assert_array_equal(found.token_ranks, expected.token_ranks, f"{name}'s ranks")
    np.testing.assert_array_equal(found.token_ids, expected.token_ids, f"{name}'s token ids")
