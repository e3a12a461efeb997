"""Which implementation computes a call: XLA anywhere, kernels where they can run.

What the shapes forbid is known when a call is traced. Whether a program is for CUDA or a TPU is
known when it is lowered: a CUDA host may run one on its CPU, and any host may export one for CUDA.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, get_args

import jax

from pallas_kernels.backends.answers import RowParts
from pallas_kernels.backends.mosaic_tpu.plan import DoesNotFit
from pallas_kernels.backends.xla import rows as xla
from pallas_kernels.backends.xla.greedy import greedy_of_rows
from pallas_kernels.contract.changes import prepared
from pallas_kernels.contract.types import TopkLogprobs
from pallas_kernels.contract.wanted import Wanted
from pallas_kernels.lowering.platforms import lowered_for
from pallas_kernels.lowering.tpu_rule import kernel_is_faster
from pallas_kernels.topk.derivatives import transformable

Implementation = Literal["xla", "mosaic_gpu", "mosaic_tpu"]
Result = TypeVar("Result")

MIN_CAPABILITY = 9.0
MIN_VOCABULARY = 2048  # one block of the narrowest groups, see mosaic_gpu/tiling
MAX_LOGITS = 2**31 - 1
MAX_TPU_VOCABULARY = 2**19  # of which two units of rows take half of a v5p's VMEM


class Runner(NamedTuple):
    """An implementation's functions, for checked arguments."""

    topk: Callable[..., TopkLogprobs]
    greedy_topk: Callable[..., TopkLogprobs]
    row_parts: Callable[..., RowParts]


def choose_implementation(implementation: str | None, logits: jax.Array) -> Runner:
    """The implementation for these logits.

    Raises:
      ValueError: there is none of this name.
      NotImplementedError: kernels are wanted, but cannot run on logits of this shape. Where they
        cannot run on the device, the lowering of the program says so.
    """
    check_name(implementation)
    if implementation == "xla":
        return XLA
    obstacles = {"mosaic_gpu": shape_obstacle(logits), "mosaic_tpu": tpu_obstacle(logits)}
    if implementation is None:
        return fastest(tuple(name for name, obstacle in obstacles.items() if obstacle is None))
    obstacle = obstacles[implementation]
    if obstacle is not None:
        refuse(implementation, obstacle)
    return ONLY[implementation]


def check_name(implementation: str | None) -> None:
    """Raise ValueError if there is no implementation of this name; None is the choice of one."""
    if implementation is not None and implementation not in get_args(Implementation):
        raise ValueError(
            f"implementation = {implementation!r} is not known; choose one of "
            f"{', '.join(map(repr, get_args(Implementation)))} or None"
        )


def refuse(implementation: str, obstacle: str) -> NoReturn:
    """Say why an implementation cannot run."""
    raise NotImplementedError(
        f"implementation = {implementation!r} cannot run: {obstacle}; use 'xla' or None"
    )


def tpu_obstacle(logits: jax.Array | jax.ShapeDtypeStruct) -> str | None:
    """Why the TPU kernel cannot run on logits [N, V] on any TPU; None if it can."""
    if not all(isinstance(size, int) for size in logits.shape):
        return f"the shape {logits.shape} is symbolic, and a kernel's grid is not"
    if logits.shape[1] > MAX_TPU_VOCABULARY:
        return f"rows of {logits.shape[1]} logits do not fit VMEM ({MAX_TPU_VOCABULARY} do)"
    return None


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
    return capability_obstacle(capability) or shape_obstacle(logits)


def capability_obstacle(capability: float) -> str | None:
    """Why the GPU kernels cannot run on a CUDA device of this compute capability."""
    if capability < MIN_CAPABILITY:  # not tried and caught: compiling for one aborts the process
        return f"the device has compute capability {capability}, {MIN_CAPABILITY} is the least"
    return None


def shape_obstacle(logits: jax.Array | jax.ShapeDtypeStruct) -> str | None:
    """Why the GPU kernels cannot run on logits of this shape [N, V] on any device."""
    if not all(isinstance(size, int) for size in logits.shape):
        return f"the shape {logits.shape} is symbolic, and a kernel's grid is not"
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


def xla_greedy_topk_logprobs(logits: jax.Array, wanted: Wanted, *rest: Any) -> TopkLogprobs:
    """The fused path's result from two reads."""
    *_, changes = rest
    token_ids = greedy_of_rows(logits, prepared(changes, logits.shape[1])).token_ids
    return xla.topk_logprobs(logits, token_ids, wanted, None, *rest)


