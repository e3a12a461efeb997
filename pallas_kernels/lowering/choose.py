"""Which function computes a call: kernels in programs for their platform, XLA everywhere else.

`KERNELS` is the table: a new backend is a folder next to `backends/xla`, and a line. A folder has a
module for each job (`rows`, `groups`, `draw`, ...), with the same names in all of them.

What the shapes forbid is known when a call is traced. Whether a program is for CUDA or a TPU, and
what the device forbids, is known when it is lowered: a CUDA host may run a program on its CPU, and
any host may export one for CUDA. `lowered_for` traces only the function of the platform that a
program is lowered for: the others cost nothing, and may import what only their platform has.
(`jax.lax.platform_dependent` traces all of them.)

Calls that name no implementation take that of a context. jax holds its value for each thread, and
it is a part of the key under which `jax.jit` keeps what it traced: a function that was compiled
under one value is traced again under another.
"""

import functools
import importlib
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Literal, NamedTuple, NoReturn, ParamSpec, TypeVar, get_args

import jax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

from pallas_kernels.lowering.forms import Tree, vary_like

Implementation = Literal["xla", "mosaic_gpu", "mosaic_tpu"]


MIN_CAPABILITY = 9.0

MIN_VOCABULARY = 2048  # one block of the narrowest groups, see mosaic_gpu/schedule

MAX_LOGITS = 2**31 - 1

MAX_TPU_VOCABULARY = 2**19  # of which two units of rows take half of a v5p's VMEM


class DoesNotFit(NotImplementedError):
    """The memory of the chip that a program is lowered for is too small for a kernel."""


def check_name(implementation: str | None) -> None:
    """Raise ValueError if there is no implementation of this name; None is the choice of one."""
    if implementation is not None and implementation not in get_args(Implementation):
        raise ValueError(
            f"implementation = {implementation!r} is not known; choose one of "
            f"{', '.join(map(repr, get_args(Implementation)))} or None"
        )


def refuse(implementation: str, obstacle: str, cause: Exception | None = None) -> NoReturn:
    """Say why an implementation cannot run."""
    raise NotImplementedError(
        f"implementation = {implementation!r} cannot run: {obstacle}; use 'xla' or None"
    ) from cause


def tpu_obstacle(logits: jax.Array | jax.ShapeDtypeStruct) -> str | None:
    """Why the TPU kernel cannot run on logits [N, V] on any TPU; None if it can."""
    if not all(isinstance(size, int) for size in logits.shape):
        return f"the shape {logits.shape} is symbolic, and a kernel's grid is not"
    if logits.shape[1] > MAX_TPU_VOCABULARY:
        return f"rows of {logits.shape[1]} logits do not fit VMEM ({MAX_TPU_VOCABULARY} do)"
    return None


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


def device_obstacle() -> str | None:
    """Why the GPU kernels cannot run on this host's CUDA devices; None without any."""
    capability = cuda_capability()  # None: the program is made for another host
    return None if capability is None else capability_obstacle(capability)


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


# The least vocabulary for which the kernel takes fewer cycles, for so many columns of a top K.
LEAST_VOCABULARY = ((5, 512), (1, 8192), (0, 32_768))

# So many columns of a top K are few enough for the stacks of each 16384 tokens, up to 512: where
# there are more, most rows would be swept over K times. Rows of random logits overflow at 128 of
# 16384, and not at 128 of 32768 or 512 of 131072.
REACH, REACHED = 64, 16_384

# A unit of 16-bit rows has 16 of them; so many or fewer leave half of every register empty.
HALF_EMPTY_ROWS = range(2, 9)


