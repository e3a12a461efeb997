"""Which function computes a call: kernels in programs for their platform, XLA everywhere else.

`KERNELS` is the table: a new backend is a folder beside this file, and a line. A folder has a
module for each job (`rows`, `groups`, `draw`, ...), with the same names in all of them, and
`limits`: where its kernels can run, and where they are faster.

What the shapes forbid is known when a call is traced. Whether a program is for CUDA or a TPU, and
what the device forbids, is known when it is lowered.
"""

import importlib
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import NamedTuple, TypeVar

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from pallas_kernels.backends import proved
from pallas_kernels.backends.mosaic_gpu import limits as gpu
from pallas_kernels.backends.mosaic_tpu import limits as tpu
from pallas_kernels.contract.errors import DoesNotFit
from pallas_kernels.lowering.forms import Tree
from pallas_kernels.lowering.implementation import in_force, refuse
from pallas_kernels.lowering.platforms import lowered_for

_Result = TypeVar("_Result", bound=Tree)

# What XLA does, of constants that it was traced with and of a call's arguments.
ByXla = Callable[[Sequence[jax.Array], Sequence[Tree]], _Result]


class _Kernels(NamedTuple):
    """Where a backend's kernels run, and what stands in their way."""

    platform: str  # that programs are lowered for
    shape_obstacle: Callable[[jax.Array], str | None]  # of logits [N, V], on any device
    device_obstacle: Callable[[], str | None]  # of this host's devices, asked when lowering
    is_faster: Callable[[jax.Array, tuple[int, int] | None], bool]  # than XLA
    missing: str  # said where a program is lowered for another platform


KERNELS = {
    "mosaic_gpu": _Kernels(
        "cuda", gpu.obstacle, gpu.device_obstacle, gpu.is_faster, "there is no CUDA device here"
    ),
    "mosaic_tpu": _Kernels(
        "tpu", tpu.obstacle, lambda: None, tpu.is_faster, "there is no TPU here"
    ),
}


def gpu_obstacle(logits: jax.Array | jax.ShapeDtypeStruct) -> str | None:
    """Why a call with `implementation=None` takes no GPU kernel for logits [N, V] on these devices.

    None if it takes them.
    """
    name = in_force()
    if name not in (None, "mosaic_gpu"):
        return f"use_implementation({name!r}) is in force"
    obstacle = gpu.cannot_run(logits, gpu.cuda_capability())
    if obstacle is None and name is None:
        obstacles = (proved.obstacle("mosaic_gpu", job, "cuda") for job in ("rows", "groups"))
        obstacle = next((reason for reason in obstacles if reason is not None), None)
    return obstacle


def kernels_or_xla(
    job: str,
    by_kernels: Callable[..., _Result],
    by_xla: Callable[..., _Result],
    *arguments: Tree,
    logits: jax.Array,
    backends: tuple[str, ...] = tuple(KERNELS),
    size: tuple[int, int] | None = None,
) -> _Result:
    """The results of kernels in programs for their platform, and of XLA in others.

    `use_implementation` may name one; else kernels run wherever they can and are proved
    (`proved.py`). Under `vmap`, a batch goes to XLA.

    Args:
      job: the module of a backend's folder that does it; it is imported only where a program is
        lowered for the backend: that takes a third of a second, and needs parts of jax that may
        change.
      by_kernels: a function of that module and of the arguments.
      by_xla: a function of the arguments, with results of the same shapes and dtypes.
      arguments: trees of arrays.
      logits: [N, V], whose shape may be an obstacle.
      backends: those that have the job; another one that is named leaves it to XLA.
      size: target rows and columns that are selected, on which a backend's speed depends, beside
        the logits; None: neither. Only calls that name no implementation ask which is faster.

    Raises:
      NotImplementedError: it was asked for by name, and cannot run on logits of this shape; where
        it cannot run on the device, the lowering of the program says so.
    """
    implementation = in_force()
    if implementation not in (None, *backends):
        return by_xla(*arguments)
    explicit = implementation is not None
    names = [implementation] if implementation is not None else [*backends]
    shape_obstacles = {name: KERNELS[name].shape_obstacle(logits) for name in names}
    if implementation is not None:
        obstacle = shape_obstacles[implementation]
        if obstacle is not None:
            # Without the device, no other shape would help.
            absent = None if is_here(implementation) else KERNELS[implementation].missing
            refuse(implementation, f"{absent}, and {obstacle}" if absent else obstacle)
    else:
        able = [name for name, obstacle in shape_obstacles.items() if obstacle is None]
        names = [name for name in able if KERNELS[name].is_faster(logits, size)]
        if not names:
            return by_xla(*arguments)

    # Traced once, here: what the function found around it, as it is now, becomes an argument.
    traced, like = jax.make_jaxpr(by_xla, return_shape=True)(*arguments)
    tree = jax.tree.structure(like)

    def xla(constants: Sequence[jax.Array], call_arguments: Sequence[Tree]) -> _Result:
        closed = ClosedJaxpr(traced.jaxpr, constants)
        leaves = jaxpr_as_fun(closed)(*jax.tree.leaves(call_arguments))
        result: _Result = jax.tree.unflatten(tree, leaves)
        return result

    def elsewhere(constants: Sequence[jax.Array], call_arguments: Sequence[Tree]) -> _Result:
        if explicit:
            refuse(names[0], KERNELS[names[0]].missing)
        return xla(constants, call_arguments)

    platforms = {
        KERNELS[name].platform: _on_platform(name, job, by_kernels, xla, explicit=explicit)
        for name in names
    }
    return lowered_for(traced.consts, arguments, like=xla, default=elsewhere, **platforms)


