"""Where a call's logits are: on one device, or split by rows, by the vocabulary, or by both.

    inside `jax.shard_map`   the caller names the vocabulary's axis; rows are the device's own
    sharding known           explicit axes, or an array that exists: `shard_map` on its axes
    sharding not known yet   traced with automatic axes: asked for when the program is compiled

In all of them every device reads its own part (`split`) and only compact results travel. An array's
axes are written as a word with a letter for each: "nv" are logits [N, V]. `MeshLayout` says which
mesh axes split n, the rows or slots, and v, the vocabulary. What other letters name is whole on
every device.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.contract.arguments import check_split
from pallas_kernels.lowering.forms import Tree

_Values = TypeVar("_Values", bound=Tree)
AxisName = str | tuple[str, ...]  # one mesh axis, or several that split one dimension together


@dataclass(frozen=True)
class VocabShard:
    """The vocabulary columns of a device, and reductions over those of all devices. Hashable.

    Inside `jax.shard_map`, the shards of the mesh axis hold equally many, contiguous columns, in
    order: shard i starts at id i * width. The last ones may end in padding columns.

    Reductions take this device's columns as the last axis and give every device the result of all
    of them. Their collectives carry one value a row.
    """

    axis_name: AxisName | None = None  # None: this device holds all columns
    vocab_size: int | None = None  # V; None: there are no padding columns

    def size(self, width: int) -> int:
        """V, where each shard holds `width` columns. Raises ValueError if V does not fit them."""
        columns: int = width if self.axis_name is None else width * lax.axis_size(self.axis_name)
        if self.vocab_size is None:
            return columns
        if not 0 < self.vocab_size <= columns:
            raise ValueError(
                f"vocab_size = {self.vocab_size} is outside 1 .. {columns}, the number of columns "
                "of all shards together"
            )
        return self.vocab_size

    def ids(self, width: int) -> jax.Array:
        """The token ids [width] int32 of this device's columns; from V on: padding."""
        columns = jnp.arange(width, dtype=jnp.int32)
        if self.axis_name is None:
            return columns
        return columns + lax.axis_index(self.axis_name) * width

    def without_padding(self, logits: jax.Array) -> "tuple[jax.Array, VocabShard]":
        """The logits [..., width] and what they hold; without padding, where all columns are here.

        Over several devices they are as they were: their parts stay equally wide.
        """
        if self.axis_name is not None:
            return logits, self
        return logits[..., : self.size(logits.shape[-1])], WHOLE

    def masked(self, logits: jax.Array) -> jax.Array:
        """The logits [..., width] with -inf in padding columns."""
        width = logits.shape[-1]
        vocab_size = self.size(width)
        if vocab_size == VocabShard(self.axis_name).size(width):
            return logits  # there are none
        real = (self.ids(width) < vocab_size).reshape((1,) * (logits.ndim - 1) + (width,))
        return jnp.where(real, logits, jnp.asarray(-jnp.inf, logits.dtype))

    def looked_up(
        self, ids: jax.Array, width: int, read: Callable[[jax.Array], jax.Array]
    ) -> jax.Array:
        """The values of `read` at token ids [...]: float [...]. NaN for an id outside [0, V).

        `read` takes columns [...] of this device's `width`; only those of ids that it holds count.
        """
        values = self.at_ids(ids, width, read)
        is_token = (ids >= 0) & (ids < self.size(width))
        return jnp.where(is_token, values, jnp.asarray(jnp.nan, values.dtype))

    def at_ids(
        self, ids: jax.Array, width: int, read: Callable[[jax.Array], jax.Array]
    ) -> jax.Array:
        """`looked_up` of ids that a column has; 0 for another one."""
        column = ids - self.ids(width)[0]
        is_on_shard = (column >= 0) & (column < width)
        values = read(jnp.clip(column, 0, width - 1))
        # The others add 0, which changes neither an infinity nor a NaN.
        return self.across_sum(jnp.where(is_on_shard, values, jnp.zeros_like(values)))

    def named_logits(
        self, logits: Float[Array, "N V"], rows: Int32[Array, " R"], ids: Int32[Array, "R C"]
    ) -> Float32[Array, "R C"]:
        """The logits [R, C] float32 of ids [R, C] in rows [R] of this device's columns [N, width].

        NaN for an id outside [0, V). A row outside [0, N) is clamped.
        """
        at = jnp.clip(rows, 0, logits.shape[0] - 1)[:, None]
        return self.looked_up(
            ids, logits.shape[1], lambda columns: logits.at[at, columns].get().astype(jnp.float32)
        )

    def maximum(self, x: jax.Array) -> jax.Array:
        """[..., width] -> [...]."""
        return self.across_maximum(x.max(-1))

    def minimum(self, x: jax.Array) -> jax.Array:
        """[..., width] -> [...]."""
        return self.across_minimum(x.min(-1))

    def sum(self, x: jax.Array) -> jax.Array:
        """[..., width] of any numeric dtype -> [...] of the same."""
        return self.across_sum(x.sum(-1, dtype=x.dtype))

    def any(self, x: jax.Array) -> jax.Array:
        """[..., width] bool -> [...] bool."""
        return self.maximum(x.astype(jnp.int32)) > 0

    def across_maximum(self, local: jax.Array) -> jax.Array:
        """The largest over the shards of one value each; the same shape."""
        return self._across(lax.pmax, local)

    def across_minimum(self, local: jax.Array) -> jax.Array:
        """The smallest over the shards of one value each; the same shape."""
        return self._across(lax.pmin, local)

    def across_sum(self, local: jax.Array) -> jax.Array:
        """The sum over the shards of one value each; the same shape."""
        return self._across(lax.psum, local)

    def gathered(self, local: jax.Array) -> jax.Array:
        """The shards' values [...] in their order: [shards, ...]."""
        if self.axis_name is None:
            return local[None]
        names = {self.axis_name} if isinstance(self.axis_name, str) else {*self.axis_name}
        # Only `shard_map` keeps track of what varies; what the compiler splits itself does not.
        tracked = names <= {*jax.sharding.get_abstract_mesh().manual_axes}
        to = {"to": "invarying"} if tracked else {}
        gathered: jax.Array = lax.all_gather(local, self.axis_name, **to)
        return gathered

    def gathered_together(self, values: _Values) -> _Values:
        """`gathered` of a tree of arrays [R, ...] of 32-bit numbers, in one exchange."""
        leaves, tree = jax.tree.flatten(values)
        words = [lax.bitcast_convert_type(x, jnp.int32).reshape(x.shape[0], -1) for x in leaves]
        gathered = self.gathered(jnp.concatenate(words, axis=1))
        ends = itertools.accumulate(x.shape[1] for x in words)
        parts = jnp.split(gathered, list(ends)[:-1], axis=2)
        arrays = [
            lax.bitcast_convert_type(part.reshape(gathered.shape[0], *x.shape), x.dtype)
            for part, x in zip(parts, leaves, strict=True)
        ]
        of_shards: _Values = jax.tree.unflatten(tree, arrays)
        return of_shards

    def _across(self, collective: Callable[..., jax.Array], local: jax.Array) -> jax.Array:
        return local if self.axis_name is None else collective(local, self.axis_name)


