"""Groups of a row's tokens: what a read of sampled rows leaves, and what follows it takes.

A group is 256 tokens, from a multiple of 256 on. `xla/group_sums.py` says what its sum is. Every
backend's read leaves the same, and so does its draw.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

from pallas_kernels.contract.changes import Changes
from pallas_kernels.lowering import typed
from pallas_kernels.lowering.forms import Tree, vary_like
from pallas_kernels.numbers.ordered_keys import ordered_keys
from pallas_kernels.numbers.quotient import quotient

_Result = TypeVar("_Result", bound=Tree)
WIDTH = 256  # tokens of a group
FIRST = 20  # candidates: most rows that top-p cuts need no more
FEW = 64
MANY = 128
LARGEST = 3.4028234663852886e38  # float32


class GroupSums(NamedTuple):
    """Groups of rows, [R, G] or [...]. One without a logit above -inf has a sum of 0."""

    maxima: Float32[Array, "..."]  # anything where the group has a NaN
    sums: Float32[Array, "..."]  # NaN where the group has a NaN or +inf
    weighted: Float32[Array, "..."] | None = None  # of s exp(s), for the entropy; see `group_sums`


def number_of_groups(vocabulary: int) -> int:
    """G: the groups of so many tokens."""
    return -(-vocabulary // WIDTH)


def inverse_temperature(temperatures: jax.Array) -> jax.Array:
    """1 / T [R] float32, as the sums use it; T = 0 (greedy) counts as 1."""
    usable = jnp.where(temperatures > 0, temperatures, jnp.float32(1))
    return bounded(quotient(jnp.ones_like(usable), usable))


def bounded(inverse: jax.Array) -> jax.Array:
    """1 / T so that -inf / T is -inf, and 0 / T is 0."""
    return jnp.clip(inverse, jnp.float32(1e-30), jnp.float32(LARGEST))


class RowPart(NamedTuple):
    """A device's part of N rows of logits, as groups: `whole` ones, then those of `tail`."""

    logits: Float[Array, "N _"]  # its columns
    tail: Float[Array, "N T W"]  # the groups that its columns do not hold whole
    offset: Int32[Array, ""]  # the column where its first group begins


class Needed(NamedTuple):
    """How many candidates each of R rows needs."""

    number: Int32[Array, " R"]  # at most `MANY`
    share: Float32[Array, " R"]  # fewer will do that have so much of the row's weight; else above 1
    by_share: Bool[Array, " R"]  # whether nothing else cuts: if none have so much, fewest are taken

    @classmethod
    def all_of(cls, number: Int32[Array, " R"]) -> "Needed":
        """So many, and never fewer."""
        return cls(number, jnp.full(number.shape, 2, jnp.float32), jnp.zeros(number.shape, bool))


class Read(NamedTuple):
    """The results of a read of R rows. K is the most columns that a row may have."""

    groups: GroupSums  # [R, G], at each row's temperature
    raw_sums: Float32[Array, "R _"]  # the sums at temperature 1, where they were asked for
    top_ids: Int32[Array, "R K"]  # columns of the part; -1 where a row has no more, or none needed
    top_logits: Float32[Array, "R K"]  # descending, ties lowest id first
    num_candidates: Int32[Array, " R"]  # how many of them decide, as needed or fewer


class Top(NamedTuple):
    """The largest of R rows."""

    ids: Int32[Array, "R K"]
    logits: Float32[Array, "R K"]


class ListedRows(NamedTuple):
    """Rows of logits, all of them or those of a list, and the changes of all."""

    logits: Float[Array, "N V"]
    row_ids: Int32[Array, " R"] | None = None  # of the list, each in [0, N)
    num_rows: Int32[Array, ""] | None = None  # of the list; results from there on are unspecified
    changes: Changes | None = None


