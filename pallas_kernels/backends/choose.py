"""Which backend computes a call: kernels in programs for their platform, XLA everywhere else.

`KERNELS` is the table: a new backend is a folder beside `mosaic_gpu` and a line. A backend's folder
has a module for each job (`rows`, `groups`, `draw`, ...), with the same names in all of them.

What the shapes forbid is known when a call is traced. Whether a program is for CUDA or a TPU is
known when it is lowered: a CUDA host may run one on its CPU, and any host may export one for CUDA.
"""

import importlib
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import NamedTuple, TypeVar

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from pallas_kernels.lowering import obstacles
from pallas_kernels.lowering.blocks import Tree
from pallas_kernels.lowering.implementation import resolved
from pallas_kernels.lowering.obstacles import Implementation
from pallas_kernels.lowering.platforms import lowered_for

Result = TypeVar("Result", bound=Tree)
# What XLA does, of constants that it was traced with and of a call's arguments.
ByXla = Callable[[Sequence[jax.Array], Sequence[Tree]], Result]


class Kernels(NamedTuple):
    """Where a backend's kernels run, and what stands in their way."""

    platform: str  # that programs are lowered for
    shape_obstacle: Callable[[jax.Array], str | None]  # of logits [N, V], on any device
    device_obstacle: Callable[[], str | None]  # of this host's devices, asked when lowering
    missing: str  # said where a program is lowered for another platform


KERNELS = {
    "mosaic_gpu": Kernels(
        "cuda",
        obstacles.shape_obstacle,
        obstacles.device_obstacle,
        "there is no CUDA device here",
    ),
    "mosaic_tpu": Kernels("tpu", obstacles.tpu_obstacle, lambda: None, "there is no TPU here"),
}


def kernels_or_xla(
    job: str,
    by_kernels: Callable[..., Result],
    by_xla: Callable[..., Result],
    *arguments: Tree,
    logits: jax.Array,
    implementation: Implementation | None = None,
    backends: tuple[str, ...] = tuple(KERNELS),
    faster_on_tpu: bool = True,
) -> Result:
    """What kernels make of the arguments in programs for their platform, and XLA in others.

    Under `vmap`, a batch goes to XLA.

    Args:
      job: the module of a backend's folder that does it; it is imported only where a program is
        lowered for the backend: that takes a third of a second, and needs parts of jax that may
        change.
      by_kernels: a function of that module and of the arguments.
      by_xla: a function of the arguments, with results of the same shapes and dtypes.
      arguments: trees of arrays.
      logits: [N, V], whose shape may be an obstacle.
      implementation: "xla", a name of `KERNELS`, or None: what `use_implementation` names, else
        kernels wherever they can run.
      backends: those that have the job.
      faster_on_tpu: whether the TPU's kernels are faster than XLA; only None asks.

    Raises:
      ValueError: there is no such implementation.
      NotImplementedError: it was asked for by name, and cannot run on logits of this shape; where
        it cannot run on the device, the lowering of the program says so.
    """
    obstacles.check_name(implementation)
    implementation = resolved(implementation)
    if implementation == "xla":
        return by_xla(*arguments)
    explicit = implementation is not None
    names = [implementation] if implementation is not None else [*backends]
    found = {name: KERNELS[name].shape_obstacle(logits) for name in names}
    if implementation is not None:
        obstacle = found[implementation]
        if obstacle is not None:
            # Without the device, no other shape would help.
            absent = None if is_here(implementation) else KERNELS[implementation].missing
            obstacles.refuse(implementation, f"{absent}, and {obstacle}" if absent else obstacle)
        if implementation not in backends:
            return by_xla(*arguments)
    else:
        slow = set() if faster_on_tpu else {"mosaic_tpu"}
        names = [name for name, obstacle in found.items() if obstacle is None and name not in slow]
        if not names:
            return by_xla(*arguments)

    # Traced once, here: what the function found around it, as it is now, becomes an argument.
    traced, like = jax.make_jaxpr(by_xla, return_shape=True)(*arguments)
    tree = jax.tree.structure(like)

    def xla(constants: Sequence[jax.Array], given: Sequence[Tree]) -> Result:
        closed = ClosedJaxpr(traced.jaxpr, constants)
        outputs: Result = jax.tree.unflatten(tree, jaxpr_as_fun(closed)(*jax.tree.leaves(given)))
        return outputs

    def elsewhere(constants: Sequence[jax.Array], given: Sequence[Tree]) -> Result:
        if explicit:
            obstacles.refuse(names[0], KERNELS[names[0]].missing)
        return xla(constants, given)

    platforms = {
        KERNELS[name].platform: _on_platform(name, job, by_kernels, xla, explicit=explicit)
        for name in names
    }
    return lowered_for(traced.consts, arguments, like=xla, default=elsewhere, **platforms)