def compiled(
    topk: Callable[..., TopkLogprobs],
    greedy_topk: Callable[..., TopkLogprobs],
    row_parts: Callable[..., RowParts],
) -> Runner:
    """Compiled here too, so that a call outside jit runs one program and not one per operation."""

    def transformable_topk(
        logits: jax.Array, token_ids: jax.Array, wanted: Wanted, *rest: Any
    ) -> TopkLogprobs:
        def call(logits: jax.Array, token_ids: jax.Array, *rest: Any) -> TopkLogprobs:
            return topk(logits, token_ids, wanted, *rest)

        return transformable(call)(logits, token_ids, *rest)

    def transformable_greedy(logits: jax.Array, wanted: Wanted, *rest: Any) -> TopkLogprobs:
        def call(logits: jax.Array, _: None, __: None, *rest: Any) -> TopkLogprobs:
            return greedy_topk(logits, wanted, *rest)

        return transformable(call)(logits, None, None, *rest)

    return Runner(
        jax.jit(transformable_topk, static_argnums=2),
        jax.jit(transformable_greedy, static_argnums=1),
        row_parts,
    )


class _Kernel(NamedTuple):
    """A function of an implementation's `run`, imported where a program is lowered for it.

    The import takes a third of a second, and needs parts of jax that may change.
    """

    implementation: str
    name: str
    position: int  # of `wanted` among the arguments
    wanted: Wanted
    otherwise: Callable[..., Any] | None  # what runs where kernels cannot; None: that is an error

    def here(self, *arguments: Any) -> Any:
        obstacle = self.obstacle()
        if obstacle is not None or (self.otherwise is not None and self.is_slower(arguments)):
            return self.elsewhere(*arguments, obstacle=obstacle)
        run = importlib.import_module(f"pallas_kernels.{self.implementation}.run")
        try:
            return getattr(run, self.name)(*self.complete(arguments))
        except DoesNotFit as error:
            obstacle = str(error)
        return self.elsewhere(*arguments, obstacle=obstacle)

    def obstacle(self) -> str | None:
        if self.implementation == "mosaic_tpu":
            return None
        capability = cuda_capability()  # of this host; None: the program is made for another one
        return None if capability is None else capability_obstacle(capability)

    def is_slower(self, arguments: tuple[Any, ...]) -> bool:
        """Whether XLA is faster on these shapes: `tpu_rule`. On a GPU: nowhere."""
        if self.implementation != "mosaic_tpu":
            return False
        logits, targets = arguments[:2]
        rows, k = logits.shape[0], max(self.wanted.k, 1)  # the fused path selects its choice
        if self.name != "greedy_topk_logprobs":
            rows, k = targets.shape[0], self.wanted.k
        return not kernel_is_faster(rows, logits.shape[1], k, logits.dtype.name)

    def elsewhere(self, *arguments: Any, obstacle: str | None = None) -> Any:
        if self.otherwise is None:
            refuse(self.implementation, obstacle or MISSING[self.implementation])
        return self.otherwise(*self.complete(arguments))

    def complete(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*arguments[: self.position], self.wanted, *arguments[self.position :])


PLATFORM = {"mosaic_gpu": "cuda", "mosaic_tpu": "tpu"}
MISSING = {
    "mosaic_gpu": "there is no CUDA device here",
    "mosaic_tpu": "there is no TPU here",
}


def _on(
    implementations: tuple[str, ...],
    name: str,
    position: int,
    otherwise: Callable[..., Result] | None,
    like: Callable[..., Result],
) -> Callable[..., Result]:
    """A function of arrays or None, and of a static `Wanted` at this position."""

    def call(*given: Any) -> Result:
        wanted = given[position]
        arguments = (*given[:position], *given[position + 1 :])
        kernels = {
            PLATFORM[one]: _Kernel(one, name, position, wanted, otherwise)
            for one in implementations
        }
        found: Result = lowered_for(
            *arguments,
            like=functools.partial(like, wanted),
            default=next(iter(kernels.values())).elsewhere,
            **{platform: kernel.here for platform, kernel in kernels.items()},
        )
        return found

    return call


def _like_greedy(wanted: Wanted, logits: jax.Array, *rest: Any) -> TopkLogprobs:
    return xla.like_topk_logprobs(wanted, logits, None, *rest)


def _with_kernels(
    implementations: tuple[str, ...],
    topk: Callable[..., TopkLogprobs] | None,
    greedy_topk: Callable[..., TopkLogprobs] | None,
    row_parts: Callable[..., RowParts] | None,
) -> Runner:
    """Kernels in programs for their platforms, these functions in programs for others."""
    return compiled(
        _on(implementations, "topk_logprobs", 2, topk, xla.like_topk_logprobs),
        _on(implementations, "greedy_topk_logprobs", 1, greedy_topk, _like_greedy),
        _on(implementations, "row_parts", 2, row_parts, xla.like_row_parts),
    )


XLA = compiled(xla.topk_logprobs, xla_greedy_topk_logprobs, xla.row_parts)
ONLY = {name: _with_kernels((name,), None, None, None) for name in PLATFORM}


@functools.cache
def fastest(implementations: tuple[str, ...]) -> Runner:
    """These kernels in programs for their platforms, XLA elsewhere."""
    if not implementations:
        return XLA
    return _with_kernels(
        implementations, xla.topk_logprobs, xla_greedy_topk_logprobs, xla.row_parts
    )
