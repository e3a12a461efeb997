"""The groups of rows of logits, on one device or on vocabulary shards.

A group belongs to the shard that holds its first token. Where a shard's columns end inside a group,
the next shard sends it the rest, at most 255 columns: so every group is summed whole, by one shard,
with the bits of one device. What all shards need of a group is gathered.
"""

from dataclasses import dataclass, field, replace

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
    ListedRows,
    Needed,
    Read,
    RowPart,
    Top,
    columns_of_groups,
    number_of_groups,
    whole_groups,
)
from pallas_kernels.backends.xla.selection import top_k_of_parts
from pallas_kernels.backends.xla.tails import (
    FOLLOWING,
    columns_of_all,
    following_columns,
    tail_of,
    with_following,
)
from pallas_kernels.contract import changes as of_logits
from pallas_kernels.contract.changes import Changes
from pallas_kernels.lowering.forms import barrier
from pallas_kernels.lowering.row_pieces import filled
from pallas_kernels.meshes.placement import WHOLE, VocabShard


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GroupedRows:
    """N rows of logits, of which this device holds the columns of `shard`. A tree of arrays."""

    logits: Float[Array, "N _"]  # its columns; padding is -inf
    shard: VocabShard = field(metadata={"static": True})
    vocab_size: int = field(metadata={"static": True})
    part: RowPart
    first: Int32[Array, ""]  # the number of this device's first group
    changes: Changes | None = None  # of the logits of whole rows; the part's tail has them already

    @classmethod
    def of(
        cls, logits: Float[Array, "N C"], shard: VocabShard = WHOLE, changes: Changes | None = None
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
            part = RowPart(logits, tail_of(logits, changes), jnp.zeros_like(first))
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

    def read(self, inverse: Float32[Array, " N"], needed: Needed, k: int = -1) -> tuple[Read, ...]:
        """`read.read_groups`; every shard gets the whole rows'.

        With changes, that of the changed rows and, with k, that of the logits themselves.
        """
        if self.shard.axis_name is not None:  # none knows the weight of a row
            needed = Needed.all_of(needed.number)
        reads = read.read_groups(self.part, inverse, needed, k, changes=self.changes)
        if self.shard.axis_name is None:
            return reads
        # A part's number varies over the shards.
        part_read = reads[0]._replace(num_candidates=needed.number)
        count = min(max(k, MANY), self.vocab_size)
        if k > 0:
            return (self._gathered(part_read, count, with_top=True),)
        gathered: Read = lax.cond(
            jnp.any(needed.number > 0),
            lambda: self._gathered(part_read, count, with_top=True),
            lambda: self._gathered(part_read, count, with_top=False),
        )
        return (gathered,)

    def local_columns(self, groups: Float[Array, "R G"], missing: float) -> Float[Array, "R L"]:
        """This device's columns of values of all groups; `missing` where it has fewer."""
        if self.shard.axis_name is None:
            return groups
        padding = ((0, 0), (0, self.num_local))
        values = lax.dynamic_slice_in_dim(
            jnp.pad(groups, padding, constant_values=missing), self.first, self.num_local, axis=1
        )
        return jnp.where(self.has(self.numbers())[None], values, jnp.asarray(missing, values.dtype))

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
        part, num_whole = self.part, whole_groups(self.part)
        local = jnp.clip(groups - self.first, 0, self.num_local - 1)
        ids = groups[:, None] * WIDTH + jnp.arange(self.width, dtype=jnp.int32)[None]
        logits = jnp.zeros(ids.shape, part.logits.dtype)
        if num_whole:
            start = part.offset + jnp.minimum(local, num_whole - 1) * WIDTH
            logits = jax.vmap(
                lambda row, at: lax.dynamic_slice(part.logits, (row, at), (1, WIDTH))[0]
            )(rows, start)
            changes = of_logits.of_rows(self.changes, rows)
            logits = of_logits.apply(logits, of_logits.of_columns(changes, start, WIDTH))
        if part.tail.shape[1]:
            last = part.tail[rows, jnp.maximum(local - num_whole, 0)]
            logits = jnp.where((local >= num_whole)[:, None], last, logits)
        return jnp.where(self.has(groups)[:, None], logits.astype(jnp.float32), -jnp.inf), ids

    def row(self, row: Int32[Array, ""]) -> list[tuple[jax.Array, jax.Array]]:
        """One row by this device's groups: pieces of logits float32, changed, and ids [groups, W].

        The whole groups among the columns, then the others: joined, XLA would not vectorize what is
        made of them. -inf where a group is another device's.
        """
        part, num_whole = self.part, whole_groups(self.part)
        numbers, pieces = self.numbers(), []
        if num_whole:
            x = lax.dynamic_slice_in_dim(part.logits, row, 1)
            x = of_logits.apply(x, of_logits.of_rows(self.changes, row[None]))
            columns = columns_of_groups(RowPart(x, part.tail[row][None], part.offset))
            pieces.append((columns.reshape(num_whole, WIDTH), numbers[:num_whole]))
        if part.tail.shape[1]:
            pieces.append((part.tail[row], numbers[num_whole:]))
        columns_of_group = jnp.arange(self.width, dtype=jnp.int32)[None]
        return [
            (
                jnp.where(self.has(of_piece)[:, None], x.astype(jnp.float32), -jnp.inf),
                of_piece[:, None] * WIDTH + columns_of_group,
            )
            for x, of_piece in pieces
        ]

    def candidates(
        self, k: int, row_ids: Int32[Array, " R"], num_rows: Int32[Array, ""]
    ) -> tuple[Int32[Array, "R K"], Float32[Array, "R K"]]:
        """The K = min(k, V) largest of rows: ids and logits, ties lowest id first.

        An id is -1 where fewer are above -inf. Rows from `num_rows` on are unspecified; the others
        must be valid.
        """
        rows = ListedRows(self.logits, row_ids, num_rows, self.changes)
        return _candidates(rows, self.shard, min(k, self.vocab_size), valid=True)

    def _gathered(self, part_read: Read, count: int, *, with_top: bool) -> Read:
        """Every shard's part of a read, in one exchange; with `count` candidates or without."""
        number = None if with_top else 0
        top = _of_vocabulary(self.logits, self.shard, *(x[:, :number] for x in part_read[2:4]))
        arrays = part_read.groups, part_read.raw_sums, top
        groups_of_shards, raw, (ids, logits) = self.shard.gathered_together(arrays)
        where = self._places()

        def joined(x: jax.Array) -> jax.Array:  # [shards, N, L] -> [N, G]
            return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1)[:, where]

        groups = GroupSums(joined(groups_of_shards.maxima), joined(groups_of_shards.sums))
        raw = joined(raw) if part_read.raw_sums.shape[1] else groups.sums[:, :0]
        ids, logits = top_k_of_parts(ids, logits, count) if with_top else (ids[0], logits[0])
        top = Top(filled(ids, count, -1), filled(logits, count, -jnp.inf))
        return Read(groups, raw, *top, part_read.num_candidates)

    def _places(self) -> np.ndarray:
        """Where each group [G] is among the shards' columns, shards * L of them."""
        width, numbers = self.logits.shape[1], np.arange(self.num_groups)
        holder = numbers * WIDTH // width
        return holder * self.num_local + numbers - -(-holder * width // WIDTH)


def columns_as_read(values: Float[Array, "N C"], shard: VocabShard) -> Float[Array, "N _"]:
    """The columns that `GroupedRows` of this shard has: all of them where shards are narrow."""
    if not _is_gathered(values, shard):
        return values
    return columns_of_all(values, shard)


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
    listed = ListedRows(shard.masked(logits), rows, jnp.int32(rows.shape[0]))
    return _candidates(listed, shard, min(k, vocab_size), valid=False)


def _candidates(
    rows: ListedRows, shard: VocabShard, k: int, *, valid: bool
) -> tuple[jax.Array, jax.Array]:
    """The k largest of all shards' columns; k is at most V."""
    top = read.candidates(rows, min(k, rows.logits.shape[1]), valid=valid)
    if shard.axis_name is None:
        return top
    tops = shard.gathered_together(_of_vocabulary(rows.logits, shard, *top))
    return top_k_of_parts(*tops, k)


def _of_vocabulary(
    logits: jax.Array, shard: VocabShard, ids: jax.Array, values: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Candidates [R, K] with ids of the whole vocabulary."""
    return jnp.where(ids >= 0, ids + shard.ids(logits.shape[1])[0], -1), values


def _with_neighbor(logits: jax.Array, shard: VocabShard) -> tuple[RowPart, jax.Array]:
    """A device's part where groups do not end with its columns, and its first group."""
    width = logits.shape[1]
    start = shard.ids(width)[0]
    offset = -start % WIDTH
    following = following_columns(logits[:, :FOLLOWING], width, shard)
    return with_following(logits, following, offset), (start + offset) // WIDTH
