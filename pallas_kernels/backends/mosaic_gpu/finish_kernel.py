"""Pass 2 on a GPU: from pass 1's partial results to the outputs, one program (a warpgroup) a row.

1. Combine the partial results of the programs that read the row (`combine`).
2. Select its top K (`select_top_k`), unless K = 0 or the row is invalid.
3. Write the outputs, also of invalid and skipped rows (`write_answers`).

One kernel does all of it. XLA would launch a kernel for every few numbers a row, and launches bound
calls of few rows.

The selection finds the exact top K from the row's group maxima and K of its groups:

1. Choose the K groups with the largest maxima, ties lowest group (`choose_groups`). They contain
   the top K, and since groups are contiguous and in index order, the lowest ids among equal logits
   too.
2. Read those groups again, and nothing else of the row, and keep what is not below the smallest of
   the K maxima: little more than K logits, if few are equal (`collect_enough`).
3. Rank each of them by counting those before it (`in_order`).

No step takes one token after the other: K dependent reductions would be what pass 2 waits for.

The file goes from the parts to the whole: the outputs, logits as ordered integers, combining, the
selection's three steps, and at its end the kernel.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.backends.mosaic_gpu import compat, reading, thread
from pallas_kernels.backends.mosaic_gpu.compat import GPU, Readable
from pallas_kernels.backends.mosaic_gpu.rows_kernel import LEAST
from pallas_kernels.backends.mosaic_gpu.schedule import WARPGROUP, Index, Layout, Schedule
from pallas_kernels.backends.mosaic_gpu.thread import (
    Number,
    Value,
    Vector,
    Word,
    load_at_once,
    word,
)
from pallas_kernels.contract.rows import Outputs
from pallas_kernels.numbers.ordered_keys import floats, ordered_keys

# What column 0 holds: the given token, or the greedy choice. Parts of longer rows have no column 0,
# and their top K stay logits.
Mode = Literal["given", "greedy", "parts"]
Convert = Callable[[jax.Array], jax.Array]  # logits -> what is written of them
# The carries of searches: for a key, and for a key or an id.
Search = tuple[jax.Array, jax.Array, jax.Array]
Collected = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]
WARP = 32

NO_POSITION = 2**31 - 1
SCAN_WIDTH = 1024
WARPS = 4
TIES = 16  # counts of ties are in the upper bits of a word, counts of larger keys below
MAX_GROUPS = 2**16 - 1  # what those count
MARKS = 32  # logits whose marks fit a word
MOST_LOADS = 12  # vectors of a thread in flight
AT_ONCE = 4  # candidates that are compared before the loop looks whether it ends
ROOM = 2 * AT_ONCE  # words behind the candidates
OWN = 2  # of a thread, compared in one loop: the loops of those that are not there are left out

NOTHING = -(2**31)  # the key below all others: NaN, and what is no logit
LOWEST_KEY = -0x7F800000  # of -inf

# The bits that are zero in keys of float32 values that were 16-bit logits.
FREE_BITS = {"bfloat16": 16, "float16": 13, "float32": 0}


Output = TypeVar("Output", jax.Ref, jax.Array)  # inside the kernel, and outside


class RowOutputs(NamedTuple, Generic[Output]):
    """Outputs of R rows; K1 is K + 1, or K for "parts", whose skipped rows are not initialized."""

    ids: Output  # [R * K1] i32
    values: Output  # [R * K1] f32: logprobs; logits for "parts"
    ranks: Output  # [R] i32: token ranks; the number of larger logits for "parts"
    statistics: Output  # [2 * R] f32: maxima, then logs of sums; sums for "parts"
    # What is wanted besides, see `more_outputs`: an output of its own, since a slice would be a
    # launch.
    top_logits: Output | None = None  # [R * K] f32
    log_sum_exp: Output | None = None  # [R] f32
    entropy: Output | None = None  # [R] f32; for "parts" what `RowSums.weighted` is


def num_selected(k: int, mode: Mode) -> int:
    """The number of tokens of a row to select: the greedy choice is the first."""
    return max(k, 1) if mode == "greedy" else k


def more_outputs(outputs: Outputs, mode: Mode) -> dict[str, int]:
    """The optional outputs that there are, by name, with the numbers that each has of a row."""
    whole = mode != "parts"  # XLA makes the others of parts
    there = {
        "top_logits": outputs.k if outputs.top_logits and whole else 0,
        "log_sum_exp": int(outputs.log_sum_exp and whole),
        "entropy": int(outputs.entropy),
    }
    return {name: size for name, size in there.items() if size}


def first_column(mode: Mode) -> int:
    """The column where the top K start."""
    return 0 if mode == "parts" else 1


def keys_of(x: jax.Array, nan: bool = True) -> jax.Array:
    """int32 `ordered_keys` of float32 x, with NaN, if any, lowest."""
    # The comparison changes nothing, but pass 2 takes 7 % fewer instructions with it (bench.aot).
    keys = jnp.where(x == 0, 0, ordered_keys(x))
    return jnp.where(jnp.isnan(x), NOTHING, keys) if nan else keys


def shortened(keys: jax.Array, dtype: str) -> jax.Array:
    """Ordered keys of logits of this dtype without the bits that carry nothing."""
    return keys >> FREE_BITS[dtype]


def lengthened(keys: jax.Array, dtype: str) -> jax.Array:
    """The ordered keys again."""
    return keys << FREE_BITS[dtype]


def middle(low: jax.Array, high: jax.Array) -> jax.Array:
    """The average of two integers, rounded down, without overflow."""
    return (low & high) + ((low ^ high) >> 1)


def is_valid(maximum: jax.Array, total: jax.Array) -> jax.Array:
    """Whether a row has a finite logit and neither a NaN nor a +inf; its sum is then at least 1."""
    return (maximum > -jnp.inf) & (maximum < jnp.inf) & (total > 0)


class Loaded(NamedTuple):
    """Of all programs that read a row, a warp of them at a time."""

    maxima: list[jax.Array]
    sums: list[jax.Array]
    counts: list[jax.Array] | None  # if counted
    weighted: list[jax.Array] | None  # for the entropy


class Combined(NamedTuple):
    """A row's numbers."""

    maximum: jax.Array  # float32
    total: jax.Array  # float32: the sum of exponentials
    num_larger: jax.Array  # int32
    weighted: jax.Array | None  # float32: the sum of s exp(s), s = (x - maximum) / T


