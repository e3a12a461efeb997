"""Step 2 of the selection: the logits of the chosen groups that may be among the top K.

The chosen groups are read again, all loads of a chunk before the first use. A thread marks in a
word which of its 32 logits are at the cut or above; for each of them it takes the next place in
shared memory, by an atomic addition, and writes the logit as an ordered integer, and its id. The
places depend on the order in which threads come; what is found does not.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.backends.mosaic_gpu import compat, thread
from pallas_kernels.backends.mosaic_gpu.keys import key_values, lengthened, middle, ordered_keys
from pallas_kernels.backends.mosaic_gpu.mask import Mask, allowed, bits_of
from pallas_kernels.backends.mosaic_gpu.thread import Word, word
from pallas_kernels.backends.mosaic_gpu.tiling import WARPGROUP, Tiling

MARKS = 32  # logits whose marks fit a word
MOST_LOADS = 12  # vectors of a thread in flight


class Candidates(NamedTuple):
    """Where a program's candidates are, and where it looks for them."""

    tiling: Tiling
    logits_ref: Any  # [N * V]
    first: Any  # where the row starts
    skew: Any  # `Tiling.skew`
    mask: Mask | None  # forbidden tokens are no candidates
    groups: int  # how many were chosen
    chosen_ref: Any  # [groups] i32 in shared memory: which
    found_ref: Any  # [2 * (capacity + 4)] i32 in shared memory, out: key and id of each candidate
    counter_ref: Any  # [4] i32 in shared memory: how many there are
    capacity: int
    interpreted: bool

    @property
    def loads(self) -> int:
        """Vectors of a thread in a chunk; the chunks are as long as each other."""
        total = -(-self.groups * self.tiling.group_width // (self.tiling.vector * WARPGROUP))
        return -(-total // -(-total // MOST_LOADS))

    @property
    def chunks(self) -> int:
        return -(-self.groups * self.tiling.group_width // (self.loads * self.size))

    @property
    def size(self) -> int:
        """Logits that all threads load at once."""
        return self.tiling.vector * WARPGROUP

    @property
    def whole(self) -> bool:
        """Whether the chunks' vectors are those of the chosen groups, and no more."""
        return self.chunks * self.loads * self.size == self.groups * self.tiling.group_width


def collect(where: Candidates, cut: jax.Array, cut_id: jax.Array | None) -> jax.Array:
    """Write every logit above the cut, and of those equal to it the ones of ids below cut_id.

    Args:
      where: see there.
      cut: an ordered key above that of -inf.
      cut_id: int32; None: all of those equal to it.

    Returns:
      Their number, int32; or some number above `capacity`, if there is no room for all of them.
      They are written in any order.
    """
    limited = cut_id is not None
    limit = jnp.int32(where.tiling.vocabulary) if cut_id is None else cut_id
    if where.interpreted:
        return _collect_interpreted(where, key_values(cut), limit)
    arguments: tuple[Any, ...] = (
        where.logits_ref, where.chosen_ref, where.found_ref, where.counter_ref,
        where.first, where.skew, cut, limit,
    )  # fmt: skip
    layouts: tuple[Any, ...] = (None,) * 4 + ("scalar",) * 4
    if where.mask is not None:
        arguments, layouts = (*arguments, *where.mask), (*layouts, None, "scalar")

    def body(logits: Any, chosen: Any, found: Any, counter: Any, *others: Any) -> Any:
        first, skew, cut_here, limit_here, *mask = others
        refs = where._replace(
            logits_ref=logits, chosen_ref=chosen, found_ref=found, counter_ref=counter,
            first=word(first), skew=word(skew), mask=Mask(mask[0], word(mask[1])) if mask else None,
        )  # fmt: skip
        ids = word(limit_here) if limited else None
        return thread.scalar(_collect(refs, word(cut_here), ids))

    count = thread.result((), jnp.int32, compat.GPU.Layout.WG_SPLAT)
    found: jax.Array = thread.inline(body, arguments, layouts, count)
    return found


class Vector(NamedTuple):
    """Some consecutive logits of a chosen group."""

    start: Word  # the id of the first one
    begin: Word  # ids of the group's block start here (of fixed groups, the vector's own)
    end: Word  # and end before this


def _vector(where: Candidates, number: Word) -> Vector:
    """A vector by its number, counted through the chosen groups; an empty one after the last."""
    tiling = where.tiling
    each = tiling.group_width // tiling.vector
    place = number >> _log2(each)
    last = place if where.whole else thread.smaller(place, where.groups - 1)
    group = word(thread.load(where.chosen_ref, last))
    if tiling.fixed:  # where a vector goes beyond the row, it is read from further left
        begin = group * tiling.group_width + (number & (each - 1)) * tiling.vector
        start = thread.smaller(begin, tiling.vocabulary - tiling.vector)
        return Vector(start, begin, _if_chosen(where, place, tiling.vocabulary))
    block = group >> _log2(tiling.groups_per_block)
    begin = block * tiling.block - where.skew
    start = begin  # as `Tiling.group_ids`, and no more of it than a vocabulary needs
    if not tiling.aligned:
        start = thread.larger(start, 0)
    if not tiling.aligned or tiling.vocabulary % tiling.block:
        start = thread.smaller(start, tiling.vocabulary - tiling.block)
    inside = (group & (tiling.groups_per_block - 1)) * tiling.group_width
    inside = inside + (number & (each - 1)) * tiling.vector
    return Vector(start + inside, begin, _if_chosen(where, place, begin + tiling.block))


def _if_chosen(where: Candidates, place: Word, end: Any) -> Word:
    """`end`, or 0 after the last of the chosen groups."""
    return word(end) if where.whole else thread.select(place < where.groups, end, 0)


def _collect(where: Candidates, cut: Word, cut_id: Word | None) -> Word:
    """What a thread does."""
    tiling = where.tiling
    me = thread.thread()
    thread.barrier()  # the counter may still be read
    thread.when(me == 0, lambda: thread.store(where.counter_ref, 0, 0))
    thread.barrier()
    chunks, loads = where.chunks, where.loads
    per_word = MARKS // tiling.vector
    value, next_value = _value(cut), _value(cut + 1)

    def limit(vector: Vector) -> Word:
        """What a logit of the vector must reach; ids within it are looked at later."""
        reached = value
        if cut_id is not None:
            reached = thread.select(vector.start < cut_id, value, next_value)
        return reached if where.whole else thread.select(vector.end > 0, reached, math.inf)

    def chunk(i: Word, _: Any) -> list[Word]:
        begin = i * (loads * WARPGROUP) + me
        vectors = [_vector(where, begin + j * WARPGROUP) for j in range(loads)]
        loaded = [_load(where, where.first + vector.start) for vector in vectors]
        limits = [limit(vector) for vector in vectors]
        for j in range(0, loads, per_word):
            some = slice(j, j + per_word)
            marks = _marks(loaded[some], limits[some])
            if where.mask is not None:
                marks = marks & _allowed(where, where.mask, vectors[some])
            _keep_marked(where, begin + j * WARPGROUP, marks, value, cut_id)
        return []

    if chunks == 1:
        chunk(word(0), [])
    else:
        thread.repeat(0, chunks, 1, [], chunk)
    thread.barrier()
    return word(thread.load(where.counter_ref, 0))


def _load(where: Candidates, at: Word) -> list[Word]:
    """A vector of logits as float32; one by one where rows start between vectors."""
    count = where.tiling.vector
    if where.tiling.aligned:
        return thread.load_floats(where.logits_ref, at, count)
    loaded = [thread.load(where.logits_ref, at + i) for i in range(count)]
    return [thread.as_float32(x) for x in loaded]


def _marks(loaded: list[list[Word]], limits: list[Word]) -> Word:
    """A bit for each logit that reaches its vector's limit, the first one lowest."""
    marks, bit = word(0), 1
    for vector, limit in zip(loaded, limits, strict=True):
        for x in vector:
            marks = marks | thread.select(x >= limit, bit, 0)
            bit = bit << 1 if bit < 1 << 30 else -(1 << 31)
    return marks


def _allowed(where: Candidates, mask: Mask, vectors: list[Vector]) -> Word:
    """A bit for each logit whose token is not forbidden, as `_marks`."""
    size, found = where.tiling.vector, word(0)
    for i, vector in enumerate(vectors):
        bits = bits_of(mask, vector.start, size, where.tiling) & ((1 << size) - 1)
        found = found | (bits << i * size)
    return found


def _keep_marked(
    where: Candidates, number: Word, marks: Word, cut: Word, cut_id: Word | None
) -> None:
    """Write the candidates among the marked logits of vectors `number`, `number` + 128, ...

    A thread stops where there is no more room: there are too many then, however many.
    """
    size = where.tiling.vector

    def keep(state: list[Word]) -> list[Word]:
        (left,) = state
        bit = thread.lowest_bit(left)
        vector = _vector(where, number + (bit >> _log2(size)) * WARPGROUP)
        token = vector.start + (bit & (size - 1))
        x = thread.as_float32(thread.load(where.logits_ref, where.first + token))
        wanted = (token >= vector.begin) & (token < vector.end)
        if cut_id is not None:
            wanted = wanted & ((x > cut) | (token < cut_id))
        yes = [word(1) == 1]
        (room,) = thread.when_else(wanted, lambda: [_append(where, x, token)], yes)
        return [thread.select(room, left & (left - 1), 0)]

    thread.repeat_while([marks], lambda state: state[0] != 0, keep)


def _append(where: Candidates, x: Word, token: Word) -> Word:
    """Write a candidate; whether there was room for it."""
    place = thread.add_atomically(where.counter_ref, 0, 1)
    room = place < where.capacity

    def write() -> None:
        key = thread.select(x == 0.0, 0, _flipped(thread.bits_of(x)))
        thread.store(where.found_ref, place + place, ~token)
        thread.store(where.found_ref, place + place + 1, key)

    thread.when(room, write)
    return room


def _flipped(bits: Word) -> Word:
    """The ordered key of a float32's bits, and the other way around."""
    return thread.select(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _value(key: Word) -> Word:
    return thread.float_of(_flipped(key))


def _collect_interpreted(where: Candidates, cut: jax.Array, cut_id: jax.Array) -> jax.Array:
    """What all threads do, group by group."""
    tiling = where.tiling
    outside = 2 * where.capacity

    def group(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        found, count = state
        start, begin, end = tiling.group_ids(where.chosen_ref[i], where.skew)
        x = where.logits_ref[pl.ds(where.first + start, tiling.group_width)].astype(jnp.float32)
        ids = start + jnp.arange(tiling.group_width, dtype=jnp.int32)
        own = (ids >= begin) & (ids < end)
        if where.mask is not None:
            own &= allowed(where.mask, ids, tiling)
        wanted = own & ((x > cut) | ((x == cut) & (ids < cut_id)))
        place = count + jnp.cumsum(wanted, dtype=jnp.int32) - 1
        place = jnp.where(wanted & (place < where.capacity), 2 * place, outside)
        found = found.at[place].set(~ids, mode="drop")
        found = found.at[place + 1].set(ordered_keys(x), mode="drop")
        return found, count + jnp.sum(wanted, dtype=jnp.int32)

    nothing = jnp.zeros(outside, jnp.int32)
    found, count = lax.fori_loop(0, where.groups, group, (nothing, jnp.int32(0)))
    where.found_ref[pl.ds(0, outside)] = found
    return compat.asarray(count)


def collect_enough(where: Candidates, k: int, cut: jax.Array, largest: jax.Array) -> jax.Array:
    """Collect the top k, and no more than there is room for; returns how many there are.

    The first cut is that of the groups: where it leaves more, ties or clusters of large logits, it
    is raised by halving the range of keys, and then, among equal logits, that of ids.

    Args:
      where: see there; room for k.
      k: a Python int.
      cut: a key without its free bits (`keys.shortened`), above that of -inf. The top k reach it,
        or all that are above -inf.
      largest: the largest key of the row, without its free bits.
    """
    dtype, room = where.tiling.dtype, where.capacity
    first = collect(where, lengthened(cut, dtype), None)

    def again(state: Any) -> Any:
        # Too many are at `low` or above it, fewer than k at `high`; of the logits equal to `low`,
        # fewer than k with those before `low_id`, too many with those before `high_id`.
        _, low, high, low_id, high_id = state
        cut = middle(low, high)
        by_id = cut == low
        cut_id = jnp.where(by_id, middle(low_id, high_id), jnp.int32(where.tiling.vocabulary))
        count = collect(where, lengthened(cut, dtype), cut_id)
        few, many = count < k, count > room
        return (
            count,
            jnp.where(many, cut, low),
            jnp.where(few & ~by_id, cut, high),
            jnp.where(few & by_id, cut_id, low_id),
            jnp.where(many & by_id, cut_id, high_id),
        )

    def unfit(state: Any) -> Any:
        return (state[0] < k) | (state[0] > room)

    ids = jnp.int32(0), jnp.int32(where.tiling.vocabulary)
    start = (jnp.maximum(first, k), cut, largest + 1, *ids)
    count = lax.while_loop(unfit, again, start)[0]
    return compat.asarray(jnp.where(first > room, count, first))


def _log2(number: int) -> int:
    assert number & (number - 1) == 0, f"{number} is no power of two"
    return number.bit_length() - 1
