"""Which implementation computes a call: XLA anywhere, the GPU kernels where they can run."""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import jax

from pallas_kernels import xla
from pallas_kernels.greedy_choice import greedy_token_ids
from pallas_kernels.platforms import lowered_for
from pallas_kernels.transformations import transformable
from pallas_kernels.types import TopkLogprobs

Implementation = Literal["xla", "mosaic_gpu"]
Result = TypeVar("Result")

MIN_CAPABILITY = 9.0
MIN_VOCABULARY = 2048  # one block of the narrowest groups, see mosaic_gpu/tiling
MAX_LOGITS = 2**31 - 1


class Runner(NamedTuple):
    """An implementation's two functions, for checked arguments."""

    topk: Callable[..., TopkLogprobs]
    greedy_topk: Callable[..., TopkLogprobs]


def choose_implementation(implementation: str | None, logits: jax.Array) -> Runner:
    """The implementation for these logits, or an error that says why the wanted one cannot run."""
    if implementation is not None and implementation not in get_args(Implementation):
        raise ValueError(
            f"implementation = {implementation!r} is not known; choose one of "
            f"{', '.join(map(repr, get_args(Implementation)))} or None"
        )
    if implementation == "xla":
        return XLA
    obstacle = gpu_obstacle(logits)
    if implementation == "mosaic_gpu":
        if obstacle is not None:
            raise NotImplementedError(
                f"implementation = 'mosaic_gpu' cannot run: {obstacle}; use 'xla' or None"
            )
        return mosaic_gpu_runner()
    return XLA if obstacle is not None else fastest_runner()


def gpu_obstacle(logits: jax.Array | jax.ShapeDtypeStruct) -> str | None:
    """Why the GPU kernels cannot run on logits [N, V] on these devices; None if they can."""
    return cannot_run(logits, cuda_capability())


def cannot_run(logits: jax.Array | jax.ShapeDtypeStruct, capability: float | None) -> str | None:
    """Why the GPU kernels cannot run on these logits and this device; None if they can.

    Args:
      logits: [N, V].
      capability: the device's CUDA compute capability, None without a CUDA device.
    """
    if capability is None:
        return "there is no CUDA device here"
    if capability < MIN_CAPABILITY:  # not tried and caught: compiling for one aborts the process
        return f"the device has compute capability {capability}, {MIN_CAPABILITY} is the least"
    if logits.size > MAX_LOGITS:
        return f"{logits.size} logits are more than a 32-bit index reaches ({MAX_LOGITS})"
    if logits.shape[1] < MIN_VOCABULARY:
        return f"a vocabulary of {logits.shape[1]} is less than one block of {MIN_VOCABULARY}"
    return None


def cuda_capability() -> float | None:
    """The lowest compute capability of this process's CUDA devices; None without any."""
    if jax.default_backend() != "gpu":
        return None
    found = [getattr(device, "compute_capability", None) for device in jax.local_devices()]
    # AMD's devices are "gpu" too; theirs reads like "gfx942".
    numbers = [float(c) for c in found if c is not None and str(c).replace(".", "").isdigit()]
    return min(numbers, default=None)


def xla_greedy_topk_logprobs(
    logits: jax.Array,
    k: int,
    num_rows: jax.Array | None,
    temperatures: jax.Array | None,
    extra_token_ids: jax.Array,
) -> TopkLogprobs:
    """The fused path's result from two reads."""
    token_ids = greedy_token_ids(logits)
    return xla.topk_logprobs(logits, token_ids, k, None, num_rows, temperatures, extra_token_ids)


def by_platform(
    k_position: int, on_cuda: Callable[..., Result], elsewhere: Callable[..., Result]
) -> Callable[..., Result]:
    """Chosen where the program is lowered.

    Both take positional arguments: arrays or None, and a static K at `k_position`.
    """

    def run(*args: Any) -> Result:
        k = args[k_position]
        rest = (*args[:k_position], *args[k_position + 1 :])

        def with_k(function: Callable[..., Result]) -> Callable[..., Result]:
            return lambda *rest: function(*rest[:k_position], k, *rest[k_position:])

        return lowered_for(*rest, cuda=with_k(on_cuda), default=with_k(elsewhere))

    return run


def compiled(topk: Callable[..., TopkLogprobs], greedy: Callable[..., TopkLogprobs]) -> Runner:
    """Compiled here too, so that a call outside jit runs one program and not one per operation."""

    def transformable_topk(
        logits: jax.Array, token_ids: jax.Array, k: int, *rest: Any
    ) -> TopkLogprobs:
        def call(logits: jax.Array, token_ids: jax.Array, *rest: Any) -> TopkLogprobs:
            return topk(logits, token_ids, k, *rest)

        return transformable(call)(logits, token_ids, *rest)

    def transformable_greedy(logits: jax.Array, k: int, *rest: Any) -> TopkLogprobs:
        def call(logits: jax.Array, _: None, __: None, *rest: Any) -> TopkLogprobs:
            return greedy(logits, k, *rest)

        return transformable(call)(logits, None, None, *rest)

    return Runner(
        jax.jit(transformable_topk, static_argnums=2),
        jax.jit(transformable_greedy, static_argnums=1),
    )


XLA = compiled(xla.topk_logprobs, xla_greedy_topk_logprobs)


# Imported where they are first used: a third of a second, and parts of jax that may change.
@functools.cache
def mosaic_gpu_runner() -> Runner:
    """The GPU kernels."""
    from pallas_kernels.mosaic_gpu import run

    return compiled(run.topk_logprobs, run.greedy_topk_logprobs)


@functools.cache
def fastest_runner() -> Runner:
    """The GPU kernels in programs for CUDA, XLA in programs for other platforms."""
    from pallas_kernels.mosaic_gpu import run

    return compiled(
        by_platform(2, run.topk_logprobs, xla.topk_logprobs),
        by_platform(1, run.greedy_topk_logprobs, xla_greedy_topk_logprobs),
    )
