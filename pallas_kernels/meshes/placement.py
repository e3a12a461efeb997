"""Where a call's logits are: on one device, or split by rows, by the vocabulary, or by both.

    inside `jax.shard_map`   the caller names the vocabulary's axis; rows are the device's own
    sharding known           explicit axes, or an array that exists: `shard_map` on its axes
    sharding not known yet   traced with automatic axes: `partitioned` asks when it is compiled

In all of them every device reads its own part and only compact results travel.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.contract.types import Rows, TopkLogprobs, skipped_like
from pallas_kernels.meshes.vocab_shard import AxisName, VocabShard

AnyMesh = Mesh | AbstractMesh  # the latter where a traced array tells
Result = TypeVar("Result", bound=tuple[Any, ...])
ShardCall = Callable[[VocabShard, Rows], Result]  # one device's part of a call


class Layout(NamedTuple):
    """How logits [N, V] are split: the mesh axes of their rows and of their vocabulary."""

    rows: tuple[str, ...] = ()
    vocabulary: tuple[str, ...] = ()

    def spec(self) -> PartitionSpec:
        """The logits' partition."""
        return spec_of(self.rows, self.vocabulary)

    def shard(self, vocab_size: int | None) -> VocabShard:
        """What a device holds of the vocabulary."""
        return VocabShard(_axis_name(self.vocabulary), vocab_size)


class Place(NamedTuple):
    """Where a call's logits are."""

    mesh: AnyMesh | None  # outside `shard_map`, the one that splits them
    layout: Layout  # of a mesh; inside `shard_map` the vocabulary's axis alone
    vocab_size: int  # V
    padded: bool  # columns of padding follow
    unknown: bool = False  # how they are split is not known before the program is compiled

    @property
    def shard(self) -> VocabShard:
        return self.layout.shard(self.vocab_size if self.padded else None)

    @property
    def is_split(self) -> bool:
        return bool(self.layout.rows or self.layout.vocabulary)


def placed(
    logits: jax.Array, axis_name: AxisName | None, mesh: Mesh | None, vocab_size: int | None
) -> Place:
    """Where the logits are, from what the caller says and the array tells.

    Raises:
      ValueError: a mesh without an axis, an axis that does not exist, columns that do not divide.
    """
    width, padded = logits.shape[1], vocab_size is not None
    if mesh is not None and axis_name is None:
        raise ValueError(f"mesh {mesh.shape} without axis_name; name the vocabulary's axis")
    if mesh is None and axis_name is not None:
        layout = Layout((), _names(axis_name))
        try:
            return Place(None, layout, layout.shard(vocab_size).size(width), padded)
        except NameError:
            raise ValueError(
                f"axis_name = {axis_name!r} is no axis of a shard_map around this call; outside "
                "one, pass mesh too"
            ) from None
    size = VocabShard(None, vocab_size).size(width)
    found, layout = _sharding_of(logits)
    if mesh is not None:
        assert axis_name is not None
        axes = _names(axis_name)
        if not {*axes} <= {*mesh.shape}:
            raise ValueError(f"axis_name = {axis_name!r} is not an axis of the mesh {mesh.shape}")
        check_columns(width, _count(mesh, axes), axes)
        if found is None and (mesh.size == _count(mesh, axes) or not _may_be_partitioned(logits)):
            return Place(mesh, Layout((), axes), size, padded)  # nothing else can be split
    if found is None:
        return Place(None, Layout(), size, padded, unknown=_may_be_partitioned(logits))
    check_columns(width, _count(found, layout.vocabulary), layout.vocabulary)
    return Place(found, layout, size, padded)


def check_columns(width: int, count: int, axes: tuple[str, ...]) -> None:
    """A ValueError where `width` columns do not divide into `count` shards."""
    if width % count:
        raise ValueError(
            f"{width} columns do not divide into the {count} shards of {_axis_name(axes)!r}; pad "
            f"them and pass vocab_size = {width}"
        )


def _sharding_of(logits: jax.Array) -> tuple[AnyMesh | None, Layout]:
    """The mesh and the layout of logits that tell them; None where they do not, or are whole."""
    is_traced = isinstance(logits, jax.core.Tracer)
    sharding = jax.typeof(logits).sharding if is_traced else logits.sharding
    layout = layout_of(sharding)
    mesh: AnyMesh | None = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return (mesh, layout) if layout != Layout() else (None, layout)


def layout_of(sharding: Any) -> Layout:
    """The layout of logits [N, V] with this sharding."""
    if not isinstance(sharding, NamedSharding):
        return Layout()
    spec = (*sharding.spec, None, None)[:2]
    return Layout(*(_names(axis) for axis in spec))


def _may_be_partitioned(logits: jax.Array) -> bool:
    """Whether the compiler may split these logits: traced, and all axes of the mesh automatic."""
    if not isinstance(logits, jax.core.Tracer):
        return False
    types = jax.typeof(logits).sharding.mesh.axis_types
    return all(kind == AxisType.Auto for kind in types)


