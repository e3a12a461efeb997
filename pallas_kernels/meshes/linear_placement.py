"""Where hidden states and a head are: on one device, or split over a mesh.

inside `jax.shard_map`   the caller names the vocabulary's axis; rows are the device's own
mesh and axes named      `shard_map` on them, under any `jit`
sharding known           explicit axes, or arrays that exist: the same on theirs
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.meshes.placement import layout_of, spec_of
from pallas_kernels.meshes.vocab_shard import AxisName, VocabShard

AnyMesh = Mesh | AbstractMesh
Axes = tuple[str, ...]
Outputs = TypeVar("Outputs")


class Place(NamedTuple):
    """Where the arrays of a call are."""

    mesh: AnyMesh | None  # outside of `shard_map`, the one that splits them
    rows: Axes  # the mesh axes of hidden's rows
    vocabulary: Axes  # of the head's
    vocab_size: int  # V
    padded: bool  # rows of padding follow in the head
    head_axis: int = 0  # of its tokens

    @property
    def shard(self) -> VocabShard:
        """What a device holds of the vocabulary."""
        return VocabShard(name_of(self.vocabulary), self.vocab_size if self.padded else None)


def name_of(axes: Axes) -> AxisName | None:
    """Mesh axes as collectives take them."""
    return None if not axes else axes[0] if len(axes) == 1 else axes


def placed(
    hidden: jax.Array,
    head: jax.Array,
    mesh: Mesh | None,
    axis_name: AxisName | None,
    row_axis_name: AxisName | None,
    vocab_size: int | None,
    head_axis: int = 0,
) -> Place:
    """Where the arrays are, from what the caller says and they tell.

    Raises:
      ValueError: a mesh without an axis, an axis that does not exist, rows that do not divide.
    """
    rows, vocabulary = _names(row_axis_name), _names(axis_name)
    width, padded = head.shape[head_axis], vocab_size is not None
    if mesh is None and row_axis_name is not None:
        raise ValueError(
            f"row_axis_name = {row_axis_name!r} without mesh; inside a shard_map the rows are the "
            "device's own and need no name, outside pass mesh too"
        )
    if mesh is None and vocabulary:
        try:
            size = VocabShard(name_of(vocabulary), vocab_size).size(width)
        except NameError:
            raise ValueError(
                f"axis_name = {axis_name!r} is no axis of a shard_map around this call; outside "
                "one, pass mesh too"
            ) from None
        return Place(None, (), vocabulary, size, padded, head_axis)
    found: AnyMesh | None = mesh
    if mesh is None:
        found, rows, vocabulary = _told(hidden, head, head_axis)
    elif not rows and not vocabulary:
        raise ValueError(
            f"mesh {dict(mesh.shape)} without axis_name or row_axis_name; name the vocabulary's "
            "axis, or the rows'"
        )
    if found is not None:
        _check_axes(found, rows, vocabulary)
        _check_divides("hidden", hidden.shape[0], found, rows, "pad them")
        _check_divides("head", width, found, vocabulary, f"pad them, vocab_size = {width}")
    size = VocabShard(None, vocab_size).size(width)
    return Place(found, rows, vocabulary, size, padded, head_axis)


def _names(axis: AxisName | None) -> Axes:
    if axis is None:
        return ()
    return axis if isinstance(axis, tuple) else (axis,)


def _told(hidden: jax.Array, head: jax.Array, head_axis: int) -> tuple[AnyMesh | None, Axes, Axes]:
    """The mesh and the axes that the arrays tell; no mesh where they are whole or do not tell."""
    shardings: list[Any] = [
        jax.typeof(x).sharding if isinstance(x, jax.core.Tracer) else x.sharding
        for x in (hidden, head)
    ]
    rows, vocabulary = layout_of(shardings[0]).rows, layout_of(shardings[1])[head_axis]
    split = [s for s, axes in zip(shardings, (rows, vocabulary), strict=True) if axes]
    return (split[0].mesh if split else None), rows, vocabulary


def _check_axes(mesh: AnyMesh, rows: Axes, vocabulary: Axes) -> None:
    for axis in (*rows, *vocabulary):
        if axis not in mesh.shape:
            raise ValueError(f"{axis!r} is not an axis of the mesh {dict(mesh.shape)}")
    if {*rows} & {*vocabulary}:
        raise ValueError(
            f"rows over {rows} and the vocabulary over {vocabulary} share a mesh axis; split them "
            "over different ones"
        )


def _check_divides(name: str, size: int, mesh: AnyMesh, axes: Axes, way_out: str) -> None:
    count = 1
    for axis in axes:
        count *= mesh.shape[axis]
    if size % count:
        raise ValueError(
            f"{size} rows of {name} do not divide into the {count} shards of {axes}; {way_out}"
        )


def run(place: Place, call: Callable[..., Outputs], arguments: tuple[Any, ...]) -> Outputs:
    """`call(*arguments)` on every device's part of them, where a mesh splits them.

    Args:
      place: where they are.
      call: the same object for equal calls, since compiled programs are kept by it.
      arguments: hidden, head, bias, token_ids, row_ids, num_rows and arrays of target rows; some
        None.
    """
    if place.mesh is None:
        return call(*arguments)
    specs = specs_of(place.rows, place.vocabulary, len(arguments), place.head_axis)
    if AxisType.Explicit in place.mesh.axis_types:
        arguments = tuple(
            None if x is None else jax.sharding.reshard(x, NamedSharding(place.mesh, spec))  # type: ignore[no-untyped-call]
            for x, spec in zip(arguments, specs, strict=True)
        )
    present = tuple(x is not None for x in arguments)
    program: Callable[..., Outputs] = _mapped(
        place.mesh, place.rows, place.vocabulary, place.head_axis, call, present
    )
    return program(*(x for x in arguments if x is not None))


def specs_of(
    rows: Axes, vocabulary: Axes, count: int, head_axis: int = 0
) -> tuple[PartitionSpec, ...]:
    """How the arguments of `run` are split."""
    own, whole = spec_of(rows), spec_of()
    head = spec_of((), vocabulary) if head_axis else spec_of(vocabulary)
    first = (own, head, spec_of(vocabulary), own, whole, whole)
    return (*first, *(own for _ in range(count - len(first))))


@functools.cache
def _mapped(
    mesh: AnyMesh,
    rows: Axes,
    vocabulary: Axes,
    head_axis: int,
    call: Callable[..., Outputs],
    present: tuple[bool, ...],
) -> Callable[..., Outputs]:
    """The call on every device's part; the mesh's other axes are left as they are."""
    specs = specs_of(rows, vocabulary, len(present), head_axis)

    def of_device(*arrays: jax.Array) -> Outputs:
        left = iter(arrays)
        arguments = [next(left) if there else None for there in present]
        num_rows, hidden = arguments[5], arguments[0]
        if num_rows is not None and rows:
            assert hidden is not None
            count = hidden.shape[0]
            arguments[5] = jnp.clip(num_rows - lax.axis_index(rows) * count, 0, count)
        return call(*arguments)

    mapped: Callable[..., Outputs] = jax.jit(
        jax.shard_map(
            of_device,
            mesh=mesh,
            in_specs=tuple(spec for spec, there in zip(specs, present, strict=True) if there),
            out_specs=spec_of(rows),
            axis_names={*rows, *vocabulary},
        )
    )
    return mapped