WHOLE = VocabShard()


AnyMesh = Mesh | AbstractMesh  # the latter where a traced array tells

MeshAxes = tuple[str, ...]  # of a mesh, that split one dimension together


ROW, VOCABULARY, NAMED = "n", "v", "r"  # `NAMED`: rows that are named, whole on every device


class MeshLayout(NamedTuple):
    """The mesh axes that split rows, and those that split the vocabulary."""

    rows: MeshAxes = ()
    vocabulary: MeshAxes = ()

    def shard(self, vocab_size: int | None) -> VocabShard:
        """A device's part of the vocabulary."""
        return VocabShard(axis_name(self.vocabulary), vocab_size)

    def spec(self, word: str) -> PartitionSpec:
        """How an array with these axes is"""
        axes = {ROW: axis_name(self.rows), VOCABULARY: axis_name(self.vocabulary)}
        return PartitionSpec(*(axes.get(letter) for letter in word))

    def even(self, mesh: AnyMesh, word: str, shape: Sequence[int]) -> "MeshLayout":
        """Without the axes that do not divide an array of this shape: there it is gathered."""
        sizes = dict(zip(word, shape, strict=True))

        def dividing(axes: MeshAxes, letter: str) -> MeshAxes:
            return axes if sizes.get(letter, 0) % num_shards(mesh, axes) == 0 else ()

        return MeshLayout(dividing(self.rows, ROW), dividing(self.vocabulary, VOCABULARY))


def layout_of(sharding: Sharding, ndim: int) -> MeshLayout:
    """The layout of logits [N, ..., V] with this sharding."""
    if not isinstance(sharding, NamedSharding):
        return MeshLayout()
    spec = (*sharding.spec, *[None] * ndim)[:ndim]
    return MeshLayout(names_of(spec[0]), names_of(spec[-1]))


