"""Buffers of the machine: bounds, alignment and data races are checked.

Every buffer knows which of its bytes are defined: written, by a value that was. A load says so; the
machine (`undefined`) judges what becomes of it.

A data race: two threads access one place, at least one of them stores, and no barrier of their CTA
lies between. Threads of two CTAs of one launch have no barrier. A shuffle, a vote or the order of
lanes in a warp orders nothing here: the PTX memory model gives them no such meaning. One exception:
threads of one CTA that store the same value to one place by the same instruction, as Mosaic GPU
writes scalars. The value is defined then, and a barrier must still lie before anyone loads it.
"""

from dataclasses import dataclass, field

import numpy as np

from tests.ptx.parser import PtxError

GRANULE = 2  # bytes: no narrower access is known to the machine
NOBODY = -1
WORDS = {2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True)
class Lanes:
    """Who accesses memory."""

    thread: np.ndarray  # [lanes] number of the thread in the launch
    cta: np.ndarray  # [lanes] number of its CTA in the launch
    epoch: np.ndarray  # [lanes] barriers that its CTA has passed


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
            self.accesses = _Accesses(granules)

    def load(
        self, offsets: np.ndarray, width: int, count: int, lanes: Lanes
    ) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
        """Elements offsets + i * width, i < count, each [lanes]; and where they are undefined.

        The second is None where all is defined.
        """
        index = self._index(offsets, width, count)
        words = self._words(width)
        values = [words[index + i] for i in range(count)]
        places = _granules(offsets, width * count)
        if self.accesses is not None:
            self.accesses.load(places, lanes, self._at, offsets)
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
        lanes: Lanes,
    ) -> None:
        """values: each [lanes], in raw bits; undefined: [lanes], None where all are defined."""
        if self.accesses is None or self.defined is None:
            raise PtxError(f"{self.name} is an input and is stored to")
        index = self._index(offsets, width, len(values))
        places = _granules(offsets, width * len(values))
        words = self._words(width)
        shared = self.accesses.store(places, lanes, self._at, offsets)
        for i, value in enumerate(values):
            words[index + i] = value
            if shared and (words[index + i] != value).any():
                lane = int(np.argmax(words[index + i] != value))
                raise PtxError(f"threads store different values to {self._at(offsets, lane)}")
            here = _granules(offsets + i * width, width)
            bad = undefined[i]
            self.defined[here] = True if bad is None else ~bad[:, None]

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


@dataclass
class _Accesses:
    """Per granule the last store and the loads since."""

    granules: int
    stored_by: np.ndarray = field(init=False)
    stored_in: np.ndarray = field(init=False)  # epoch
    stored_cta: np.ndarray = field(init=False)
    by_many: np.ndarray = field(init=False)  # the last store was several threads'
    loaded_by: np.ndarray = field(init=False)
    loaded_in: np.ndarray = field(init=False)
    loaded_cta: np.ndarray = field(init=False)
    loaded_by_many: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        for name in (
            "stored_by",
            "stored_in",
            "stored_cta",
            "loaded_by",
            "loaded_in",
            "loaded_cta",
        ):
            setattr(self, name, np.full(self.granules, NOBODY, np.int32))
        self.by_many = np.zeros(self.granules, bool)
        self.loaded_by_many = np.zeros(self.granules, bool)

    def load(self, places: np.ndarray, lanes: Lanes, at, offsets) -> None:
        thread, cta, epoch = lanes.thread[:, None], lanes.cta[:, None], lanes.epoch[:, None]
        race = self._unordered_store(places, thread, cta, epoch)
        if race.any():
            lane = int(np.argmax(race.any(axis=1)))
            raise PtxError(
                f"data race: {at(offsets, lane)} is loaded without a barrier after a store"
            )
        by = self.loaded_by[places]
        recent = (by != NOBODY) & (
            (self.loaded_cta[places] != cta) | (self.loaded_in[places] == epoch)
        )
        many = recent & ((by != thread) | self.loaded_by_many[places])
        self.loaded_by[places] = thread
        self.loaded_cta[places] = cta
        self.loaded_in[places] = epoch
        many |= self.loaded_by[places] != thread  # several lanes of this very instruction
        self.loaded_by_many[places] = False
        self.loaded_by_many[places[many]] = True

    def store(self, places: np.ndarray, lanes: Lanes, at, offsets) -> bool:
        """Whether several threads store to one place here."""
        thread, cta, epoch = lanes.thread[:, None], lanes.cta[:, None], lanes.epoch[:, None]
        by, loaded_cta = self.loaded_by[places], self.loaded_cta[places]
        recent = (by != NOBODY) & ((loaded_cta != cta) | (self.loaded_in[places] == epoch))
        race = recent & ((by != thread) | self.loaded_by_many[places])
        after = "a load"
        if not race.any():
            race, after = self._unordered_store(places, thread, cta, epoch), "a store"
        if race.any():
            lane = int(np.argmax(race.any(axis=1)))
            raise PtxError(
                f"data race: {at(offsets, lane)} is stored to without a barrier after {after}"
            )
        self.stored_by[places] = thread
        self.stored_cta[places] = cta
        self.stored_in[places] = epoch
        many = self.stored_by[places] != thread
        if (self.stored_cta[places] != cta).any():
            lane = int(np.argmax((self.stored_cta[places] != cta).any(axis=1)))
            raise PtxError(f"data race: several CTAs store to {at(offsets, lane)}")
        self.by_many[places] = False
        self.by_many[places[many]] = True
        return bool(many.any())

    def _unordered_store(self, places, thread, cta, epoch) -> np.ndarray:
        """Where another thread's last store is not before a barrier."""
        by = self.stored_by[places]
        recent = (by != NOBODY) & (
            (self.stored_cta[places] != cta) | (self.stored_in[places] == epoch)
        )
        return recent & ((by != thread) | self.by_many[places])


def _granules(offsets: np.ndarray, size: int) -> np.ndarray:
    """[lanes, size // GRANULE]"""
    return (offsets // GRANULE)[:, None] + np.arange(size // GRANULE)
