"""The groups of rows of logits, on one device or on vocabulary shards.

A group belongs to the shard that holds its first token. Where a shard's columns end inside a group,
the next shard sends it the rest, at most 255 columns: so every group is summed whole, by one shard,
with the bits of one device. What all shards need of a group is gathered.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.backends import read
from pallas_kernels.backends.groups import (
    MANY,
    WIDTH,
    GroupSums,
    Part,
    Read,
    number_of_groups,
    whole_groups,
)
from pallas_kernels.backends.xla import groups as xla_groups
from pallas_kernels.backends.xla.selection import top_k
from pallas_kernels.contract import changes as of_logits
from pallas_kernels.contract.changes import Changes
from pallas_kernels.lowering.forms import barrier, vary_like
from pallas_kernels.meshes.placement import WHOLE, VocabShard


@dataclass(frozen=True)
class GroupedRows:
    """N rows of logits, of which this device holds the columns of `shard`."""

    logits: Float[Array, "N _"]  # its columns; padding is -inf
    shard: VocabShard
    vocab_size: int
    part: Part
    first: Int32[Array, ""]  # the number of this device's first group
    changes: Changes | None = None  # of the logits of whole rows; the part's tail has them already

    @classmethod
    def of(
        cls,
        logits: Float[Array, "N C"],
        shard: VocabShard = WHOLE,
        changes: Changes | None = None,
    ) -> "GroupedRows":
        """The rows of these columns. Shards narrower than a group are gathered: V < 256 shards.

        changes: of whole rows, `prepared`; they are applied wherever logits are read.
        """
        vocab_size = shard.size(logits.shape[1])
        logits = shard.masked(logits)
        if _is_gathered(logits, shard):
            logits, shard = columns_as_read(logits, shard), WHOLE
        if shard.axis_name is None or logits.shape[1] % WIDTH == 0:
            first = shard.ids(logits.shape[1])[0] // WIDTH
            part = Part(logits, xla_groups.tail_of(logits, changes), jnp.zeros_like(first))
        else:
            part, first = _with_neighbor(logits, shard)
        return cls(logits, shard, vocab_size, part, first, changes)

    def pin_to_iteration(self, of: jax.Array) -> "GroupedRows":
        """The same rows as values of a loop's iteration: else XLA would widen all before the loop.

        of: a value that the iteration begins with.
        """
        logits, part, _ = barrier((self.logits, self.part, of))
        return replace(self, logits=logits, part=part)

    @property
    def arrays(self) -> tuple[jax.Array, Part, jax.Array, Changes | None]:
        """What of it is no constant of a program: see `with_arrays`."""
        return self.logits, self.part, self.first, self.changes

    def with_arrays(
        self, logits: jax.Array, part: Part, first: jax.Array, changes: Changes | None
    ) -> "GroupedRows":
        """The same rows, of these arrays."""
        return replace(self, logits=logits, part=part, first=first, changes=changes)

    @property
    def num_groups(self) -> int:
        """G, of all shards."""
        return number_of_groups(self.vocab_size)

    @property
    def num_local(self) -> int:
        """Groups that this device may have; the last may be another's, and hold nothing then."""
        return whole_groups(self.part) + self.part.tail.shape[1]

    @property
    def width(self) -> int:
        """W, the tokens of a group: 256, or fewer where there is one group alone."""
        return self.part.tail.shape[2]

    def read(
        self, inverse: Float32[Array, " N"], needed: Int32[Array, " N"], k: int = -1
    ) -> tuple[Read, ...]:
        """`read.read_groups`; every shard gets the whole rows'.

        With changes, that of the changed rows and, with k, that of the logits themselves.
        """
        every = read.read_groups(self.part, inverse, needed, k, changes=self.changes)
        if self.shard.axis_name is None:
            return every
        (found,) = every
        count = min(max(k, MANY), self.vocab_size)
        if k > 0:
            return (self._gathered(found, count, with_top=True),)
        gathered: Read = lax.cond(
            jnp.any(needed > 0),
            lambda: self._gathered(found, count, with_top=True),
            lambda: self._gathered(found, count, with_top=False),
        )
        return (gathered,)

    def own(self, groups: Float[Array, "R G"], missing: float) -> Float[Array, "R L"]:
        """This device's columns of values of all groups; `missing` where it has fewer."""
        if self.shard.axis_name is None:
            return groups
        padding = ((0, 0), (0, self.num_local))
        mine = lax.dynamic_slice_in_dim(
            jnp.pad(groups, padding, constant_values=missing), self.first, self.num_local, axis=1
        )
        return jnp.where(self.has(self.numbers())[None], mine, jnp.asarray(missing, mine.dtype))

    def numbers(self) -> Int32[Array, " L"]:
        """The numbers of this device's groups."""
        return self.first + jnp.arange(self.num_local, dtype=jnp.int32)

    def has(self, groups: Int32[Array, "..."]) -> Bool[Array, "..."]:
        """Which of the groups with these numbers are this device's."""
        if self.shard.axis_name is None:
            return (groups >= 0) & (groups < self.num_groups)
        start = self.shard.ids(self.logits.shape[1])[0]
        place = groups * WIDTH - start
        return (place >= 0) & (place < self.logits.shape[1]) & (groups < self.num_groups)

    def tokens(
        self, rows: Int32[Array, " P"], groups: Int32[Array, " P"]
    ) -> tuple[Float32[Array, "P W"], Int32[Array, "P W"]]:
        """The logits and ids of the tokens of one group of each row; -inf of another device's."""
        part, whole = self.part, whole_groups(self.part)
        local = jnp.clip(groups - self.first, 0, self.num_local - 1)
        ids = groups[:, None] * WIDTH + jnp.arange(self.width, dtype=jnp.int32)[None]
        found = jnp.zeros(ids.shape, part.logits.dtype)
        if whole:
            start = part.offset + jnp.minimum(local, whole - 1) * WIDTH
            found = jax.vmap(
                lambda row, at: lax.dynamic_slice(part.logits, (row, at), (1, WIDTH))[0]
            )(rows, start)
            mine = of_logits.of_rows(self.changes, rows)
            found = of_logits.apply(found, of_logits.of_columns(mine, start, WIDTH))
        if part.tail.shape[1]:
            last = part.tail[rows, jnp.maximum(local - whole, 0)]
            found = jnp.where((local >= whole)[:, None], last, found)
        return jnp.where(self.has(groups)[:, None], found.astype(jnp.float32), -jnp.inf), ids

    def candidates(
        self,
        k: int,
        row_ids: Int32[Array, " R"],
        num_rows: Int32[Array, ""],
    ) -> tuple[Int32[Array, "R K"], Float32[Array, "R K"]]:
        """The K = min(k, V) largest of rows: ids and logits, ties lowest id first.

        An id is -1 where fewer are above -inf. Rows from `num_rows` on are unspecified; the others
        must be valid.
        """
        every = self.logits, self.shard, self.vocab_size
        return _candidates(*every, k, row_ids, num_rows, valid=True, changes=self.changes)

    def _gathered(self, found: Read, count: int, *, with_top: bool) -> Read:
        """Every shard's part of a read, in one exchange; with `count` candidates or without."""
        local = self.num_local
        numbers = jnp.concatenate([*found.groups, found.raw_sums], axis=1)
        words, width = lax.bitcast_convert_type(numbers, jnp.int32), numbers.shape[1]
        if with_top:
            words = jnp.concatenate([words, _packed(self.logits, self.shard, *found[2:])], axis=1)
        every = self.shard.gathered(words)
        sums = lax.bitcast_convert_type(every[..., :width], jnp.float32)
        where = self._places()

        def joined(x: jax.Array) -> jax.Array:  # [shards, N, L] -> [N, G]
            return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1)[:, where]

        groups = GroupSums(joined(sums[..., :local]), joined(sums[..., local : 2 * local]))
        raw = joined(sums[..., 2 * local :]) if width > 2 * local else groups.sums[:, :0]
        if with_top:
            top = _merged(every[..., width:], count)
        else:
            rows = found.top_ids.shape[0]
            top = jnp.full((rows, count), -1, jnp.int32), jnp.full((rows, count), -jnp.inf)
        # Constants vary over no axis of a mesh; what was gathered does over those of the rows.
        return Read(groups, raw, *vary_like(top, groups))

    def _places(self) -> np.ndarray:
        """Where each group [G] is among the shards' columns, shards * L of them."""
        width, numbers = self.logits.shape[1], np.arange(self.num_groups)
        holder = numbers * WIDTH // width
        return holder * self.num_local + numbers - -(-holder * width // WIDTH)


def columns_as_read(values: Float[Array, "N C"], shard: VocabShard) -> Float[Array, "N _"]:
    """The columns that `GroupedRows` of this shard has: all of them where shards are narrow."""
    if not _is_gathered(values, shard):
        return values
    every = jnp.moveaxis(shard.gathered(values), 0, 1)
    return every.reshape(values.shape[0], -1)[:, : shard.size(values.shape[1])]


def _is_gathered(values: jax.Array, shard: VocabShard) -> bool:
    """Whether a shard is narrower than a group."""
    return shard.axis_name is not None and values.shape[1] < WIDTH


def top_candidates(
    logits: Float[Array, "N C"],
    k: int,
    shard: VocabShard = WHOLE,
    row_ids: Int32[Array, " R"] | None = None,
) -> tuple[Int32[Array, "R K"], Float32[Array, "R K"]]:
    """The K = min(k, V) largest logits of rows, and their ids: ties lowest id first.

    An id is -1 where fewer are above -inf. A row with a NaN gets anything.

    Args:
      logits: the columns of `shard`.
      k: static.
      shard: of the vocabulary. Every shard gets the result of all of them, in one exchange.
      row_ids: of these rows, clamped to those that there are; None: of all.
    """
    vocab_size = shard.size(logits.shape[1])
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)
    if row_ids is not None:
        rows = jnp.clip(row_ids, 0, logits.shape[0] - 1)
    every = shard.masked(logits), shard, vocab_size
    return _candidates(*every, k, rows, jnp.int32(rows.shape[0]), valid=False)


