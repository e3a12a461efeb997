"""Buffers of the machine: bounds, alignment and data races are checked.

Every buffer knows which of its bytes are defined: written, by a value that was. A load says so; the
machine (`undefined`) judges what becomes of it.

A data race: two threads access one place, at least one of them stores, and no barrier of their CTA
lies between. Threads of two CTAs of one launch have no barrier. A shuffle, a vote or the order of
lanes in a warp orders nothing here: the PTX memory model gives them no such meaning. One exception:
threads of one CTA that store the same value to one place by the same instruction, as Mosaic GPU
writes scalars. The value is defined then, and a barrier must still lie before anyone loads it.
Atomic additions do not race with each other; beside loads and stores they count as stores.
"""

from collections.abc import Callable

import numpy as np

from .parser import PtxError

GRANULE = 2  # bytes: no narrower access is known to the machine
WORDS = {2: np.uint16, 4: np.uint32, 8: np.uint64}

# Who accesses memory, and when, as one number: its CTA, the barriers that this has passed, and the
# thread in it. Equal but for the thread: no barrier lies between.
MANY = np.int64(1 << 10)  # beside a thread: others of its CTA did the same
NOBODY = np.int64(-1)
SEVERAL_CTAS = np.int64(1 << 62)


def stamp(cta: np.ndarray, epoch: np.ndarray, thread: np.ndarray) -> np.ndarray:
    """cta below 2**31, epoch (barriers passed) below 2**20, thread of the CTA below 2**10."""
    return (cta.astype(np.int64) << 31) | (epoch.astype(np.int64) << 11) | thread


def epoch_of(stamps: np.ndarray) -> np.ndarray:
    return stamps >> 11


def cta_of(stamps: np.ndarray) -> np.ndarray:
    return stamps >> 31