def is_here(name: str) -> bool:
    """Whether this process has a device of the backend's platform."""
    return jax.default_backend() == {"cuda": "gpu"}.get(KERNELS[name].platform, "tpu")


def _on_platform(
    name: str,
    job: str,
    by_kernels: Callable[..., Result],
    xla: ByXla[Result],
    *,
    explicit: bool,
) -> ByXla[Result]:
    """The kernels, unless this host's device cannot run them; a batch of `vmap` goes to XLA."""

    @jax.custom_batching.custom_vmap
    def kernels(constants: Sequence[jax.Array], given: Sequence[Tree]) -> Result:
        obstacle = KERNELS[name].device_obstacle()
        if obstacle is None:
            try:
                module = importlib.import_module(f"pallas_kernels.backends.{name}.{job}")
                if not explicit and (name, job) not in _lowered:
                    _try_to_lower(name, module, by_kernels, given)
                    _lowered.add((name, job))
                return by_kernels(module, *given)
            except obstacles.DoesNotFit as error:
                obstacle = str(error)
            except Exception as error:
                # Whatever it is, jax's private Mosaic parts have moved, or are not there.
                obstacle = f"jax {jax.__version__}: {type(error).__name__}: {error}"
                if explicit:
                    obstacles.refuse(name, obstacle, error)
                warnings.warn(
                    f"XLA computes what the {name} kernels would: they cannot be lowered by "
                    f"{obstacle}", RuntimeWarning, stacklevel=1,
                )  # fmt: skip
        if explicit:
            obstacles.refuse(name, obstacle)
        return xla(constants, given)

    @kernels.def_vmap
    def _(
        _: int, is_batched: list[Tree], constants: Sequence[jax.Array], given: Sequence[Tree]
    ) -> tuple[Result, Result]:
        axes = jax.tree.map(lambda batched: 0 if batched else None, is_batched)
        found: Result = jax.vmap(xla, in_axes=tuple(axes))(constants, given)
        return found, jax.tree.map(lambda _: True, found)

    run: ByXla[Result] = kernels
    return run


# Backends and jobs that this process has lowered. What jax lowers once, it lowers again.
_lowered: set[tuple[str, str]] = set()


def _try_to_lower(
    name: str, module: ModuleType, by_kernels: Callable[..., Tree], given: Sequence[Tree]
) -> None:
    """Lower the kernels apart, so that an error leaves no half of them in the program at hand.

    In a thread of its own, since the contexts of the program at hand (meshes, what is being traced)
    belong to this one.

    Raises:
      Exception: whatever stands in the way.
    """
    leaves, tree = jax.tree.flatten(given)
    # Bare shapes: inside `jax.shard_map`, the types of these arrays name a mesh.
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]  # type: ignore[no-untyped-call]

    def run(*arrays: jax.Array) -> Tree:
        return by_kernels(module, *jax.tree.unflatten(tree, arrays))

    def lower() -> None:
        jax.jit(run).trace(*shapes).lower(lowering_platforms=(KERNELS[name].platform,))

    with ThreadPoolExecutor(1) as thread:
        thread.submit(lower).result()