def _candidates(
    logits: jax.Array,
    shard: VocabShard,
    vocab_size: int,
    k: int,
    row_ids: jax.Array,
    num_rows: jax.Array,
    *,
    valid: bool,
    changes: Changes | None = None,
) -> tuple[jax.Array, jax.Array]:
    count = min(k, vocab_size)
    mine = min(count, logits.shape[1])
    found = read.candidates(logits, mine, row_ids, num_rows, valid=valid, changes=changes)
    if shard.axis_name is None:
        return found
    return _merged(shard.gathered(_packed(logits, shard, *found)), count)


def _packed(logits: jax.Array, shard: VocabShard, ids: jax.Array, values: jax.Array) -> jax.Array:
    """Candidates as words [R, 2 K], with ids of the whole vocabulary."""
    start = shard.ids(logits.shape[1])[0]
    ids = jnp.where(ids >= 0, ids + start, -1)
    return jnp.concatenate([ids, lax.bitcast_convert_type(values, jnp.int32)], axis=1)


def _merged(every: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The largest of all shards' candidates [shards, R, 2 K]."""
    ids, logits = jnp.split(jnp.moveaxis(every, 0, 1), 2, axis=-1)  # [R, shards, K]
    flat = ids.shape[0], -1
    # Shards come in the order of their ids, and so do each one's ties: top_k keeps that order.
    values = lax.bitcast_convert_type(logits, jnp.float32).reshape(flat)
    values, places = top_k(values, min(count, values.shape[1]))
    return jnp.take_along_axis(ids.reshape(flat), places, axis=1), values


def _with_neighbor(logits: jax.Array, shard: VocabShard) -> tuple[Part, jax.Array]:
    """A device's part where groups do not end with its columns, and its first group."""
    assert shard.axis_name is not None
    rows, width = logits.shape
    shards = (
        shard.size(width) if shard.vocab_size is None else VocabShard(shard.axis_name).size(width)
    )
    shards //= width
    # Each sends its first columns to the one before it: the last has no next one, and gets zeros.
    ring = [(index, index - 1) for index in range(1, shards)]
    following = lax.ppermute(logits[:, : WIDTH - 1], shard.axis_name, ring)  # type: ignore[no-untyped-call]
    start = shard.ids(width)[0]
    following = jnp.where(start + width < width * shards, following, -jnp.inf)
    offset = -start % WIDTH
    whole = width // WIDTH - 1
    # Two groups are left: the columns from here on, and what follows them.
    tail = offset + whole * WIDTH
    kept = min(width, 2 * WIDTH - 1)
    ahead = jnp.full((rows, 2 * WIDTH), -jnp.inf, logits.dtype)
    line = jnp.concatenate([logits[:, width - kept :], following, ahead], axis=1)
    last = lax.dynamic_slice_in_dim(line, tail - (width - kept), 2 * WIDTH, axis=1)
    # What begins behind the columns is the next device's.
    begins = tail + jnp.arange(2, dtype=jnp.int32) * WIDTH
    groups = jnp.where((begins < width)[None, :, None], last.reshape(rows, 2, WIDTH), -jnp.inf)
    return Part(logits, groups, offset), (start + offset) // WIDTH
