"""Calls by every device on its own part of the arrays: all that is known of how JAX splits them.

An array's axes are written as a word with a letter for each: "nv" are logits [N, V]. `Layout` says
which mesh axes split n, the rows or slots, and v, the vocabulary. What other letters name is whole
on every device.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from pallas_kernels.lowering.implementation import kept
from pallas_kernels.meshes.vocab_shard import AxisName, VocabShard

AnyMesh = Mesh | AbstractMesh  # the latter where a traced array tells
MeshAxes = tuple[str, ...]  # of a mesh, that split one dimension together
Arrays = TypeVar("Arrays")  # a tree of arrays
Words = tuple[str, ...]  # the axes of a tree's arrays, in their order
Result = TypeVar("Result")  # a tree of arrays
ROW, VOCABULARY, NAMED = "n", "v", "r"  # `NAMED`: rows that are named, whole on every device


class Layout(NamedTuple):
    """The mesh axes that split rows, and those that split the vocabulary."""

    rows: MeshAxes = ()
    vocabulary: MeshAxes = ()

    def shard(self, vocab_size: int | None) -> VocabShard:
        """What a device holds of the vocabulary."""
        return VocabShard(axis_name(self.vocabulary), vocab_size)

    def spec(self, word: str) -> PartitionSpec:
        """How an array with these axes is split."""
        axes = {ROW: axis_name(self.rows), VOCABULARY: axis_name(self.vocabulary)}
        return PartitionSpec(*(axes.get(letter) for letter in word))  # type: ignore[no-untyped-call]

    def even(self, mesh: AnyMesh, word: str, shape: Sequence[int]) -> "Layout":
        """Without the axes that do not divide an array of this shape: there it is gathered."""
        sizes = dict(zip(word, shape, strict=True))

        def dividing(axes: MeshAxes, letter: str) -> MeshAxes:
            return axes if sizes.get(letter, 0) % num_shards(mesh, axes) == 0 else ()

        return Layout(dividing(self.rows, ROW), dividing(self.vocabulary, VOCABULARY))


def layout_of(sharding: Sharding, ndim: int) -> Layout:
    """The layout of logits [N, ..., V] with this sharding."""
    if not isinstance(sharding, NamedSharding):
        return Layout()
    spec = (*sharding.spec, *[None] * ndim)[:ndim]
    return Layout(names_of(spec[0]), names_of(spec[-1]))


def may_be_split(logits: jax.Array) -> bool:
    """Whether the compiler may split these logits: traced, and all axes of the mesh automatic."""
    if not isinstance(logits, jax.core.Tracer):
        return False
    types = jax.typeof(logits).sharding.mesh.axis_types
    return all(kind == AxisType.Auto for kind in types)


def names_of(axis: AxisName | None) -> MeshAxes:
    """What is split over an axis, or several, or none, as a tuple."""
    if isinstance(axis, str):
        return (axis,)
    return axis if isinstance(axis, tuple) else ()  # `UNCONSTRAINED` is neither


def axis_name(axes: MeshAxes) -> AxisName | None:
    """The mesh axes as collectives and partitions take them."""
    return None if not axes else axes[0] if len(axes) == 1 else axes


def num_shards(mesh: AnyMesh, axes: MeshAxes) -> int:
    """Into how many parts the axes split a dimension."""
    return math.prod(mesh.shape[axis] for axis in axes)


Call = Callable[[Layout, Arrays], Result]  # one device's part, of arrays that are split so


def on_mesh(
    call: Call[Arrays, Result],
    mesh: AnyMesh,
    layout: Layout,
    arrays: Arrays,
    words: Words,
    of_result: str = ROW,
    manual: MeshAxes | None = None,
) -> Result:
    """`call(layout, arrays)` by every device of the mesh, on its own part.

    Args:
      call: its results start with the axis `of_result`, and are the same on every vocabulary shard.
      mesh: may be one that JAX knows by an array's type alone.
      layout: how its axes split the arrays; these are moved there if their type is explicit.
      arrays: a tree.
      words: their axes.
      of_result: `ROW`, or `NAMED`.
      manual: mesh axes that `call` may name; None: those of the layout. The others are left alone.
    """
    leaves, tree = jax.tree.flatten(arrays)
    specs = [layout.spec(word) for word in words]
    if AxisType.Explicit in mesh.axis_types:
        leaves = [
            _moved(x, NamedSharding(mesh, spec)) for x, spec in zip(leaves, specs, strict=True)
        ]
    mapped: Callable[..., Result] = jax.shard_map(
        lambda *own: call(layout, jax.tree.unflatten(tree, own)),
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=layout.spec(of_result),
        axis_names={*layout.rows, *layout.vocabulary} if manual is None else {*manual},
    )
    return mapped(*leaves)


def _moved(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    there: jax.Array = jax.sharding.reshard(x, sharding)  # type: ignore[no-untyped-call]
    return there


@functools.cache
def program_on_mesh(
    call: Call[Arrays, Result], mesh: AnyMesh, layout: Layout, words: Words, of_result: str = ROW
) -> Callable[[Arrays], Result]:
    """`on_mesh` as a compiled function of the arrays, kept for equal arguments.

    `call` must be the same object for equal calls.
    """
    return jax.jit(lambda arrays: on_mesh(call, mesh, layout, arrays, words, of_result))


def where_compiled(
    call: Call[Arrays, Result], arrays: Arrays, words: Words, of_result: str = ROW
) -> Result:
    """`call(layout, arrays)` where only the compiler knows how the arrays are split.

    With automatic mesh axes, XLA would gather the logits for what is looked up in them. The
    compiler asks `partition` with the split that it has found, and every device then computes on
    its own part. On one device the call is compiled as it is. Under `vmap` it is whole.

    Programs for several devices are not kept by JAX's persistent compilation cache, unless
    `jax_remove_custom_partitioning_ptr_from_cache_key` is set.

    Args:
      call: as for `on_mesh`. It closes over no traced value. Of no derivative.
      arrays: a tree; the first array is the logits, and tells how all are split.
      words: their axes; logits begin with n and end with v.
      of_result: as for `on_mesh`.
    """
    call = kept(call)  # the compiler asks for the parts after this function has returned
    leaves, tree = jax.tree.flatten(arrays)
    present = [word for x, word in zip(leaves, words, strict=True) if x.size]
    results: list[Result] = []  # their shapes, from the one trace of the call on whole logits

    def called(layout: Layout, given: tuple[jax.Array, ...]) -> Result:
        """With the arrays that are empty, which no sharding rule can name."""
        left = iter(given)
        sizes = {
            letter: size
            for x, word in zip(given, present, strict=True)
            for letter, size in zip(word, x.shape, strict=True)
            if letter in (ROW, VOCABULARY, NAMED)
        }

        def empty(x: jax.Array, word: str) -> jax.Array:
            of_axes = zip(word, x.shape, strict=True)
            return jnp.zeros([sizes.get(a, size) if size else 0 for a, size in of_axes], x.dtype)

        every = [
            next(left) if x.size else empty(x, word) for x, word in zip(leaves, words, strict=True)
        ]
        return call(layout, jax.tree.unflatten(tree, every))

    def whole(*given: jax.Array) -> list[jax.Array]:
        found = called(Layout(), given)
        results[:] = [jax.tree.map(jax.typeof, found)]
        return _not_empty(found)

    def rule(_: AnyMesh, *types: list[jax.ShapeDtypeStruct]) -> SdyShardingRule:
        found = [of_result + "." * (x.ndim - 1) for x in _not_empty(results)]
        return SdyShardingRule(_factors("a", present), _factors("r", found))

    def partition(
        mesh: AnyMesh, of_arguments: list[jax.ShapeDtypeStruct], of_results: list[jax.Array]
    ) -> tuple[AnyMesh, Callable[..., list[jax.Array]], list[Sharding], tuple[Sharding, ...]]:
        logits = of_arguments[0]
        layout = layout_of(logits.sharding, logits.ndim).even(mesh, present[0], logits.shape)

        def on_own(*given: jax.Array) -> list[jax.Array]:
            return _not_empty(called(layout, given))

        return (
            mesh,
            on_own,
            [NamedSharding(mesh, layout.spec(of_result)) for _ in of_results],
            tuple(NamedSharding(mesh, layout.spec(word)) for word in present),
        )

    program = custom_partitioning(whole)  # type: ignore[no-untyped-call]
    program.def_partition(partition, sharding_rule=rule)  # type: ignore[no-untyped-call]
    batched = jax.custom_batching.custom_vmap(lambda *given: program(*given))

    @batched.def_vmap
    def _vmap(
        _: int, is_batched: list[bool], *given: jax.Array
    ) -> tuple[list[jax.Array], list[bool]]:
        found = jax.vmap(whole, [0 if one else None for one in is_batched])(*given)
        return found, [True] * len(found)

    # What the compiler asks for later has no rule for a derivative.
    found = iter(batched(*jax.lax.stop_gradient(_not_empty(leaves))))
    outputs: Result = jax.tree.map(
        lambda x: next(found) if x.size else jnp.zeros(x.shape, x.dtype), results[0]
    )
    return outputs


def _not_empty(tree: Result) -> list[jax.Array]:
    """The arrays that have elements."""
    return [x for x in jax.tree.leaves(tree) if x.size]


def _factors(kind: str, words: list[str]) -> tuple[ArrayMapping, ...]:
    """Axes as a sharding rule names them: n, v and r are the same in all arrays, no others are."""

    def factors(index: int, word: str) -> ArrayMapping:
        own = [
            letter if letter in (ROW, VOCABULARY, NAMED) else f"{kind}{index}x{axis}"
            for axis, letter in enumerate(word)
        ]
        return ArrayMapping(*own)  # type: ignore[no-untyped-call]

    return tuple(factors(index, word) for index, word in enumerate(words))