def load_partials(
    partials_ref: Readable,  # [parts * R * programs] f32
    schedule: Schedule,
    num_targets: int,
    target: Index,
    counted: bool,
    entropy: bool,
) -> Loaded:
    """The results of the programs that read a row."""

    def load(part: int) -> list[jax.Array]:
        begin = (part * num_targets + target) * schedule.programs
        offsets = range(0, schedule.programs, WARP)
        return [
            thread.load_in_warps(partials_ref, begin + i, min(WARP, schedule.programs - i))
            for i in offsets
        ]

    return Loaded(load(0), load(1), load(2) if counted else None, load(3) if entropy else None)


def combine(loaded: Loaded, schedule: Schedule, scale: jax.Array) -> Combined:
    """A row's numbers. Every warp does it, so that no thread waits for another warp."""
    programs = schedule.programs

    lane = compat.iota((WARP,), 0, compat.warp_layout())

    def masked(values: list[jax.Array], nothing: float) -> list[jax.Array]:
        """`nothing` where a vector goes beyond the last program."""
        beyond = jnp.float32(nothing)
        return [jnp.where(lane < programs - i * WARP, x, beyond) for i, x in enumerate(values)]

    maxima, sums, counts, weighted = loaded
    lowest = functools.reduce(jnp.maximum, masked(maxima, -jnp.inf))
    maximum = jnp.max(lowest)
    terms, by_exponent = [], []
    for i, (x, total) in enumerate(zip(maxima, sums, strict=True)):
        moved = (x - maximum) * scale
        rescale = jnp.exp2(moved)
        # A part without a finite logit has a sum of 0, which must not meet an infinite factor.
        terms.append(jnp.where(x != -jnp.inf, total * rescale, jnp.float32(0)))
        if weighted is not None:
            moved = jnp.maximum(moved, jnp.float32(LEAST))
            term = (weighted[i] + moved * total) * rescale
            by_exponent.append(jnp.where(x != -jnp.inf, term, jnp.float32(0)))
    total = jnp.sum(functools.reduce(jnp.add, masked(terms, 0)))
    count = jnp.int32(0)
    if counts is not None:
        count = jnp.sum(functools.reduce(jnp.add, masked(counts, 0)))
        count = count.astype(jnp.int32)
    if weighted is None:
        return Combined(maximum, total, count, None)
    summed = jnp.sum(functools.reduce(jnp.add, masked(by_exponent, 0)))
    return Combined(maximum, total, count, summed * jnp.float32(math.log(2)))


def nth_largest(keys: jax.Array, k: int, largest: jax.Array, *, padded: bool = True) -> jax.Array:
    """An int32 so that exactly k keys are not below it, or the k-th largest key.

    Args:
      keys: [n] int32, more than k of them above `NOTHING`.
      k: a Python int.
      largest: their maximum.
      padded: whether any may be `NOTHING`.
    """

    def closer(state: Search) -> Search:
        low, high, _ = state
        cut = middle(low, high)
        lower, upper = middle(low, cut), middle(cut, high)
        of_lower, of_upper = counts_not_below(keys, lower, upper)
        enough, more = of_lower >= k, of_upper >= k
        found = jnp.where(more, of_upper, jnp.where(enough, of_lower, jnp.int32(0)))
        low = jnp.where(more, upper, jnp.where(enough, lower, low))
        return low, jnp.where(more, high, jnp.where(enough, upper, lower)), found

    def unsure(state: Search) -> jax.Array:
        low, high, above = state
        return (middle(low, high) != low) & (above != k)

    # The smallest of them, by a maximum, which is one instruction a warp and a minimum is not.
    smallest = ~jnp.max(jnp.where(keys == NOTHING, NOTHING, ~keys) if padded else ~keys)
    # k keys are at `low` or above it, fewer at `high`.
    low, _, _ = lax.while_loop(unsure, closer, (smallest, largest + 1, jnp.int32(0)))
    return low


