"""The work of each thread of pass 2 on a row's top K: `selection` in vectors calls it.

Which parts are chosen, which of their logits are candidates, and the rank of each of these.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeAlias

from pallas_kernels.backends.mosaic_gpu import reading, thread
from pallas_kernels.backends.mosaic_gpu.schedule import WARPGROUP, Schedule
from pallas_kernels.backends.mosaic_gpu.thread import Number, Value, Word, word

_WARPS = 4
TIES = 16  # counts of ties are in the upper bits of a word, counts of larger keys below
MARKS = 32  # logits whose marks fit a word
MOST_LOADS = 12  # vectors of a thread in flight
AT_ONCE = 4  # candidates that are compared before the loop looks whether it ends
OWN = 2  # of a thread, compared in one loop: the loops of those that are not there are left out
NOTHING = -(2**31)  # the key below all others: NaN, and what is no logit
LOWEST_KEY = -0x7F800000  # of -inf


class Candidates(NamedTuple, Generic[reading.Reference, reading.RowPlace]):
    """Where a program's candidates are, and where it looks for them."""

    schedule: Schedule
    logits_ref: reading.Reference  # [N * V]
    width: int  # of the array
    first: reading.RowPlace  # where the row starts
    mask: reading.Mask[reading.Reference, reading.RowPlace] | None  # what it forbids is none
    parts: int  # how many were chosen
    chosen_ref: reading.Reference  # [parts] i32 in shared memory: which
    found_ref: reading.Reference  # [2 * capacity + ROOM] i32, shared, out: key and id of each
    counter_ref: reading.Reference  # [4] i32 in shared memory: how many there are
    capacity: int

    @property
    def aligned(self) -> bool:
        """Whether every row starts at a vector."""
        return self.width % self.schedule.vector == 0

    @property
    def loads(self) -> int:
        """Vectors of a thread in a chunk; the chunks are as long as each other."""
        total = -(-self.parts * self.schedule.part_width // (self.schedule.vector * WARPGROUP))
        return -(-total // -(-total // MOST_LOADS))

    @property
    def chunks(self) -> int:
        return -(-self.parts * self.schedule.part_width // (self.loads * self.size))

    @property
    def size(self) -> int:
        """Logits that all threads load at once."""
        return self.schedule.vector * WARPGROUP

    @property
    def whole(self) -> bool:
        """Whether the chunks' vectors are those of the chosen parts, and no more."""
        return self.chunks * self.loads * self.size == self.parts * self.schedule.part_width


ThreadCandidates: TypeAlias = Candidates[Value, Word]


def choose_of_thread(mine: list[Word], cut: Word, k: int, chosen: Value, totals: Value) -> None:
    """The work of a thread that holds these keys."""
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
    thread.sync_threads()
    before, everything = upto - total, word(0)
    for i, value in enumerate(thread.load_aligned(totals, 0, _WARPS)):
        before = before + thread.select(warp > i, value, 0)
        everything = everything + value
    mask = (1 << TIES) - 1
    # The next places: of a larger key in the lower bits, of a tie, behind all larger, in the upper.
    place = before + ((everything & mask) << TIES)
    first = thread.thread() * len(mine)
    for i, flag in enumerate(flags):
        slot = thread.select(flag == 1, place & mask, place >> TIES)
        wanted = (flag != 0) & (slot < k)
        thread.when(wanted, storing(chosen, slot, first + i))
        place = place + flag


class LogitVector(NamedTuple):
    """Some consecutive logits of a chosen part."""

    start: Word  # the id of the first one
    begin: Word  # ids of the vector's own start here
    end: Word  # and end before this


def _vector(where: ThreadCandidates, number: Word) -> LogitVector:
    """A vector by its number, counted through the chosen parts; an empty one after the last."""
    schedule = where.schedule
    each = schedule.part_width // schedule.vector
    place = number >> _log2(each)
    last = place if where.whole else thread.smaller(place, where.parts - 1)
    part = word(thread.load(where.chosen_ref, last))
    # Where a vector goes beyond the row, it is read from further left.
    begin = part * schedule.part_width + (number & (each - 1)) * schedule.vector
    start = thread.smaller(begin, schedule.vocabulary - schedule.vector)
    return LogitVector(start, begin, _if_chosen(where, place, schedule.vocabulary))


def _if_chosen(where: ThreadCandidates, place: Word, end: Number) -> Word:
    """`end`, or 0 after the last of the chosen parts."""
    return word(end) if where.whole else thread.select(place < where.parts, end, 0)


def collect_of_thread(where: ThreadCandidates, cut: Word, cut_id: Word | None) -> Word:
    """The work of a thread."""
    schedule = where.schedule
    me = thread.thread()
    thread.sync_threads()  # the counter may still be read
    thread.when(me == 0, lambda: thread.store(where.counter_ref, 0, 0))
    thread.sync_threads()
    chunks, loads = where.chunks, where.loads
    per_word = MARKS // schedule.vector
    value, next_value = _value(cut), _value(cut + 1)

    def limit(vector: LogitVector) -> Word:
        """The least logit of the vector that counts; ids within it are looked at later."""
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
    thread.sync_threads()
    return word(thread.load(where.counter_ref, 0))


def _load(where: ThreadCandidates, at: Word) -> list[Word]:
    """A vector of logits as float32; one by one where rows start between vectors."""
    count = where.schedule.vector
    if where.aligned:
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
        bits = reading.mask_bits(mask, vector.start, size, where.schedule) & ((1 << size) - 1)
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
        key = mirrored_word(thread.bits_of(x))
        thread.store(where.found_ref, place + place, ~token)
        thread.store(where.found_ref, place + place + 1, key)

    thread.when(room, write)
    return room


def mirrored_word(bits: Word) -> Word:
    """`ordered_keys.mirrored` of one thread's number: Pallas has no bitcast of numbers on a GPU."""
    return thread.select(bits < 0, word(NOTHING) - bits, bits)


def _value(key: Word) -> Word:
    return thread.float_of(mirrored_word(key))


def _log2(number: int) -> int:
    assert number & (number - 1) == 0, f"{number} is no power of two"
    return number.bit_length() - 1


def ranked(mine: list[Word], found_ref: Value, count: Word) -> list[tuple[Word, Word, Word]]:
    """A thread's work on the candidates of these numbers: rank, key and id of each."""
    me = thread.thread()

    def end() -> None:
        """Candidates that come before no other one, so that the loop needs no end of its own."""
        at = (count + me) + (count + me)
        thread.store(found_ref, at, 0)
        thread.store(found_ref, at + 1, -(1 << 31))

    thread.when(me < AT_ONCE, end)
    thread.sync_threads()
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


def storing(ref: Value, place: Word, value: Word) -> Callable[[], None]:
    return lambda: thread.store(ref, place, value)