class RowsToDraw(NamedTuple):
    """B slots, each with a row of N to draw from, and what the read left of all rows."""

    rows: Int32[Array, " B"]  # valid ones; -1 where nothing is drawn
    cut_logit: Float32[Array, " B"]  # as `keeps` takes it; -inf where all is kept
    cut_id: Int32[Array, " B"]
    excluded_ids: Int32[Array, "B M"]  # distinct tokens that are not drawn; -1 where there is none
    seed: UInt32[Array, " B"]
    position: Int32[Array, " B"]
    maxima: Float32[Array, "N G"]  # of the groups
    sums: Float32[Array, "N G"]
    largest: Float32[Array, " N"]  # m
    inverse: Float32[Array, " N"]  # 1 / T


class Drawn(NamedTuple):
    """Of each slot; a score of -inf and any token where none is left or nothing is drawn."""

    score: Float32[Array, " B"]  # log of the sum of exp((x - m) / T) over the group, and its noise
    token_ids: Int32[Array, " B"]


def whole_groups(part: RowPart) -> int:
    """How many groups from `offset` on the columns hold whole."""
    width = part.logits.shape[1]
    # A last group that may be cut, or not, by the offset of this device is in the tail.
    return width // WIDTH - (part.tail.shape[1] == 2)


def columns_of_groups(part: RowPart) -> jax.Array:
    """The columns [N, 256 G'] of the whole groups."""
    width = whole_groups(part) * WIDTH
    if part.tail.shape[1] < 2:  # they begin with the first column
        return part.logits[:, :width]
    return lax.dynamic_slice_in_dim(part.logits, part.offset, width, axis=1)


def read_in_two(
    part: RowPart, read: Callable[[jax.Array, int, jax.Array | None], _Result]
) -> _Result:
    """The results of the whole groups among the columns, and then of the tail's two groups.

    Args:
      part: with two groups in its tail.
      read: of logits, a number of tokens, and the column [] int32 of the first of these, or None;
        a tree of arrays [N, groups].
    """
    rows, number, width = part.tail.shape
    last = read(part.tail.reshape(rows, -1), number * width, None)
    tokens = whole_groups(part) * width
    if not tokens:
        return last
    first = read(part.logits, tokens, part.offset)
    return typed.tree_map(lambda x, y: jnp.concatenate([x, y], axis=1), first, last)


def as_many_as_needed(
    logits: jax.Array,
    needed: jax.Array,
    k: int,
    top: Callable[[int], Top],
    steps: tuple[int, ...] = (FEW, MANY),
) -> Top:
    """The largest logits, as many as the row needs that needs most: none, or one of `steps`."""
    rows, columns = logits.shape[0], min(max(k, MANY), logits.shape[1])
    counts = sorted({min(max(k, 0, count), columns) for count in (0, *steps)})

    def padded(count: int) -> Top:
        ids = jnp.full((rows, columns), -1, jnp.int32)
        values = jnp.full((rows, columns), -jnp.inf, jnp.float32)
        if not count:
            return vary_like(Top(ids, values), (logits, needed))
        largest = top(count)
        return Top(ids.at[:, :count].set(largest.ids), values.at[:, :count].set(largest.logits))

    if len(counts) == 1:
        return padded(counts[0])
    enough = jnp.asarray(counts[:-1], jnp.int32)
    index = jnp.sum(jnp.max(needed) > enough, dtype=jnp.int32)
    return typed.switch(index, [lambda count=count: padded(count) for count in counts])


def keeps(
    x: Float[Array, "..."],
    ids: Int32[Array, "..."],
    cut_logit: Float32[Array, "..."],
    cut_id: Int32[Array, "..."],
) -> Bool[Array, "..."]:
    """Whether tokens with logits x and these ids are kept by a cut; all shapes broadcast.

    By the order of the read's candidates: XLA's comparison takes a subnormal number for zero.
    NaN is larger than nothing.
    """
    value = x.astype(jnp.float32)
    key, last = ordered_keys(value), ordered_keys(cut_logit)
    larger = (key > last) & ~jnp.isnan(value)
    return larger | ((key == last) & (ids < cut_id)) | (ids == cut_id)
