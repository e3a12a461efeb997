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

import numpy as np

from .parser import PtxError

GRANULE = 2  # bytes: no narrower access is known to the machine

# Who accesses memory, and when, as one number: its CTA, the barriers that this has passed, and the
# thread in it. Equal except for the thread: no barrier lies between.
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
    """One allocation. Offsets are bytes, one a lane."""

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
        self.name, self.base, self.defined = name, base, defined
        self.data = data.reshape(-1).view(np.uint8)
        self.last: dict[str, np.ndarray] = {}  # accesses of each kind, by granule
        if writable:
            granules = -(-self.data.size // GRANULE)
            self.defined = np.zeros(granules, bool)
            kinds = "a load", "a store", "an atomic addition"
            self.last = {kind: np.full(granules, NOBODY) for kind in kinds}

    def load(
        self, offsets: np.ndarray, dtype: type, count: int, stamps: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Elements [count, lanes], one after the other at each offset; and which are undefined."""
        words, index, places = self._find(offsets, dtype, count)
        values = words[index + np.arange(count)[:, None]]
        if self.last:
            kinds = "a store", "an atomic addition"
            mine = self._ordered("loaded", places, stamps, offsets, *kinds)
            loaded = self.last["a load"]
            before = loaded[places]
            others = (epoch_of(before) == epoch_of(mine)) & (before != mine)
            elsewhere = (before != NOBODY) & (cta_of(before) != cta_of(mine))
            loaded[places] = np.where(elsewhere, SEVERAL_CTAS, np.where(others, mine | MANY, mine))
            _mark(loaded, places, mine)
        if self.defined is None:
            return values, None
        defined = self.defined[places]
        if defined.all():
            return values, None
        return values, ~defined.reshape(len(offsets), count, -1).all(axis=2).T

    def store(
        self,
        offsets: np.ndarray,
        values: list[np.ndarray],
        undefined: list[np.ndarray | None],
        stamps: np.ndarray,
    ) -> None:
        """values: each [lanes], in raw bits; undefined: [lanes], None where all are defined."""
        words, index, places = self._find(offsets, values[0].dtype, len(values), "stored to")
        mine = self._ordered("stored to", places, stamps, offsets, *self.last)
        stored, width = self.last["a store"], values[0].dtype.itemsize
        stored[places] = mine
        elsewhere = cta_of(stored[places]) != cta_of(mine)
        self._refuse(elsewhere, offsets, "data race: {} is stored to by several CTAs")
        shared = _mark(stored, places, mine)  # several threads store to one place here
        for i, (value, bad) in enumerate(zip(values, undefined, strict=True)):
            words[index + i] = value
            if shared:
                differ = words[index + i] != value
                self._refuse(differ, offsets, "threads store different values to {}")
            here = _granules(offsets + i * width, width)
            self.defined[here] = True if bad is None else ~bad[:, None]

    def add(self, offsets: np.ndarray, values: np.ndarray, stamps: np.ndarray) -> np.ndarray:
        """Atomic additions to 32-bit integers, lane after lane; returns the integers before.

        Those of several threads are ordered by themselves, beside loads and stores they are not.
        """
        words, index, places = self._find(offsets, np.uint32, 1, "added to")
        self._refuse(~self.defined[places], offsets, "{} is added to and was never written")
        mine = self._ordered("added to", places, stamps, offsets, "a load", "a store")
        # Nobody's own: a load by any thread, the adding one too, needs a barrier.
        self.last["an atomic addition"][places] = mine | MANY
        before = np.zeros(len(offsets), np.uint32)
        for lane, (place, value) in enumerate(zip(index, values, strict=True)):
            before[lane] = words[place]
            words[place] += value
        return before

    def give(self, ctas: np.ndarray, cta: np.int64, epoch: np.int64) -> None:
        """Count what some CTAs have accessed as this one's, of this epoch."""
        for last in self.last.values():
            last[np.isin(cta_of(last), ctas)] = stamp(cta, epoch, MANY)

    def _find(
        self, offsets: np.ndarray, dtype: type | np.dtype, count: int, written: str = ""
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The buffer's words, for each lane the number of its first one, and its granules."""
        if written and not self.last:
            raise PtxError(f"{self.name} is an input and is {written}")
        width, held = np.dtype(dtype).itemsize, self.data.size
        size = width * count
        outside = (offsets < 0) | (offsets + size > held)
        self._refuse(outside, offsets, f"{{}} is outside its {held} bytes, {size} are accessed")
        crooked = (offsets + self.base) % size != 0
        self._refuse(crooked, offsets, f"{{}} is not aligned to {size} bytes")
        words = self.data[: held // width * width].view(dtype)
        return words, offsets // width, _granules(offsets, size)

    def _ordered(
        self, what: str, places: np.ndarray, stamps: np.ndarray, offsets: np.ndarray, *kinds: str
    ) -> np.ndarray:
        """The accesses' stamps [lanes, 1], if those of these kinds were before a barrier."""
        mine = stamps[:, None]
        for kind in kinds:
            race = _unordered(self.last[kind][places], mine)
            why = f"data race: {{}} is {what} without a barrier after {kind}"
            self._refuse(race, offsets, why)
        return mine

    def _refuse(self, where: np.ndarray, offsets: np.ndarray, why: str) -> None:
        if where.any():
            lane = np.argmax(where.reshape(len(offsets), -1).any(axis=1))
            raise PtxError(why.format(f"{self.name} + {int(offsets[lane])}"))


def _mark(last: np.ndarray, places: np.ndarray, mine: np.ndarray) -> bool:
    """Mark the places to which another lane of this instruction wrote its stamp too."""
    now = last[places]
    lost = (now & ~MANY) != mine
    if lost.any():
        last[places[lost]] |= np.where(now[lost] == SEVERAL_CTAS, 0, MANY)
        return True
    return False


def _unordered(before: np.ndarray, mine: np.ndarray) -> np.ndarray:
    """Where another thread's access is not before a barrier of its CTA, or is another CTA's."""
    same_epoch = epoch_of(before) == epoch_of(mine)
    elsewhere = cta_of(before) != cta_of(mine)
    return (before != NOBODY) & (before != mine) & (same_epoch | elsewhere)


def _granules(offsets: np.ndarray, size: int) -> np.ndarray:
    """[lanes, size // GRANULE]"""
    return (offsets // GRANULE)[:, None] + np.arange(size // GRANULE)
