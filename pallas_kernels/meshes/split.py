"""Calls by every device on its own part of the arrays, of topk, linear and sampling.

Explicit axes are part of an array's type, so a function that mixes split and whole arrays would
have to name a sharding at every step. Each device computes on its own rows and columns instead.
"""

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.sharding import AxisType, NamedSharding, Sharding

from pallas_kernels.contract.rows import Rows
from pallas_kernels.lowering import typed
from pallas_kernels.lowering.implementation import bind_implementation
from pallas_kernels.meshes.placement import (
    NAMED,
    ROW,
    VOCABULARY,
    WHOLE,
    AnyMesh,
    MeshAxes,
    MeshLayout,
    Place,
    Split,
    VocabShard,
    axis_name,
    layout_of,
    may_be_split,
    names_of,
)

_Arrays = TypeVar("_Arrays")  # a tree of arrays
Words = tuple[str, ...]  # the axes of a tree's arrays, in their order
_Result = TypeVar("_Result")  # a tree of arrays
BySlot = TypeVar("BySlot")  # a tree of arrays [B, ...]


PartCall = Callable[
    [MeshLayout, _Arrays], _Result
]  # one device's part, of arrays that are split so


def on_mesh(
    call: PartCall[_Arrays, _Result],
    mesh: AnyMesh,
    layout: MeshLayout,
    arrays: _Arrays,
    words: Words,
    of_result: str = ROW,
    manual: MeshAxes | None = None,
) -> _Result:
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
    mapped: Callable[..., _Result] = jax.shard_map(
        lambda *arrays_of_device: call(layout, jax.tree.unflatten(tree, arrays_of_device)),
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=layout.spec(of_result),
        axis_names={*layout.rows, *layout.vocabulary} if manual is None else {*manual},
    )
    return mapped(*leaves)