def _names(axis: Any) -> tuple[str, ...]:
    if axis is None or axis is PartitionSpec.UNCONSTRAINED:
        return ()
    return tuple(axis) if isinstance(axis, tuple) else (axis,)


def _axis_name(axes: tuple[str, ...]) -> AxisName | None:
    return None if not axes else axes[0] if len(axes) == 1 else axes


def _count(mesh: AnyMesh, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def spec_of(*axes: tuple[str, ...]) -> PartitionSpec:
    """One dimension for each tuple of mesh axes."""
    return PartitionSpec(*(_axis_name(one) for one in axes))  # type: ignore[no-untyped-call]


def on_own_rows(call: Callable[[Rows], Result], layout: Layout, rows: Rows) -> Result:
    """`call` on this device's rows, inside `shard_map` or what compiles like it.

    Args:
      call: skips a row whose id is outside [0, N).
      layout: how the rows are split.
      rows: the logits are the device's own part. Without row_ids, so are all arrays of target rows,
        and the result; with row_ids they, and the result, are the same on every device.
    """
    if not layout.rows:
        return call(rows)
    count = rows.logits.shape[0]
    first = lax.axis_index(layout.rows) * count
    if rows.row_ids is None:
        if rows.num_rows is not None:
            rows = rows._replace(num_rows=jnp.clip(rows.num_rows - first, 0, count))
        return call(rows)
    row_ids = rows.row_ids - first
    mine = (row_ids >= 0) & (row_ids < count)
    if rows.num_rows is not None:
        mine &= jnp.arange(rows.num_targets, dtype=jnp.int32) < rows.num_rows
    # The device's own target rows come first, so that it works on no others.
    order = jnp.argsort(~mine, stable=True)
    # Every array of target rows, in this order: the logits' place holds none of theirs.
    targets = rows._replace(logits=mine, row_ids=jnp.where(mine, row_ids, -1), num_rows=None)
    ordered: Rows = jax.tree.map(lambda x: x[order], targets)
    found = call(ordered._replace(logits=rows.logits, num_rows=mine.sum(dtype=jnp.int32)))
    place = jnp.argsort(order)
    over_rows = VocabShard(_axis_name(layout.rows))
    somewhere = over_rows.across_sum(mine.astype(jnp.int32)) > 0

    def joined(x: jax.Array, of_skipped: jax.Array) -> jax.Array:
        shape = (-1,) + (1,) * (x.ndim - 1)
        own = jnp.where(mine.reshape(shape), x[place], jnp.zeros_like(x))
        return jnp.where(somewhere.reshape(shape), over_rows.across_sum(own), of_skipped)

    assert isinstance(found, TopkLogprobs)
    outputs: Result = jax.tree.map(joined, found, skipped_like(found))
    return outputs


def run(place: Place, call: ShardCall[Result], rows: Rows) -> Result:
    """`call(shard, rows)` on every device's part of logits that a mesh splits.

    Args:
      place: where the logits are.
      call: the same object for equal calls, since compiled programs are kept by it. It takes this
        device's `VocabShard` and rows.
      rows: of the call.
    """
    mesh = place.mesh
    assert mesh is not None
    specs = specs_of(place.layout, rows)
    if AxisType.Explicit in mesh.axis_types:
        rows = jax.tree.map(lambda x, spec: _placed(NamedSharding(mesh, spec), x), rows, specs)
    program: Callable[[Rows], Result] = _mapped(
        mesh, place.layout, place.shard, call, rows.row_ids is None, specs
    )
    return program(rows)


def _placed(sharding: NamedSharding, x: jax.Array) -> jax.Array:
    there: jax.Array = jax.sharding.reshard(x, sharding)  # type: ignore[no-untyped-call]
    return there


def specs_of(layout: Layout, rows: Rows) -> Rows:
    """How a call's arrays are split where the logits are split so: a tree of partitions."""
    axes = layout.rows if rows.row_ids is None else ()
    of_targets: Rows = jax.tree.map(
        lambda x: spec_of(axes, *[()] * (x.ndim - 1)) if x.ndim else spec_of(), rows
    )
    return of_targets._replace(logits=layout.spec())  # type: ignore[arg-type]


@functools.cache
def _mapped(
    mesh: AnyMesh,
    layout: Layout,
    shard: VocabShard,
    call: ShardCall[Result],
    aligned: bool,
    specs: Rows,
) -> Callable[[Rows], Result]:
    """The call on every device's part; the mesh's other axes are left as they are."""
    mapped: Callable[[Rows], Result] = jax.jit(
        jax.shard_map(
            lambda rows: on_own_rows(functools.partial(call, shard), layout, rows),
            mesh=mesh,
            in_specs=(specs,),
            out_specs=spec_of(layout.rows if aligned else ()),
            axis_names={*layout.rows, *layout.vocabulary},
        )
    )
    return mapped
