"""Where a call's logits are: on one device, or split by rows, by the vocabulary, or by both.

    inside `jax.shard_map`   the caller names the vocabulary's axis; rows are the device's own
    sharding known           explicit axes, or an array that exists: `shard_map` on its axes
    sharding not known yet   traced with automatic axes: `partitioned` asks when it is compiled

In all of them every device reads its own part and only compact results travel.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.backends.answers import skipped_rows
from pallas_kernels.contract.types import TopkLogprobs
from pallas_kernels.contract.wanted import Wanted
from pallas_kernels.meshes.vocab_shard import AxisName, VocabShard

AnyMesh = Mesh | AbstractMesh  # the latter where a traced array tells
# (logits, token_ids, row_ids, num_rows, temperatures, extra_token_ids, changes), some of them None;
# without token_ids: of the greedy choice. Changes are `pallas_kernels.contract.changes.Changes`.
Arguments = tuple[Any, ...]
Outputs = TypeVar("Outputs", bound=tuple[Any, ...], covariant=True)


class ShardCall(Protocol[Outputs]):
    """One device's part of a call."""

    def __call__(self, shard: VocabShard, /, *arguments: Any) -> Outputs: ...

    def __hash__(self) -> int: ...


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


def on_own_rows(call: Callable[..., Outputs], layout: Layout, arguments: Arguments) -> Outputs:
    """`call` on this device's rows, inside `shard_map` or what compiles like it.

    Args:
      call: a function of `Arguments`, which skips a row whose id is outside [0, N).
      layout: how the rows are split.
      arguments: logits are the device's own part. Without row_ids, so are all arrays of target
        rows, and the result; with row_ids they, and the result, are the same on every device.
    """
    logits, token_ids, row_ids, num_rows, *others = arguments
    if not layout.rows:
        return call(*arguments)
    count = logits.shape[0]
    first = lax.axis_index(layout.rows) * count
    if row_ids is None:
        if num_rows is not None:
            num_rows = jnp.clip(num_rows - first, 0, count)
        return call(logits, token_ids, None, num_rows, *others)
    rows = row_ids - first
    mine = (rows >= 0) & (rows < count)
    if num_rows is not None:
        mine &= jnp.arange(row_ids.shape[0], dtype=jnp.int32) < num_rows
    # The device's own target rows come first, so that it works on no others.
    order = jnp.argsort(~mine, stable=True)

    token_ids, *others = jax.tree.map(lambda x: x[order], (token_ids, *others))
    found = call(
        logits,
        token_ids,
        jnp.where(mine, rows, -1)[order],
        mine.sum(dtype=jnp.int32),
        *others,
    )
    place = jnp.argsort(order)
    over_rows = VocabShard(_axis_name(layout.rows))
    somewhere = over_rows.across_sum(mine.astype(jnp.int32)) > 0

    def joined(x: jax.Array, of_skipped: jax.Array) -> jax.Array:
        shape = (-1,) + (1,) * (x.ndim - 1)
        own = jnp.where(mine.reshape(shape), x[place], jnp.zeros_like(x))
        return jnp.where(somewhere.reshape(shape), over_rows.across_sum(own), of_skipped)

    assert isinstance(found, TopkLogprobs)
    num_targets, num_extra = found.extra_logprobs.shape
    like = Wanted(
        found.token_ids.shape[1] - 1,
        found.log_sum_exp is not None,
        found.entropy is not None,
        found.top_logits is not None,
    )
    outputs: Any = jax.tree.map(joined, found, skipped_rows(num_targets, like, num_extra))
    joined_outputs: Outputs = outputs
    return joined_outputs


def run(place: Place, call: ShardCall[Outputs], arguments: Arguments) -> Outputs:
    """`call(shard, *arguments)` on every device's part of logits that a mesh splits.

    Args:
      place: where the logits are.
      call: the same object for equal calls, since compiled programs are kept by it. It takes a
        `VocabShard` and `arguments`, of which it gets this device's own.
      arguments: of the call.
    """
    assert place.mesh is not None
    aligned = arguments[2] is None
    specs = argument_specs(place.layout, arguments)
    if AxisType.Explicit in place.mesh.axis_types:
        arguments = tuple(
            jax.tree.map(functools.partial(_placed, NamedSharding(place.mesh, spec)), x)
            for x, spec in zip(arguments, specs, strict=True)
        )
    program: Callable[..., Outputs] = _mapped(
        place.mesh, place.layout, place.shard, call, aligned, specs
    )
    return program(*arguments)


def _placed(sharding: NamedSharding, x: jax.Array) -> jax.Array:
    there: jax.Array = jax.sharding.reshard(x, sharding)  # type: ignore[no-untyped-call]
    return there


def argument_specs(layout: Layout, arguments: Arguments) -> tuple[PartitionSpec, ...]:
    """How `arguments` are split where the logits are split so: changes by rows, all alike."""
    rows = layout.rows if arguments[2] is None else ()
    whole, own, table = spec_of(), spec_of(rows), spec_of(rows, ())
    return (layout.spec(), own, whole, whole, own, table, table)


@functools.cache
def _mapped(
    mesh: AnyMesh,
    layout: Layout,
    shard: VocabShard,
    call: ShardCall[Outputs],
    aligned: bool,
    specs: tuple[PartitionSpec, ...],
) -> Callable[..., Outputs]:
    """The call on every device's part; the mesh's other axes are left as they are."""
    mapped: Callable[..., Outputs] = jax.jit(
        jax.shard_map(
            lambda *arguments: on_own_rows(functools.partial(call, shard), layout, arguments),
            mesh=mesh,
            in_specs=specs,
            out_specs=spec_of(layout.rows if aligned else ()),
            axis_names={*layout.rows, *layout.vocabulary},
        )
    )
    return mapped