def _moved(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    moved: jax.Array = jax.sharding.reshard(x, sharding)
    return moved


@functools.cache
def program_on_mesh(
    call: PartCall[_Arrays, _Result],
    mesh: AnyMesh,
    layout: MeshLayout,
    words: Words,
    of_result: str = ROW,
) -> Callable[[_Arrays], _Result]:
    """`on_mesh` as a compiled function of the arrays, kept for equal arguments.

    `call` must be the same object for equal calls.
    """
    return jax.jit(lambda arrays: on_mesh(call, mesh, layout, arrays, words, of_result))


def where_compiled(
    call: PartCall[_Arrays, _Result], arrays: _Arrays, words: Words, of_result: str = ROW
) -> _Result:
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
    call = bind_implementation(
        call
    )  # the compiler asks for the parts after this function has returned
    leaves, tree = jax.tree.flatten(arrays)
    # What the compiler calls holds no array of the caller's trace: jax would find it there.
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    present = [word for x, word in zip(types, words, strict=True) if x.size]
    results: list[_Result] = []  # their shapes, from the one trace of the call on whole logits

    def called(layout: MeshLayout, leaves_of_part: tuple[jax.Array, ...]) -> _Result:
        """With the arrays that are empty, which no sharding rule can name."""
        remaining = iter(leaves_of_part)
        sizes = {
            letter: size
            for x, word in zip(leaves_of_part, present, strict=True)
            for letter, size in zip(word, x.shape, strict=True)
            if letter in (ROW, VOCABULARY, NAMED)
        }

        def empty(x: jax.ShapeDtypeStruct, word: str) -> jax.Array:
            of_axes = zip(word, x.shape, strict=True)
            return jnp.zeros([sizes.get(a, size) if size else 0 for a, size in of_axes], x.dtype)

        all_leaves = [
            next(remaining) if x.size else empty(x, word)
            for x, word in zip(types, words, strict=True)
        ]
        return call(layout, jax.tree.unflatten(tree, all_leaves))

    def undivided(*leaves_of_call: jax.Array) -> list[jax.Array]:
        outputs = called(MeshLayout(), leaves_of_call)
        results[:] = [jax.tree.map(jax.typeof, outputs)]
        return _not_empty(outputs)

    def rule(_: AnyMesh, *types: list[jax.ShapeDtypeStruct]) -> SdyShardingRule:
        specs = [of_result + "." * (x.ndim - 1) for x in _not_empty(results)]
        return SdyShardingRule(_factors("a", present), _factors("r", specs))

    def partition(
        mesh: AnyMesh, of_arguments: list[jax.ShapeDtypeStruct], of_results: list[jax.Array]
    ) -> tuple[AnyMesh, Callable[..., list[jax.Array]], list[Sharding], tuple[Sharding, ...]]:
        logits = of_arguments[0]
        layout = layout_of(logits.sharding, logits.ndim).even(mesh, present[0], logits.shape)

        def on_part(*leaves_of_part: jax.Array) -> list[jax.Array]:
            return _not_empty(called(layout, leaves_of_part))

        return (
            mesh,
            on_part,
            [NamedSharding(mesh, layout.spec(of_result)) for _ in of_results],
            tuple(NamedSharding(mesh, layout.spec(word)) for word in present),
        )

    program = custom_partitioning(undivided)
    program.def_partition(partition, sharding_rule=rule)
    batched = jax.custom_batching.custom_vmap(lambda *leaves_of_call: program(*leaves_of_call))

    @batched.def_vmap
    def _vmap(
        _: int, is_batched: list[bool], *leaves_of_call: jax.Array
    ) -> tuple[list[jax.Array], list[bool]]:
        axes = [0 if has_axis else None for has_axis in is_batched]
        outputs = jax.vmap(undivided, axes)(*leaves_of_call)
        return outputs, [True] * len(outputs)

    # What the compiler asks for later has no rule for a derivative.
    outputs = iter(batched(*jax.lax.stop_gradient(_not_empty(leaves))))
    return typed.tree_map(
        lambda x: next(outputs) if x.size else jnp.zeros(x.shape, x.dtype), results[0]
    )


def _not_empty(tree: _Result) -> list[jax.Array]:
    """The arrays that have elements."""
    return [x for x in jax.tree.leaves(tree) if x.size]


def _factors(kind: str, words: list[str]) -> tuple[ArrayMapping, ...]:
    """Axes as a sharding rule names them: n, v and r are the same in all arrays, no others are."""

    def factors(index: int, word: str) -> ArrayMapping:
        sizes = [
            letter if letter in (ROW, VOCABULARY, NAMED) else f"{kind}{index}x{axis}"
            for axis, letter in enumerate(word)
        ]
        return ArrayMapping(*sizes)

    return tuple(factors(index, word) for index, word in enumerate(words))


ShardCall = Callable[[VocabShard, Rows], _Result]  # one device's part of a call


def run_split(place: Place, call: ShardCall[_Result], rows: Rows) -> _Result:
    """`call(shard, rows)` on every device's part of the logits.

    Args:
      place: where the logits are.
      call: the same object for equal calls, since compiled programs are kept by it. It takes this
        device's `VocabShard` and rows, and skips a row whose id is outside [0, N).
      rows: of the call.
    """
    if place.is_here:
        return call(place.shard, rows)
    on_part = _on_own_rows(call, place.vocab_size if place.padded else None)
    letter: str = ROW if rows.row_ids is None else NAMED
    _, *others = jax.tree.leaves(rows)
    words = ("nv", *(letter + "." * (x.ndim - 1) if x.ndim else "" for x in others))
    if place.mesh is None:
        results: _Result = where_compiled(on_part, rows, words, letter)
    else:
        results = program_on_mesh(on_part, place.mesh, place.layout, words, letter)(rows)
    return results


def run_inputs(
    place: Place, call: PartCall[_Arrays, _Result], inputs: _Arrays, words: Words
) -> _Result:
    """`call(layout, inputs)` on every device's part of the inputs.

    Args:
      place: where they are.
      call: the same object for equal calls. Its results start with the axis of rows.
      inputs: a tree of arrays.
      words: their axes, as `split` has them.
    """
    if place.mesh is None:
        return call(place.layout, inputs)
    results: _Result = program_on_mesh(call, place.mesh, place.layout, words)(inputs)
    return results


@functools.cache
def _on_own_rows(
    call: ShardCall[_Result], vocab_size: int | None
) -> Callable[[MeshLayout, Rows], _Result]:
    """The call on this device's rows, for `split`; always the same object.

    Without row_ids, all arrays of target rows are the device's own part too, and so is the result.
    With row_ids they, and the result, are the same on every device.
    """

    def on_own_rows(layout: MeshLayout, rows: Rows) -> _Result:
        shard, count = layout.shard(vocab_size), rows.logits.shape[0]
        if rows.row_ids is None:
            return call(shard, rows._replace(num_rows=own_num_rows(layout, rows.num_rows, count)))
        if not layout.rows:
            return call(shard, rows)
        device, over_rows = lax.axis_index(layout.rows), VocabShard(axis_name(layout.rows))
        there = (rows.row_ids >= 0) & (rows.row_ids < over_rows.size(count))
        if rows.num_rows is not None:
            there &= jnp.arange(rows.num_targets, dtype=jnp.int32) < rows.num_rows
        row_ids = rows.row_ids - device * count
        is_on_device = there & (row_ids >= 0) & (row_ids < count)
        # The device's own target rows come first, so that it works on no others.
        order = jnp.argsort(~is_on_device, stable=True)
        # Every array of target rows, in this order: the logits' place holds none of theirs.
        targets = rows._replace(
            logits=is_on_device, row_ids=jnp.where(is_on_device, row_ids, -1), num_rows=None
        )
        ordered: Rows = jax.tree.map(lambda x: x[order], targets)
        ordered = ordered._replace(logits=rows.logits, num_rows=is_on_device.sum(dtype=jnp.int32))
        results, place = call(shard, ordered), jnp.argsort(order)
        # Each target row's results are those of one device: the first one skips what none has.
        is_on_device |= ~there & (device == 0)

        def joined(x: jax.Array) -> jax.Array:
            is_own_row = is_on_device.reshape(-1, *[1] * (x.ndim - 1))
            return over_rows.across_sum(jnp.where(is_own_row, x[place], jnp.zeros_like(x)))

        return typed.tree_map(joined, results)

    return on_own_rows


def own_num_rows(layout: MeshLayout, num_rows: jax.Array | None, count: int) -> jax.Array | None:
    """How many of this device's `count` rows are among the first num_rows of all devices'."""
    if num_rows is None or not layout.rows:
        return num_rows
    return jnp.clip(num_rows - lax.axis_index(layout.rows) * count, 0, count)


def on_own_part(
    call: Callable[[VocabShard, _Arrays, BySlot], _Result],
    logits: _Arrays,
    by_slot: BySlot,
    how: Split,
    *,
    by_row: bool = True,
    flat: frozenset[int] = frozenset(),
) -> _Result:
    """`call(shard, logits, by_slot)`, by each device on its own slots and columns.

    Args:
      call: its results start with the axis B, and are the same on every vocabulary shard.
      logits: arrays [B, ..., V] that are split alike; the first one's type tells how. The axes
        between B and V are gathered if they are split.
      by_slot: arrays [B, ...].
      how: the mesh axis that splits the columns, where the caller knows; slots are whole then.
        Without, the logits' type tells, or with automatic axes the compiler; then `call` closes
        over no traced value.
      by_row: static; else the first axis of the logits is not that of the slots, and all but the
        columns is whole on every device: gathered, where it is split.
      flat: static; which of the arrays of `logits` are [N, V] of rows that are no slot's, and
        are gathered so where `by_row` is true.

    Returns:
      The results, split by slots as the logits are.
    """
    first = jax.tree.leaves(logits)[0]
    arrays = (logits, by_slot)
    row = ROW if by_row else "."
    words = (
        *(
            ("." if index in flat else row) + "." * (x.ndim - 2) + "v"
            for index, x in enumerate(jax.tree.leaves(logits))
        ),
        *(row + "." * (x.ndim - 1) for x in jax.tree.leaves(by_slot)),
    )

    def of_part(layout: MeshLayout, arrays: tuple[_Arrays, BySlot]) -> _Result:
        logits, by_slot = arrays
        shard = layout.shard(how.vocab_size)
        if shard.axis_name is None:
            logits = jax.tree.map(lambda x: shard.without_padding(x)[0], logits)
            shard = WHOLE
        return call(shard, logits, by_slot)

    if how.mesh is not None:
        assert how.axis_name
        layout, manual = MeshLayout((), names_of(how.axis_name)), how.mesh.axis_names
        return on_mesh(of_part, how.mesh, layout, arrays, words, row, manual)
    if how.axis_name:
        return call(VocabShard(how.axis_name, how.vocab_size), logits, by_slot)
    sharding = jax.typeof(first).sharding
    if first.ndim >= 2 and AxisType.Explicit in sharding.mesh.axis_types:
        layout = layout_of(sharding, first.ndim)
        if layout != MeshLayout():
            if not by_row:
                layout = layout._replace(rows=())
            return on_mesh(of_part, sharding.mesh, layout, arrays, words, row)
    elif how == Split() and may_be_split(first):
        return where_compiled(of_part, arrays, words, row)
    return of_part(MeshLayout(), arrays)
