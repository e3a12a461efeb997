"""Where a call's logits are: on one device, or split by rows, by the vocabulary, or by both.

    inside `jax.shard_map`   the caller names the vocabulary's axis; rows are the device's own
    sharding known           explicit axes, or an array that exists: `shard_map` on its axes
    sharding not known yet   traced with automatic axes: asked for when the program is compiled

In all of them every device reads its own part and only compact results travel.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding

from pallas_kernels.contract.types import Greedy, Rows, TopkLogprobs, skipped_like
from pallas_kernels.meshes import split
from pallas_kernels.meshes.split import AnyMesh, Layout, axis_name, names_of, num_shards
from pallas_kernels.meshes.vocab_shard import AxisName, VocabShard

Arrays = TypeVar("Arrays")
Outputs = TypeVar("Outputs")
Result = TypeVar("Result", TopkLogprobs, Greedy)
ShardCall = Callable[[VocabShard, Rows], Result]  # one device's part of a call


class Place(NamedTuple):
    """Where the arrays of a call are."""

    mesh: AnyMesh | None  # outside `shard_map`, the one that splits them
    layout: Layout  # of a mesh; inside `shard_map` the vocabulary's axis alone
    vocab_size: int  # V
    padded: bool  # columns of padding follow
    unknown: bool = False  # how they are split is not known before the program is compiled

    @property
    def shard(self) -> VocabShard:
        """What a device holds of the vocabulary."""
        return self.layout.shard(self.vocab_size if self.padded else None)


def placed(
    logits: jax.Array, name: AxisName | None, mesh: Mesh | None, vocab_size: int | None
) -> Place:
    """Where the logits are, from what the caller says of `axis_name` and the array tells.

    Raises:
      ValueError: a mesh without an axis, an axis that does not exist, columns that do not divide.
    """
    width, padded = logits.shape[1], vocab_size is not None
    if mesh is not None and name is None:
        raise ValueError(f"mesh {mesh.shape} without axis_name; name the vocabulary's axis")
    if mesh is None and name is not None:
        return on_shard(name, width, vocab_size)
    size = VocabShard(None, vocab_size).size(width)
    found, layout = _sharding_of(logits)
    may_be_split = split.may_be_split(logits)
    if mesh is not None:
        axes = names_of(name)
        if not {*axes} <= {*mesh.shape}:
            raise ValueError(f"axis_name = {name!r} is not an axis of the mesh {mesh.shape}")
        check_columns(width, num_shards(mesh, axes), axes)
        if found is None and (mesh.size == num_shards(mesh, axes) or not may_be_split):
            return Place(mesh, Layout((), axes), size, padded)  # nothing else can be split
    if found is None:
        return Place(None, Layout(), size, padded, unknown=may_be_split)
    check_columns(width, num_shards(found, layout.vocabulary), layout.vocabulary)
    return Place(found, layout, size, padded)


def on_shard(name: AxisName, width: int, vocab_size: int | None) -> Place:
    """The place of arrays inside `shard_map`, `width` columns on each device.

    Raises:
      ValueError: there is no such axis around this call.
    """
    layout = Layout((), names_of(name))
    try:
        return Place(None, layout, layout.shard(vocab_size).size(width), vocab_size is not None)
    except NameError:
        raise ValueError(
            f"axis_name = {name!r} is no axis of a shard_map around this call; outside one, pass "
            "mesh too"
        ) from None


def check_columns(width: int, count: int, axes: split.MeshAxes) -> None:
    """A ValueError where `width` columns do not divide into `count` shards."""
    if width % count:
        raise ValueError(
            f"{width} columns do not divide into the {count} shards of {axis_name(axes)!r}; pad "
            f"them and pass vocab_size = {width}"
        )


def _sharding_of(logits: jax.Array) -> tuple[AnyMesh | None, Layout]:
    """The mesh and the layout of logits that tell them; None where they do not, or are whole."""
    is_traced = isinstance(logits, jax.core.Tracer)
    sharding = jax.typeof(logits).sharding if is_traced else logits.sharding
    layout = split.layout_of(sharding, logits.ndim)
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return (mesh, layout) if layout != Layout() else (None, layout)


def run(place: Place, call: ShardCall[Result], rows: Rows) -> Result:
    """`call(shard, rows)` on every device's part of the logits.

    Args:
      place: where the logits are.
      call: the same object for equal calls, since compiled programs are kept by it. It takes this
        device's `VocabShard` and rows, and skips a row whose id is outside [0, N).
      rows: of the call.
    """
    if place.mesh is None and not place.unknown:
        return call(place.shard, rows)
    on_part = _on_own_rows(call, place.vocab_size if place.padded else None)
    letter: str = split.ROW if rows.row_ids is None else split.NAMED
    _, *others = jax.tree.leaves(rows)
    words = ("nv", *(letter + "." * (x.ndim - 1) if x.ndim else "" for x in others))
    if place.mesh is None:
        found: Result = split.where_compiled(on_part, rows, words, letter)
    else:
        found = split.program_on_mesh(on_part, place.mesh, place.layout, words, letter)(rows)
    return found


def run_inputs(
    place: Place, call: split.Call[Arrays, Outputs], inputs: Arrays, words: split.Words
) -> Outputs:
    """`call(layout, inputs)` on every device's part of the inputs.

    Args:
      place: where they are.
      call: the same object for equal calls. Its results start with the axis of rows.
      inputs: a tree of arrays.
      words: their axes, as `split` has them.
    """
    if place.mesh is None:
        return call(place.layout, inputs)
    found: Outputs = split.program_on_mesh(call, place.mesh, place.layout, words)(inputs)
    return found


@functools.cache
def _on_own_rows(
    call: ShardCall[Result], vocab_size: int | None
) -> Callable[[Layout, Rows], Result]:
    """The call on this device's rows, for `split`; always the same object.

    Without row_ids, all arrays of target rows are the device's own part too, and so is the result.
    With row_ids they, and the result, are the same on every device.
    """

    def on_own_rows(layout: Layout, rows: Rows) -> Result:
        shard, count = layout.shard(vocab_size), rows.logits.shape[0]
        if rows.row_ids is None:
            return call(shard, rows._replace(num_rows=own_num_rows(layout, rows.num_rows, count)))
        if not layout.rows:
            return call(shard, rows)
        row_ids = rows.row_ids - lax.axis_index(layout.rows) * count
        mine = (row_ids >= 0) & (row_ids < count)
        if rows.num_rows is not None:
            mine &= jnp.arange(rows.num_targets, dtype=jnp.int32) < rows.num_rows
        # The device's own target rows come first, so that it works on no others.
        order = jnp.argsort(~mine, stable=True)
        # Every array of target rows, in this order: the logits' place holds none of theirs.
        targets = rows._replace(logits=mine, row_ids=jnp.where(mine, row_ids, -1), num_rows=None)
        ordered: Rows = jax.tree.map(lambda x: x[order], targets)
        ordered = ordered._replace(logits=rows.logits, num_rows=mine.sum(dtype=jnp.int32))
        return _of_all_devices(call(shard, ordered), mine, jnp.argsort(order), layout)

    return on_own_rows


def own_num_rows(layout: Layout, num_rows: jax.Array | None, count: int) -> jax.Array | None:
    """How many of this device's `count` rows are among the first num_rows of all devices'."""
    if num_rows is None or not layout.rows:
        return num_rows
    return jnp.clip(num_rows - lax.axis_index(layout.rows) * count, 0, count)


def _of_all_devices(found: Result, mine: jax.Array, place: jax.Array, layout: Layout) -> Result:
    """Each target row's results, from the device that has its row of logits.

    Args:
      found: this device's, in an order of its own.
      mine: [R] bool, which target rows are this device's.
      place: [R] int32, where each target row's results are.
      layout: how the rows are split.
    """
    over_rows = VocabShard(axis_name(layout.rows))
    somewhere = over_rows.across_sum(mine.astype(jnp.int32)) > 0

    def joined(x: jax.Array, of_skipped: jax.Array) -> jax.Array:
        shape = (-1,) + (1,) * (x.ndim - 1)
        own = jnp.where(mine.reshape(shape), x[place], jnp.zeros_like(x))
        return jnp.where(somewhere.reshape(shape), over_rows.across_sum(own), of_skipped)

    assert isinstance(found, TopkLogprobs)
    outputs: Result = jax.tree.map(joined, found, skipped_like(found))
    return outputs