class Buffer:
    """One allocation. Offsets are bytes; an element of an access has `width` bytes."""

    def __init__(
        self,
        name: str,
        data: np.ndarray,
        base: int,
        *,
        writable: bool,
        defined: np.ndarray | None = None,
    ) -> None:
        """data: any contiguous array, which is written to where `writable`.

        defined: [granules] of an input whose maker did not write all of it. What is writable is
        undefined at first.
        """
        self.name = name
        self.data = data.reshape(-1).view(np.uint8)
        self.base = base
        self.defined = defined
        self.accesses = None
        if writable:
            granules = -(-self.data.size // GRANULE)
            self.defined = np.zeros(granules, bool)
            self.accesses = _Accesses(granules, self._at)

    def load(
        self, offsets: np.ndarray, width: int, count: int, stamps: np.ndarray
    ) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
        """Elements offsets + i * width, i < count, each [lanes]; and where they are undefined.

        The second is None where all is defined.
        """
        index = self._index(offsets, width, count)
        words = self._words(width)
        values = [words[index + i] for i in range(count)]
        places = _granules(offsets, width * count)
        if self.accesses is not None:
            self.accesses.load(places, stamps, offsets)
        if self.defined is None:
            return values, None
        defined = self.defined[places]
        if defined.all():
            return values, None
        whole = defined.reshape(len(offsets), count, -1).all(axis=2)
        return values, [~whole[:, i] for i in range(count)]

    def store(
        self,
        offsets: np.ndarray,
        width: int,
        values: list[np.ndarray],
        undefined: list[np.ndarray | None],
        stamps: np.ndarray,
    ) -> None:
        """values: each [lanes], in raw bits; undefined: [lanes], None where all are defined."""
        if self.accesses is None or self.defined is None:
            raise PtxError(f"{self.name} is an input and is stored to")
        index = self._index(offsets, width, len(values))
        places = _granules(offsets, width * len(values))
        words = self._words(width)
        shared = self.accesses.store(places, stamps, offsets)
        for i, value in enumerate(values):
            words[index + i] = value
            if shared and (words[index + i] != value).any():
                lane = int(np.argmax(words[index + i] != value))
                raise PtxError(f"threads store different values to {self._at(offsets, lane)}")
            here = _granules(offsets + i * width, width)
            bad = undefined[i]
            self.defined[here] = True if bad is None else ~bad[:, None]

    def add(self, offsets: np.ndarray, values: np.ndarray, stamps: np.ndarray) -> np.ndarray:
        """Atomic additions to 32-bit integers, lane after lane; returns the integers before."""
        if self.accesses is None or self.defined is None:
            raise PtxError(f"{self.name} is an input and is added to")
        index = self._index(offsets, 4, 1)
        places = _granules(offsets, 4)
        if not self.defined[places].all():
            raise PtxError(f"{self._at(offsets, 0)} is added to and was never written")
        self.accesses.add(places, stamps, offsets)
        words, before = self._words(4), np.zeros(len(offsets), np.uint32)
        for lane, (place, value) in enumerate(zip(index, values, strict=True)):
            before[lane] = words[place]
            words[place] += value
        return before

    def _words(self, width: int) -> np.ndarray:
        return self.data[: self.data.size // width * width].view(WORDS[width])

    def _index(self, offsets: np.ndarray, width: int, count: int) -> np.ndarray:
        size = width * count
        outside = (offsets < 0) | (offsets + size > self.data.size)
        if outside.any():
            where = self._at(offsets, int(np.argmax(outside)))
            raise PtxError(f"{where} is outside its {self.data.size} bytes, {size} are accessed")
        crooked = (offsets + self.base) % size != 0
        if crooked.any():
            where = self._at(offsets, int(np.argmax(crooked)))
            raise PtxError(f"{where} is not aligned to {size} bytes")
        return offsets // width

    def _at(self, offsets: np.ndarray, lane: int) -> str:
        return f"{self.name} + {int(offsets[lane])}"


class _Accesses:
    """Per granule the last store, the last load and the last atomic addition."""

    def __init__(self, granules: int, at: Callable[[np.ndarray, int], str]) -> None:
        self.stored = np.full(granules, NOBODY)
        self.loaded = np.full(granules, NOBODY)
        self.added = np.full(granules, NOBODY)
        self.at = at  # the name of a lane's offset

    def load(self, places: np.ndarray, stamps: np.ndarray, offsets: np.ndarray) -> None:
        mine = stamps[:, None]
        for before, what in ((self.stored, "a store"), (self.added, "an atomic addition")):
            race = _unordered(before[places], mine)
            if race.any():
                raise self._race(race, offsets, f"loaded without a barrier after {what}")
        before = self.loaded[places]
        others = (epoch_of(before) == epoch_of(mine)) & (before != mine)
        elsewhere = (before != NOBODY) & (cta_of(before) != cta_of(mine))
        self.loaded[places] = np.where(elsewhere, SEVERAL_CTAS, np.where(others, mine | MANY, mine))
        self._mark(self.loaded, places, mine)

    def store(self, places: np.ndarray, stamps: np.ndarray, offsets: np.ndarray) -> bool:
        """Whether several threads store to one place here."""
        mine = stamps[:, None]
        kinds = ((self.loaded, "a load"), (self.stored, "a store"), (self.added, "an addition"))
        for before, what in kinds:
            race = _unordered(before[places], mine)
            if race.any():
                raise self._race(race, offsets, f"stored to without a barrier after {what}")
        self.stored[places] = mine
        elsewhere = cta_of(self.stored[places]) != cta_of(mine)
        if elsewhere.any():
            raise self._race(elsewhere, offsets, "stored to by several CTAs")
        return self._mark(self.stored, places, mine)

    def add(self, places: np.ndarray, stamps: np.ndarray, offsets: np.ndarray) -> None:
        """Additions of several threads are ordered by themselves, beside loads and stores not."""
        mine = stamps[:, None]
        for before, what in ((self.loaded, "a load"), (self.stored, "a store")):
            race = _unordered(before[places], mine)
            if race.any():
                raise self._race(race, offsets, f"added to without a barrier after {what}")
        # Nobody's own: a load by any thread, the adding one too, needs a barrier.
        self.added[places] = mine | MANY

    def _mark(self, last: np.ndarray, places: np.ndarray, mine: np.ndarray) -> bool:
        """Mark the places to which another lane of this instruction wrote its stamp too."""
        now = last[places]
        lost = (now & ~MANY) != mine
        if not lost.any():
            return False
        last[places[lost]] |= np.where(now[lost] == SEVERAL_CTAS, 0, MANY)
        return True

    def _race(self, race: np.ndarray, offsets: np.ndarray, what: str) -> PtxError:
        lane = int(np.argmax(race.any(axis=1)))
        return PtxError(f"data race: {self.at(offsets, lane)} is {what}")


def _unordered(before: np.ndarray, mine: np.ndarray) -> np.ndarray:
    """Where another thread's access is not before a barrier of its CTA, or is another CTA's."""
    same_epoch = epoch_of(before) == epoch_of(mine)
    elsewhere = cta_of(before) != cta_of(mine)
    return (before != NOBODY) & (before != mine) & (same_epoch | elsewhere)


def _granules(offsets: np.ndarray, size: int) -> np.ndarray:
    """[lanes, size // GRANULE]"""
    return (offsets // GRANULE)[:, None] + np.arange(size // GRANULE)