def counts_not_below(
    keys: jax.Array, lower: jax.Array, upper: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The numbers of keys at each of two cuts or above it: at most `MAX_GROUPS`, by one sum."""
    above = jnp.where(keys >= lower, jnp.int32(1), jnp.int32(0))
    both = jnp.sum(jnp.where(keys >= upper, jnp.int32(1 + (1 << TIES)), above))
    return both & MAX_GROUPS, both >> TIES & MAX_GROUPS


def choose_groups(
    keys: jax.Array,
    layout: Layout,
    cut: jax.Array,
    k: int,
    chosen_ref: jax.Ref,
    totals_ref: jax.Ref,
) -> None:
    """Write which keys are above the cut, and of those at it the first ones, k at most.

    Args:
      keys: [n] int32.
      layout: of keys, a `compat.run_layout`.
      cut: at most k keys are above it.
      k: a Python int.
      chosen_ref: [k] i32 in shared memory, out: indices of keys, in no order.
      totals_ref: [4] i32 in shared memory, which is used.
    """
    if keys.shape[0] > MAX_GROUPS:
        raise NotImplementedError(
            f"{keys.shape[0]} groups of logits are more than {MAX_GROUPS}: "
            'take implementation="xla", or split the vocabulary over devices'
        )

    def body(keys_here: Vector, cut_here: Vector, chosen: Value, totals: Value) -> None:
        mine = thread.words(keys_here)
        _choose_groups(mine, word(cut_here), k, chosen, totals)

    thread.inline(body, (keys, cut, chosen_ref, totals_ref), (layout, "scalar", None, None), ())


def _choose_groups(mine: list[Word], cut: Word, k: int, chosen: Value, totals: Value) -> None:
    """What a thread does, which holds these keys."""
    flags = [thread.select(key > cut, 1, thread.select(key == cut, 1 << TIES, 0)) for key in mine]
    total = flags[0]
    for flag in flags[1:]:
        total = total + flag
    lane, warp = thread.thread() & 31, thread.thread() >> 5
    upto = total  # of the lanes of the warp up to this one
    for distance in (1, 2, 4, 8, 16):
        below = thread.from_lane_below(upto, distance)
        upto = upto + thread.select(lane >= distance, below, 0)
    thread.when(lane == 31, lambda: thread.store(totals, warp, upto))
    thread.barrier()
    before, everything = upto - total, word(0)
    for i, value in enumerate(thread.load_aligned(totals, 0, WARPS)):
        before = before + thread.select(warp > i, value, 0)
        everything = everything + value
    mask = (1 << TIES) - 1
    # The next places: of a larger key in the lower bits, of a tie, behind all larger, in the upper.
    place = before + ((everything & mask) << TIES)
    first = thread.thread() * len(mine)
    for i, flag in enumerate(flags):
        slot = thread.select(flag == 1, place & mask, place >> TIES)
        wanted = (flag != 0) & (slot < k)
        thread.when(wanted, _storing(chosen, slot, first + i))
        place = place + flag


class Candidates(NamedTuple, Generic[reading.Reference, reading.Place]):
    """Where a program's candidates are, and where it looks for them."""

    schedule: Schedule
    logits_ref: reading.Reference  # [N * V]
    first: reading.Place  # where the row starts
    skew: reading.Place  # `Schedule.skew`
    mask: reading.Mask[reading.Reference, reading.Place] | None  # what it forbids is none
    groups: int  # how many were chosen
    chosen_ref: reading.Reference  # [groups] i32 in shared memory: which
    found_ref: reading.Reference  # [2 * capacity + ROOM] i32, shared, out: key and id of each
    counter_ref: reading.Reference  # [4] i32 in shared memory: how many there are
    capacity: int

    @property
    def loads(self) -> int:
        """Vectors of a thread in a chunk; the chunks are as long as each other."""
        total = -(-self.groups * self.schedule.group_width // (self.schedule.vector * WARPGROUP))
        return -(-total // -(-total // MOST_LOADS))

    @property
    def chunks(self) -> int:
        return -(-self.groups * self.schedule.group_width // (self.loads * self.size))

    @property
    def size(self) -> int:
        """Logits that all threads load at once."""
        return self.schedule.vector * WARPGROUP

    @property
    def whole(self) -> bool:
        """Whether the chunks' vectors are those of the chosen groups, and no more."""
        return self.chunks * self.loads * self.size == self.groups * self.schedule.group_width


ThreadCandidates: TypeAlias = Candidates[Value, Word]


def collect(
    where: Candidates[Readable, Index], cut: jax.Array, cut_id: jax.Array | None
) -> jax.Array:
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
    limit = jnp.int32(where.schedule.vocabulary) if cut_id is None else cut_id
    arguments: tuple[Readable | Index, ...] = (
        where.logits_ref, where.chosen_ref, where.found_ref, where.counter_ref,
        where.first, where.skew, cut, limit,
    )  # fmt: skip
    layouts: tuple[Layout | str | None, ...] = (None,) * 4 + ("scalar",) * 4
    if where.mask is not None:
        arguments, layouts = (*arguments, *where.mask), (*layouts, None, "scalar")

    def body(
        logits: Value, chosen: Value, found: Value, counter: Value,
        first: Vector, skew: Vector, cut_here: Vector, limit_here: Vector,
        words_ref: Value | None = None, start: Vector | None = None,
    ) -> Vector:  # fmt: skip
        mask = None if words_ref is None or start is None else reading.Mask(words_ref, word(start))
        refs = Candidates(
            where.schedule, logits, word(first), word(skew), mask, where.groups, chosen, found,
            counter, where.capacity,
        )  # fmt: skip
        ids = word(limit_here) if limited else None
        return thread.scalar(_collect(refs, word(cut_here), ids))

    count = thread.result((), jnp.int32, compat.GPU.Layout.WG_SPLAT)
    return thread.inline(body, arguments, layouts, count)  # type: ignore[no-any-return]


class LogitVector(NamedTuple):
    """Some consecutive logits of a chosen group."""

    start: Word  # the id of the first one
    begin: Word  # ids of the group's block start here (of fixed groups, the vector's own)
    end: Word  # and end before this


def _vector(where: ThreadCandidates, number: Word) -> LogitVector:
    """A vector by its number, counted through the chosen groups; an empty one after the last."""
    schedule = where.schedule
    each = schedule.group_width // schedule.vector
    place = number >> _log2(each)
    last = place if where.whole else thread.smaller(place, where.groups - 1)
    group = word(thread.load(where.chosen_ref, last))
    if schedule.fixed:  # where a vector goes beyond the row, it is read from further left
        begin = group * schedule.group_width + (number & (each - 1)) * schedule.vector
        start = thread.smaller(begin, schedule.vocabulary - schedule.vector)
        return LogitVector(start, begin, _if_chosen(where, place, schedule.vocabulary))
    block = group >> _log2(schedule.groups_per_block)
    begin = block * schedule.block - where.skew
    start = begin  # as `Schedule.block_ids`, and no more of it than a vocabulary needs
    if not schedule.aligned:
        start = thread.larger(start, 0)
    if not schedule.aligned or schedule.vocabulary % schedule.block:
        start = thread.smaller(start, schedule.vocabulary - schedule.block)
    inside = (group & (schedule.groups_per_block - 1)) * schedule.group_width
    inside = inside + (number & (each - 1)) * schedule.vector
    return LogitVector(start + inside, begin, _if_chosen(where, place, begin + schedule.block))


def _if_chosen(where: ThreadCandidates, place: Word, end: Number) -> Word:
    """`end`, or 0 after the last of the chosen groups."""
    return word(end) if where.whole else thread.select(place < where.groups, end, 0)


def _collect(where: ThreadCandidates, cut: Word, cut_id: Word | None) -> Word:
    """What a thread does."""
    schedule = where.schedule
    me = thread.thread()
    thread.barrier()  # the counter may still be read
    thread.when(me == 0, lambda: thread.store(where.counter_ref, 0, 0))
    thread.barrier()
    chunks, loads = where.chunks, where.loads
    per_word = MARKS // schedule.vector
    value, next_value = _value(cut), _value(cut + 1)

    def limit(vector: LogitVector) -> Word:
        """What a logit of the vector must reach; ids within it are looked at later."""
        reached = value
        if cut_id is not None:
            reached = thread.select(vector.start < cut_id, value, next_value)
        return reached if where.whole else thread.select(vector.end > 0, reached, math.inf)

    def chunk(i: Word, _: Sequence[Word]) -> list[Word]:
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


def _load(where: ThreadCandidates, at: Word) -> list[Word]:
    """A vector of logits as float32; one by one where rows start between vectors."""
    count = where.schedule.vector
    if where.schedule.aligned:
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


def _allowed(
    where: ThreadCandidates, mask: reading.Mask[Value, Word], vectors: list[LogitVector]
) -> Word:
    """A bit for each logit whose token is not forbidden, as `_marks`."""
    size, found = where.schedule.vector, word(0)
    for i, vector in enumerate(vectors):
        bits = reading.bits_of(mask, vector.start, size, where.schedule) & ((1 << size) - 1)
        found = found | (bits << i * size)
    return found


def _keep_marked(
    where: ThreadCandidates, number: Word, marks: Word, cut: Word, cut_id: Word | None
) -> None:
    """Write the candidates among the marked logits of vectors `number`, `number` + 128, ...

    A thread stops where there is no more room: there are too many then, however many.
    """
    size = where.schedule.vector

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


def _append(where: ThreadCandidates, x: Word, token: Word) -> Word:
    """Write a candidate; whether there was room for it."""
    place = thread.add_atomically(where.counter_ref, 0, 1)
    room = place < where.capacity

    def write() -> None:
        key = _mirrored(thread.bits_of(x))
        thread.store(where.found_ref, place + place, ~token)
        thread.store(where.found_ref, place + place + 1, key)

    thread.when(room, write)
    return room


def _mirrored(bits: Word) -> Word:
    """`ordered_keys.mirrored` of one thread's number: Pallas has no bitcast of numbers on a GPU."""
    return thread.select(bits < 0, word(NOTHING) - bits, bits)


def _value(key: Word) -> Word:
    return thread.float_of(_mirrored(key))


def collect_enough(
    where: Candidates[Readable, Index], k: int, cut: jax.Array, largest: jax.Array
) -> jax.Array:
    """Collect the top k, and no more than there is room for; returns how many there are.

    The first cut is that of the groups: where it leaves more, ties or clusters of large logits, it
    is raised by halving the range of keys, and then, among equal logits, that of ids.

    Args:
      where: see there; room for k.
      k: a Python int.
      cut: a key without its free bits (`shortened`), above that of -inf. The top k reach it,
        or all that are above -inf.
      largest: the largest key of the row, without its free bits.
    """
    dtype, room = where.schedule.dtype, where.capacity
    first = collect(where, lengthened(cut, dtype), None)

    def again(state: Collected) -> Collected:
        # Too many are at `low` or above it, fewer than k at `high`; of the logits equal to `low`,
        # fewer than k with those before `low_id`, too many with those before `high_id`.
        _, low, high, low_id, high_id = state
        cut = middle(low, high)
        by_id = cut == low
        cut_id = jnp.where(by_id, middle(low_id, high_id), jnp.int32(where.schedule.vocabulary))
        count = collect(where, lengthened(cut, dtype), cut_id)
        few, many = count < k, count > room
        return (
            count,
            jnp.where(many, cut, low),
            jnp.where(few & ~by_id, cut, high),
            jnp.where(few & by_id, cut_id, low_id),
            jnp.where(many & by_id, cut_id, high_id),
        )

    def unfit(state: Collected) -> jax.Array:
        return (state[0] < k) | (state[0] > room)

    ids = jnp.int32(0), jnp.int32(where.schedule.vocabulary)
    start = (jnp.maximum(first, k), cut, largest + 1, *ids)
    count = lax.while_loop(unfit, again, start)[0]
    return compat.asarray(jnp.where(first > room, count, first))


def _log2(number: int) -> int:
    assert number & (number - 1) == 0, f"{number} is no power of two"
    return number.bit_length() - 1


def in_order(
    found_ref: jax.Ref, count: jax.Array, capacity: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The candidates and their ranks.

    Args:
      found_ref: [2 * capacity + ROOM] i32 in shared memory: `collect`'s.
      count: int32, how many candidates there are, at most `capacity`.
      capacity: a multiple of 128.

    Returns:
      ranks, keys and ids [capacity] int32, the ranks a permutation. Where there is no candidate,
      key `LOWEST_KEY` and id -1, in the last ranks.
    """
    layout = compat.vector_layout()
    kind = thread.result((capacity,), jnp.int32, layout)

    def body(positions: Vector, found: Value, number: Vector) -> tuple[Vector, ...]:
        mine = thread.words(positions)
        columns = zip(*_ranked(mine, found, word(number)), strict=True)
        return tuple(thread.elements_like(positions, column) for column in columns)

    arguments = compat.vector_iota(capacity), found_ref, count
    ranks, keys, ids = thread.inline(body, arguments, (layout, None, "scalar"), (kind,) * 3)
    return ranks, keys, ids


def _ranked(mine: list[Word], found_ref: Value, count: Word) -> list[tuple[Word, Word, Word]]:
    """What a thread does for the candidates of these numbers: rank, key and id of each."""
    me = thread.thread()

    def end() -> None:
        """Candidates that come before no other one, so that the loop needs no end of its own."""
        at = (count + me) + (count + me)
        thread.store(found_ref, at, 0)
        thread.store(found_ref, at + 1, -(1 << 31))

    thread.when(me < AT_ONCE, end)
    thread.barrier()
    pairs = [_pair(thread.load_aligned(found_ref, place + place, 2)) for place in mine]
    longs = [thread.as_long(key, low) for low, key in pairs]

    ranks = _counts(found_ref, count, longs[:OWN])
    for begin in range(OWN, len(mine), OWN):
        own = longs[begin : begin + OWN]
        used = count > begin * WARPGROUP
        ranks += thread.when_else(
            used, functools.partial(_counts, found_ref, count, own), [word(0) for _ in own]
        )
    out = []
    for place, rank, (low, key) in zip(mine, ranks, pairs, strict=True):
        here = place < count
        key, token = thread.select(here, key, LOWEST_KEY), thread.select(here, ~low, -1)
        out.append((thread.select(here, rank, place), key, token))
    return out


def _counts(found_ref: Value, count: Word, own: list[Word]) -> list[Word]:
    """For each of these candidates, how many come before it."""

    def compare(i: Word, ranks: list[Word]) -> list[Word]:
        for j in range(0, AT_ONCE, 2):
            four = thread.load_aligned(found_ref, (i + j) + (i + j), 4)
            for low, key in (_pair(four[:2]), _pair(four[2:])):
                other = thread.as_long(key, low)
                before = [thread.select(other > x, 1, 0) for x in own]
                ranks = [rank + one for rank, one in zip(ranks, before, strict=True)]
        return ranks

    return thread.repeat(0, count, AT_ONCE, [word(0) for _ in own], compare)


def _pair(values: list[Value]) -> tuple[Word, Word]:
    low, key = values
    return word(low), word(key)


def scatter(ref: jax.Ref, start: Index, ranks: jax.Array, values: jax.Array, k: int) -> None:
    """Write each value whose rank is below k to ref[start + rank].

    ref: flat, in global memory; ranks: [n] int32, different; values: [n].
    """

    def body(out: Value, begin: Vector, ranks_here: Vector, values_here: Vector) -> None:
        pairs = zip(thread.words(ranks_here), thread.words(values_here), strict=True)
        for rank, value in pairs:
            thread.when(rank < k, _storing(out, word(begin) + rank, value))

    layout = compat.vector_layout()
    thread.inline(body, (ref, start, ranks, values), (None, "scalar", layout, layout), ())


def _storing(ref: Value, place: Word, value: Word) -> Callable[[], None]:
    return lambda: thread.store(ref, place, value)


class RowOfLogits(NamedTuple):
    """A row as pass 2 reads it."""

    logits_ref: Readable  # [N * V]
    first: Index  # where the row starts
    skew: Index  # `Schedule.skew`
    mask: reading.RowMask | None  # of the top K alone: the group maxima were masked before


class Scratch(NamedTuple):
    """References to shared memory."""

    chosen: jax.Ref  # [groups] i32: the groups chosen
    found: jax.Ref  # [2 * capacity + ROOM] i32: candidates, key and id
    counts: jax.Ref  # [4] i32: counts that threads add up to
    counter: jax.Ref  # [4] i32: how many candidates there are


class Selected(NamedTuple):
    """[capacity] int32 each, in no order; more than K of them."""

    ranks: jax.Array  # a permutation of 0, 1, ...
    keys: jax.Array  # ordered keys; `LOWEST_KEY` where fewer than K logits are above -inf
    ids: jax.Array  # token ids; -1 there


def capacity(k: int) -> int:
    """The number of candidates that there is room for: about twice K, in whole warpgroups."""
    return -(-max(2 * k - 32, 1) // WARPGROUP) * WARPGROUP


def num_chosen(schedule: Schedule, k: int) -> int:
    """How many groups are read again."""
    return min(k, schedule.num_groups)


def scratch_types(schedule: Schedule, k: int) -> list[Any]:
    """The types of `Scratch`, for k >= 1."""
    return [
        GPU.SMEM((num_chosen(schedule, k),), jnp.int32),
        GPU.SMEM((2 * capacity(k) + ROOM,), jnp.int32),
        GPU.SMEM((4,), jnp.int32),
        GPU.SMEM((4,), jnp.int32),
    ]


def select_top_k(
    schedule: Schedule,
    k: int,
    row: RowOfLogits,
    maximum: jax.Array,
    maxima: jax.Array,
    scratch: Scratch,
) -> Selected:
    """The row's k largest logits, and which place each has among them.

    The row is valid; its largest logit is `maximum`, and maxima are those of `load_group_maxima`.
    """
    keys, layout = group_keys(schedule, maxima)
    chosen = num_chosen(schedule, k)
    largest = shortened(key_of_scalar(maximum), schedule.dtype)
    if k >= schedule.num_groups:
        cut = jnp.int32(NOTHING)
    elif k == 1:
        cut = largest
    else:
        padded = schedule.padded_groups > schedule.num_groups
        cut = nth_largest(keys, k, largest, padded=padded)
    choose_groups(keys, layout, cut, chosen, scratch.chosen, scratch.counts)
    chosen_ref, found_ref, _, counter_ref = scratch
    where = Candidates(schedule, *row, chosen, chosen_ref, found_ref, counter_ref, capacity(k))
    above_infinity = (LOWEST_KEY >> FREE_BITS[schedule.dtype]) + 1  # what is -inf is no candidate
    count = collect_enough(where, k, jnp.maximum(cut, above_infinity), largest)
    return Selected(*in_order(scratch.found, count, capacity(k)))


def group_layout(schedule: Schedule) -> Layout:
    """Registers of a row's group maxima: a run of them a thread."""
    return compat.run_layout(schedule.padded_groups, jnp.dtype(schedule.dtype).itemsize)


def load_group_maxima(schedule: Schedule, groups_ref: Readable, start: Index) -> jax.Array:
    """[padded_groups] in the logits' dtype, of a row whose group maxima start there.

    Early: before it is known whether the row is wanted.
    """
    size, layout = schedule.padded_groups, group_layout(schedule)
    return compat.asarray(thread.load_run_at_once(groups_ref, start, size, layout))


def group_keys(schedule: Schedule, maxima: jax.Array) -> tuple[jax.Array, Layout]:
    """[padded_groups] ordered integers of the group maxima, and their layout.

    Without the bits that carry nothing, and `NOTHING` where there is no group.
    """
    size, layout = schedule.padded_groups, group_layout(schedule)
    keys = shortened(keys_of(maxima.astype(jnp.float32), nan=False), schedule.dtype)
    if size == schedule.num_groups:
        return keys, layout
    here = compat.iota((size,), 0, layout) < schedule.num_groups
    return jnp.where(here, keys, NOTHING), layout


def key_of_scalar(x: jax.Array) -> jax.Array:
    """The key of a number that is not NaN."""

    def body(value: Vector) -> Vector:
        return thread.scalar(_mirrored(thread.bits_of(word(value))))

    kind = thread.result((), jnp.int32, GPU.Layout.WG_SPLAT)
    return thread.inline(body, (x,), ("scalar",), kind)  # type: ignore[no-any-return]


def first_largest(schedule: Schedule, row: RowOfLogits) -> jax.Array:
    """The lowest id among the row's largest non-NaN logits; 0 if all are NaN."""
    positions = compat.vector_iota(SCAN_WIDTH)
    last = schedule.vocabulary - SCAN_WIDTH

    def look(i: jax.Array, best: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        best_keys, best_ids = best
        start = jnp.minimum(i * SCAN_WIDTH, last)
        x = compat.load_vector(row.logits_ref, row.first + start, SCAN_WIDTH)
        keys = keys_of(x.astype(jnp.float32))
        larger = keys > best_keys  # an equal one keeps the lower id
        ids = jnp.where(larger, start + positions, best_ids)
        return jnp.where(larger, keys, best_keys), ids

    nothing = compat.full(SCAN_WIDTH, NOTHING)
    steps = -(-schedule.vocabulary // SCAN_WIDTH)
    keys, ids = lax.fori_loop(0, steps, look, (nothing, positions))
    return jnp.min(jnp.where(keys == jnp.max(keys), ids, NO_POSITION))


class Inputs(NamedTuple):
    """Inputs of pass 2: arrays outside the kernel, references inside."""

    logits: jax.Array  # [N * V]
    token_ids: jax.Array | None  # [R] i32 for "given", else None
    partials: jax.Array  # [parts * R * programs] f32 from pass 1
    groups: jax.Array | None  # [R * padded_groups] group maxima from pass 1, or None
    targets: reading.Targets
    allowed: Readable | None = None  # [R * words] i32, as pass 1 got them; for "parts" alone


def finish_rows(
    schedule: Schedule,
    outputs: Outputs,
    mode: Mode,
    inputs: Inputs,
    num_logits_rows: int,
    num_targets: int,
) -> RowOutputs[jax.Array]:
    """The outputs of R target rows; `schedule` as in pass 1, `inputs` as arrays."""
    selected = num_selected(outputs.k, mode)
    kernel = GPU.kernel(
        functools.partial(
            finish_rows_kernel,
            schedule=schedule,
            outputs=outputs,
            mode=mode,
            num_logits_rows=num_logits_rows,
            num_targets=num_targets,
        ),
        out_type=result_types(outputs, mode, num_targets),
        scratch_types=scratch_types(schedule, selected) if selected else (),
        grid=(num_targets,),
        grid_names=("row",),
        compiler_params=compat.compiler_params(approx_math=False),
        kernel_name="finish_rows",
    )
    return named(kernel(inputs), outputs, mode)


def result_types(outputs: Outputs, mode: Mode, num_targets: int) -> list[jax.ShapeDtypeStruct]:
    """The types of `RowOutputs`."""
    columns = outputs.k + first_column(mode)
    types = [
        # Without any column, one number that is not read.
        compat.shape((max(num_targets * columns, 1),), jnp.int32),
        compat.shape((max(num_targets * columns, 1),), jnp.float32),
        compat.shape((num_targets,), jnp.int32),
        compat.shape((2 * num_targets,), jnp.float32),
    ]
    more = more_outputs(outputs, mode).values()
    return types + [compat.shape((num_targets * size,), jnp.float32) for size in more]


def named(found: Sequence[jax.Array], outputs: Outputs, mode: Mode) -> RowOutputs[jax.Array]:
    """Arrays of `result_types`."""
    more = more_outputs(outputs, mode)
    plain = len(found) - len(more)
    return RowOutputs(*found[:plain], **dict(zip(more, found[plain:], strict=True)))


class RowToFinish(NamedTuple):
    """What the program of a target row reads and writes, in the kernel."""

    schedule: Schedule
    outputs: Outputs
    mode: Mode
    num_targets: int
    target: Index  # which target row
    top: Index  # where its top K start in `out.ids` and `out.values`
    inputs: Inputs
    logits: RowOfLogits
    token: jax.Array | None  # the given token, or None
    given: jax.Array | None  # its logit
    temperature: jax.Array | None  # `Targets.temperature`
    group_maxima: jax.Array | None  # [padded_groups], or None without a top K
    out: RowOutputs[jax.Ref]
    scratch: tuple[jax.Ref, ...]  # as `Scratch`

    @property
    def k(self) -> int:
        return self.outputs.k


def finish_rows_kernel(
    inputs: Inputs,
    ids_ref: jax.Ref,  # out, as `RowOutputs`
    values_ref: jax.Ref,
    ranks_ref: jax.Ref,
    statistics_ref: jax.Ref,
    *others: jax.Ref,  # out, as `more_outputs`; scratch
    schedule: Schedule,
    outputs: Outputs,
    mode: Mode,
    num_logits_rows: int,
    num_targets: int,
    own: Callable[[], Index] = lambda: lax.axis_index("row"),  # its target row
    wait: Callable[[], None] = lambda: None,  # until pass 1 has ended
) -> None:
    k = outputs.k
    more = more_outputs(outputs, mode)
    scratch = others[len(more) :]
    optional = dict(zip(more, others, strict=False))
    target = own()
    # What needs no other number is loaded first, so that it all comes from memory at once.
    logits_row, number = inputs.targets.row(target)
    temperature = inputs.targets.temperature(target)
    token = given = None
    if inputs.token_ids is not None:
        token = load_at_once(inputs.token_ids, target)
        clipped = jnp.clip(logits_row, 0, num_logits_rows - 1) * schedule.vocabulary
        given = inputs.logits[clipped + jnp.clip(token, 0, schedule.vocabulary - 1)]
    wait()
    partials = load_partials(
        inputs.partials, schedule, num_targets, target, mode != "greedy", outputs.entropy
    )
    maxima = None
    if num_selected(k, mode):
        assert inputs.groups is not None
        start = target * schedule.padded_groups
        maxima = load_group_maxima(schedule, inputs.groups, start)
    active = reading.is_active(target, logits_row, number, num_logits_rows)
    row = RowToFinish(
        schedule,
        outputs,
        mode,
        num_targets,
        target,
        target * (k + first_column(mode)) + first_column(mode),
        inputs,
        RowOfLogits(
            inputs.logits,
            logits_row * schedule.vocabulary,
            schedule.skew(logits_row),
            reading.mask_of_row(inputs.allowed, target, schedule),
        ),
        token,
        given,
        temperature,
        maxima,
        RowOutputs(ids_ref, values_ref, ranks_ref, statistics_ref, **optional),
        scratch,
    )

    @pl.when(active)
    def _() -> None:
        found = combine(partials, schedule, reading.exponents_scale(temperature))
        (write_parts if mode == "parts" else write_answers)(row, found)

    if first_column(mode):
        pl.when(~active)(lambda: write_skipped(row))


def write_parts(row: RowToFinish, found: Combined) -> None:
    """The outputs of a part of a longer row: what was found, and the top K's logits."""
    maximum, total, count, weighted = found
    write_statistics(row, maximum, total, count)
    if row.out.entropy is not None:
        row.out.entropy[row.target] = weighted
    if row.k:
        valid = is_valid(maximum, total)
        pl.when(valid)(lambda: write_top_k(row, maximum, lambda logits: logits))
        pl.when(~valid)(lambda: write_no_top_k(row, jnp.float32(-jnp.inf)))


def write_answers(row: RowToFinish, found: Combined) -> None:
    """The outputs of a whole row, of an invalid one too."""
    maximum, total, count, weighted = found
    valid = is_valid(maximum, total)
    log_sum = jnp.where(valid, thread.logarithm(total), jnp.float32(jnp.nan))

    def logprobs(x: jax.Array) -> jax.Array:
        scaled = x - maximum
        if row.temperature is not None:
            scaled = reading.over_temperature(scaled, row.temperature)
        return scaled - log_sum

    if row.mode == "given":
        rank = write_given_token(row, valid, count, logprobs)
    else:
        rank = jnp.where(valid, jnp.int32(1), jnp.int32(0))
    write_statistics(row, maximum, log_sum, rank)
    if row.out.log_sum_exp is not None:
        of_logits = maximum
        if row.temperature is not None:
            of_logits = reading.over_temperature(of_logits, row.temperature)
        row.out.log_sum_exp[row.target] = of_logits + log_sum
    if weighted is not None and row.out.entropy is not None:
        entropy = log_sum - weighted / total
        if row.temperature is not None:
            entropy = jnp.where(row.temperature > 0, entropy, row.temperature)
        row.out.entropy[row.target] = entropy
    if num_selected(row.k, row.mode):
        pl.when(valid)(lambda: write_top_k(row, maximum, logprobs))

    @pl.when(~valid)
    def _() -> None:
        write_no_top_k(row, jnp.float32(jnp.nan))
        if row.mode == "greedy":
            # The groups' maxima do not tell the choice where the row has a NaN or an infinity.
            row.out.ids[row.top - 1] = first_largest(row.schedule, row.logits)
            row.out.values[row.top - 1] = jnp.float32(jnp.nan)


def write_skipped(row: RowToFinish) -> None:
    """The outputs of a row that is skipped: no token, no logprob, no token rank."""
    nan = jnp.float32(jnp.nan)
    row.out.ids[row.top - 1] = jnp.int32(-1)
    row.out.values[row.top - 1] = nan
    write_no_top_k(row, nan)
    write_statistics(row, nan, nan, jnp.int32(0))
    for ref in (row.out.log_sum_exp, row.out.entropy):
        if ref is not None:
            ref[row.target] = nan


def write_statistics(
    row: RowToFinish, maximum: jax.Array, summed: jax.Array, rank: jax.Array
) -> None:
    """The row's maximum, its sum or the sum's logarithm, and its token rank or count."""
    row.out.statistics[row.target] = maximum
    row.out.statistics[row.num_targets + row.target] = summed
    row.out.ranks[row.target] = rank


def write_given_token(
    row: RowToFinish, valid: jax.Array, count: jax.Array, logprobs: Convert
) -> jax.Array:
    """Write column 0, the given token and its logprob; returns its token rank."""
    vocabulary = row.schedule.vocabulary
    token = row.token
    assert token is not None
    assert row.given is not None
    known = valid & (token >= 0) & (token < vocabulary)
    chosen = row.given.astype(jnp.float32)
    row.out.ids[row.top - 1] = token
    row.out.values[row.top - 1] = jnp.where(known, logprobs(chosen), jnp.float32(jnp.nan))
    if row.outputs.inclusive:  # padding counts where everything does
        rank = jnp.where(chosen == -jnp.inf, jnp.int32(vocabulary), count)
    else:
        rank = 1 + count
    return jnp.where(known, rank, 0)


def write_no_top_k(row: RowToFinish, value: jax.Array) -> None:
    """Ids of -1 and this value in the row's K columns."""
    if row.k == 0:
        return
    size = capacity(row.k)
    ranks = compat.vector_iota(size)
    scatter(row.out.ids, row.top, ranks, compat.full(size, -1), row.k)
    values = compat.vector_of(size, value)
    scatter(row.out.values, row.top, ranks, values, row.k)
    if row.out.top_logits is not None:
        scatter(row.out.top_logits, row.target * row.k, ranks, values, row.k)


def write_top_k(row: RowToFinish, maximum: jax.Array, convert: Convert) -> None:
    """Select the top K; write their ids, and what `convert` makes of their logits."""
    count = num_selected(row.k, row.mode)
    scratch = Scratch(*row.scratch)
    assert row.group_maxima is not None
    found = select_top_k(row.schedule, count, row.logits, maximum, row.group_maxima, scratch)
    logits = floats(found.keys, jnp.float32)
    values = convert(logits)
    if row.out.top_logits is not None:
        scatter(row.out.top_logits, row.target * row.k, found.ranks, logits, row.k)
    columns = [(row.top, row.k)] if row.k else []
    if row.mode == "greedy":
        columns.append((row.top - 1, 1))  # the greedy choice is the first
    for start, number in columns:
        for ref, what in ((row.out.ids, found.ids), (row.out.values, values)):
            scatter(ref, start, found.ranks, what, number)