def is_here(name: str) -> bool:
    """Whether this process has a device of the backend's platform."""
    return jax.default_backend() == {"cuda": "gpu"}.get(KERNELS[name].platform, "tpu")


def _on_platform(
    name: str, job: str, by_kernels: Callable[..., _Result], xla: ByXla[_Result], *, explicit: bool
) -> ByXla[_Result]:
    """The kernels, unless this host's device cannot run them; a batch of `vmap` goes to XLA."""

    @jax.custom_batching.custom_vmap
    def kernels(constants: Sequence[jax.Array], call_arguments: Sequence[Tree]) -> _Result:
        obstacle = KERNELS[name].device_obstacle()
        if obstacle is None and not explicit:
            obstacle = proved.obstacle(name, job, KERNELS[name].platform)
            if obstacle is not None:
                proved.warn_once(name, obstacle)
        if obstacle is None:
            try:
                module = importlib.import_module(f"pallas_kernels.backends.{name}.{job}")
                if not explicit and (name, job) not in _lowered:
                    _try_to_lower(name, module, by_kernels, call_arguments)
                    _lowered.add((name, job))
                return by_kernels(module, *call_arguments)
            except DoesNotFit as error:
                obstacle = str(error)
            except Exception as error:
                # Whatever it is, jax's private Mosaic parts have moved, or are not there.
                obstacle = f"jax {jax.__version__}: {type(error).__name__}: {error}"
                if explicit:
                    refuse(name, obstacle, error)
                warnings.warn(
                    f"XLA computes what the {name} kernels would: they cannot be lowered by "
                    f"{obstacle}", RuntimeWarning, stacklevel=1,
                )  # fmt: skip
        if explicit:
            refuse(name, obstacle)
        return xla(constants, call_arguments)

    @kernels.def_vmap
    def _(
        _: int,
        is_batched: list[Tree],
        constants: Sequence[jax.Array],
        call_arguments: Sequence[Tree],
    ) -> tuple[_Result, _Result]:
        axes = jax.tree.map(lambda batched: 0 if batched else None, is_batched)
        results: _Result = jax.vmap(xla, in_axes=tuple(axes))(constants, call_arguments)
        return results, jax.tree.map(lambda _: True, results)

    return kernels


# Backends and jobs that this process has lowered. What jax lowers once, it lowers again.
_lowered: set[tuple[str, str]] = set()


def _try_to_lower(
    name: str, module: ModuleType, by_kernels: Callable[..., Tree], call_arguments: Sequence[Tree]
) -> None:
    """Lower the kernels apart, so that an error leaves no half of them in the program at hand.

    In a thread of its own, since the contexts of the program at hand (meshes, what is being traced)
    belong to this one.

    Raises:
      Exception: whatever stands in the way.
    """
    leaves, tree = jax.tree.flatten(call_arguments)
    # Bare shapes: inside `jax.shard_map`, the types of these arrays name a mesh.
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]

    def run(*arrays: jax.Array) -> Tree:
        return by_kernels(module, *jax.tree.unflatten(tree, arrays))

    def lower() -> None:
        jax.jit(run).trace(*shapes).lower(lowering_platforms=(KERNELS[name].platform,))

    with ThreadPoolExecutor(1) as thread:
        thread.submit(lower).result()