def may_be_split(logits: jax.Array) -> bool:
    """Whether the compiler may split these logits: traced, and all axes of the mesh automatic."""
    if not isinstance(logits, jax.core.Tracer):
        return False
    types = jax.typeof(logits).sharding.mesh.axis_types
    return all(kind == AxisType.Auto for kind in types)


def names_of(axis: AxisName | None) -> MeshAxes:
    """The axes of a split, one, several or none, as a tuple."""
    if isinstance(axis, str):
        return (axis,)
    return axis if isinstance(axis, tuple) else ()  # `UNCONSTRAINED` is neither


def axis_name(axes: MeshAxes) -> AxisName | None:
    """The mesh axes as collectives and partitions take them."""
    return None if not axes else axes[0] if len(axes) == 1 else axes


def num_shards(mesh: AnyMesh, axes: MeshAxes) -> int:
    """Into how many parts the axes split a dimension."""
    return math.prod(mesh.shape[axis] for axis in axes)


class Split(NamedTuple):
    """A caller's words on how the vocabulary of logits is split."""

    mesh: Mesh | None = None  # outside `shard_map`, that of `axis_name`
    axis_name: AxisName | None = None  # (): all columns are here, and nothing need be asked
    vocab_size: int | None = None  # V where columns of padding follow


class Place(NamedTuple):
    """Where the arrays of a call are."""

    mesh: AnyMesh | None  # outside `shard_map`, the one that splits them
    layout: MeshLayout  # of a mesh; inside `shard_map` the vocabulary's axis alone
    vocab_size: int  # V
    padded: bool  # columns of padding follow
    unknown: bool = False  # how they are split is not known before the program is compiled

    @property
    def is_here(self) -> bool:
        """Whether this device holds all that the call reads, or is inside `shard_map`."""
        return self.mesh is None and not self.unknown

    @property
    def shard(self) -> VocabShard:
        """A device's part of the vocabulary."""
        return self.layout.shard(self.vocab_size if self.padded else None)


def placed(logits: jax.Array, how: Split) -> Place:
    """Where the logits are, from what the caller says and the array tells.

    Raises:
      ValueError: a mesh without an axis, an axis that does not exist, columns that do not divide.
    """
    check_split(*how)
    mesh, name, vocab_size = how
    width, padded = logits.shape[1], vocab_size is not None
    if mesh is None and name is not None:
        return on_shard(name, width, vocab_size)
    size = VocabShard(None, vocab_size).size(width)
    mesh_of_logits, layout = sharding_of(logits)
    unknown = may_be_split(logits)
    if mesh is not None:
        axes = names_of(name)
        check_divides("columns", width, mesh, axes)
        if mesh_of_logits is None and (mesh.size == num_shards(mesh, axes) or not unknown):
            return Place(mesh, MeshLayout((), axes), size, padded)  # nothing else can be split
    if mesh_of_logits is None:
        return Place(None, MeshLayout(), size, padded, unknown=unknown)
    check_divides("columns", width, mesh_of_logits, layout.vocabulary)
    return Place(mesh_of_logits, layout, size, padded)


def on_shard(name: AxisName, width: int, vocab_size: int | None) -> Place:
    """The place of arrays inside `shard_map`, `width` columns on each device.

    Raises:
      ValueError: there is no such axis around this call.
    """
    layout = MeshLayout((), names_of(name))
    try:
        return Place(None, layout, layout.shard(vocab_size).size(width), vocab_size is not None)
    except NameError:
        raise ValueError(
            f"axis_name = {name!r} is no axis of a shard_map around this call; outside one, pass "
            "mesh too"
        ) from None


def check_divides(
    what: str, size: int, mesh: AnyMesh, axes: MeshAxes, way_out: str | None = None
) -> None:
    """A ValueError where so many of what is split do not divide into the shards of these axes."""
    count = num_shards(mesh, axes)
    if size % count:
        raise ValueError(
            f"{size} {what} do not divide into the {count} shards of {axis_name(axes)!r}; "
            f"{way_out or f'pad them and pass vocab_size = {size}'}"
        )


def sharding_of(logits: jax.Array) -> tuple[AnyMesh | None, MeshLayout]:
    """The mesh and the layout of logits that tell them; None where they do not, or are whole."""
    is_traced = isinstance(logits, jax.core.Tracer)
    sharding = jax.typeof(logits).sharding if is_traced else logits.sharding
    layout = layout_of(sharding, logits.ndim)
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return (mesh, layout) if layout != MeshLayout() else (None, layout)