def kernel_is_faster(rows: int, vocabulary: int, k: int, dtype: str) -> bool:
    """Whether the kernel takes fewer cycles than XLA on a v6e; not where a size is symbolic.

    Args:
      rows: target rows.
      vocabulary: V, or the columns of a shard.
      k: columns that are selected.
      dtype: of the logits.
    """
    if not all(isinstance(size, int) for size in (rows, vocabulary)):
        return False
    if k > REACH * max(1, min(8, vocabulary // REACHED)):
        return False
    if k == 0 and dtype == "bfloat16" and rows in HALF_EMPTY_ROWS:
        return False
    return vocabulary >= next(least for least_k, least in LEAST_VOCABULARY if k >= least_k)


Arguments = ParamSpec("Arguments")

Kept = TypeVar("Kept")
Result = TypeVar("Result", bound=Tree)


_named = jax.make_user_context(None)  # type: ignore[no-untyped-call]


def use_implementation(name: str | None) -> AbstractContextManager[None]:
    """A context in which calls with `implementation=None` take this implementation.

    Everything in `pallas_kernels` and `pallas_kernels.sampling` that has kernels takes part; a call
    that names an implementation of its own keeps it, and XLA does what a backend has no kernel for.
    The value holds for this thread, also while `jax.jit` traces, and is a part of jit's cache key.

        with use_implementation("xla"):  # a way out, if a kernel fails on your device
            out = step(params, logits)

    Args:
      name: "xla", "mosaic_gpu", "mosaic_tpu"; None: kernels wherever they can run, as without it.

    Raises:
      ValueError: there is no such implementation.
    """
    check_name(name)
    return _named(name)  # type: ignore[no-any-return]


def resolved(implementation: Implementation | None) -> Implementation | None:
    """The implementation that a call named, else that of the context; None where neither does."""
    return _named.value if implementation is None else implementation


def kept(function: Callable[Arguments, Kept]) -> Callable[Arguments, Kept]:
    """The function with today's value, for the compiler that calls it later, in any thread."""
    name = _named.value

    @functools.wraps(function)
    def call(*arguments: Arguments.args, **more: Arguments.kwargs) -> Kept:
        with _named(name):
            return function(*arguments, **more)

    return call


def gpu_obstacle(logits: jax.Array | jax.ShapeDtypeStruct) -> str | None:
    """Why a call with `implementation=None` takes no GPU kernel for logits [N, V] on these devices.

    None if it takes them.
    """
    name = resolved(None)
    if name not in (None, "mosaic_gpu"):
        return f"use_implementation({name!r}) is in force"
    return cannot_run(logits, cuda_capability())


PLATFORMS = ("cpu", "cuda", "tpu")


Flat = Callable[..., list[jax.Array]]  # of arrays

Named = tuple[tuple[str, Flat], ...]  # by platform

Static = Flat | Named  # what the choice's primitive has beside arrays


def _flat(function: Callable[..., Tree], tree: jax.tree_util.PyTreeDef) -> Flat:
    """A function of the arrays of `tree`, which returns a list of arrays."""
    return lambda *arrays: jax.tree.leaves(function(*jax.tree.unflatten(tree, arrays)))


def lowered_for(
    *arguments: Tree,
    like: Callable[..., Result],
    default: Callable[..., Result],
    **others: Callable[..., Result],
) -> Result:
    """What the platform's function returns: one of `others` by name ("cpu"), else `default`.

    All functions take the arguments, trees of arrays. `like` is traced for the results' shapes and
    dtypes alone. Under `shard_map` the results vary over every mesh axis over which an argument
    does: that is a part of their type. The function that is traced later finds the implementation
    that is named now.
    """
    arrays, tree = jax.tree.flatten(arguments)
    default = kept(default)
    others = {name: kept(other) for name, other in others.items()}
    functions = {name: _flat(others.get(name, default), tree) for name in PLATFORMS}
    # The results' tree, from when `_choice` traces `typed` for their types.
    results: list[jax.tree_util.PyTreeDef] = []

    def typed(*given: Tree) -> Result:
        result = vary_like(like(*given), given)
        results[:] = [jax.tree.structure(result)]
        return result

    found = _choice.bind(  # type: ignore[no-untyped-call]
        *arrays,
        like=_flat(typed, tree),
        default=_flat(default, tree),
        functions=tuple(functions.items()),
    )
    return jax.tree.unflatten(results[0], found)  # type: ignore[no-any-return]


_choice = Primitive("lowered_for")

_choice.multiple_results = True


def _types(*avals: ShapedArray, like: Flat, **_: Static) -> list[ShapedArray]:
    return list(jax.make_jaxpr(like)(*avals).out_avals)


def _run(*arrays: jax.Array, **params: Static) -> list[jax.Array]:
    # One operation to whoever looks at each: without `jit` it would call itself for ever.
    with jax.disable_jit(False):
        return jax.jit(functools.partial(_choice.bind, **params))(*arrays)  # type: ignore[no-any-return]


def _lowering(
    name: str | None,
    ctx: mlir.LoweringRuleContext,
    *values: mlir.ir.Value,
    default: Flat,
    functions: Named,
    like: Flat,
) -> Sequence[mlir.ir.Value]:
    function = default if name is None else dict(functions)[name]
    return mlir.lower_fun(function)(ctx, *values)  # type: ignore[no-any-return]


_choice.def_abstract_eval(_types)  # type: ignore[no-untyped-call]

_choice.def_impl(_run)  # type: ignore[no-untyped-call]

mlir.register_lowering(_choice, functools.partial(_lowering, None))

for _name in PLATFORMS:
    mlir.register_lowering(_choice, functools.partial(_lowering, _name), platform=_name)


def _batched(
    arrays: Sequence[jax.Array],
    axes: Sequence[int | None],
    *,
    like: Flat,
    default: Flat,
    functions: Named,
) -> tuple[list[jax.Array], list[int]]:
    def over_batch(one: Flat) -> Flat:
        return jax.vmap(one, in_axes=tuple(axes))

    found = _choice.bind(  # type: ignore[no-untyped-call]
        *arrays,
        like=over_batch(like),
        default=over_batch(default),
        functions=tuple((name, over_batch(function)) for name, function in functions),
    )
    return found, [0] * len(found)


batching.primitive_batchers[_choice] = _batched


# What XLA does, of constants that it was traced with and of a call's arguments.
ByXla = Callable[[Sequence[jax.Array], Sequence[Tree]], Result]


class Kernels(NamedTuple):
    """Where a backend's kernels run, and what stands in their way."""

    platform: str  # that programs are lowered for
    shape_obstacle: Callable[[jax.Array], str | None]  # of logits [N, V], on any device
    device_obstacle: Callable[[], str | None]  # of this host's devices, asked when lowering
    missing: str  # said where a program is lowered for another platform


KERNELS = {
    "mosaic_gpu": Kernels("cuda", shape_obstacle, device_obstacle, "there is no CUDA device here"),
    "mosaic_tpu": Kernels("tpu", tpu_obstacle, lambda: None, "there is no TPU here"),
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
      backends: those that have the job; another one that is named leaves it to XLA.
      faster_on_tpu: whether the TPU's kernels are faster than XLA; only None asks.

    Raises:
      ValueError: there is no such implementation.
      NotImplementedError: it was asked for by name, and cannot run on logits of this shape; where
        it cannot run on the device, the lowering of the program says so.
    """
    check_name(implementation)
    implementation = resolved(implementation)
    if implementation not in (None, *backends):
        return by_xla(*arguments)
    explicit = implementation is not None
    names = [implementation] if implementation is not None else [*backends]
    found = {name: KERNELS[name].shape_obstacle(logits) for name in names}
    if implementation is not None:
        obstacle = found[implementation]
        if obstacle is not None:
            # Without the device, no other shape would help.
            absent = None if is_here(implementation) else KERNELS[implementation].missing
            refuse(implementation, f"{absent}, and {obstacle}" if absent else obstacle)
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
        return jax.tree.unflatten(tree, jaxpr_as_fun(closed)(*jax.tree.leaves(given)))  # type: ignore[no-any-return]

    def elsewhere(constants: Sequence[jax.Array], given: Sequence[Tree]) -> Result:
        if explicit:
            refuse(names[0], KERNELS[names[0]].missing)
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
    name: str, job: str, by_kernels: Callable[..., Result], xla: ByXla[Result], *, explicit: bool
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
        return xla(constants, given)

    @kernels.def_vmap
    def _(
        _: int, is_batched: list[Tree], constants: Sequence[jax.Array], given: Sequence[Tree]
    ) -> tuple[Result, Result]:
        axes = jax.tree.map(lambda batched: 0 if batched else None, is_batched)
        found: Result = jax.vmap(xla, in_axes=tuple(axes))(constants, given)
        return found, jax.tree.map(lambda _: True, found)

    return kernels


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
