"""Heartbeats: what a worker process says of itself, and how it is kept up to date."""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgpack

BEAT_SECONDS = 1.0  # between two heartbeats
MAX_REFUSAL = 4096  # characters: the sender of commands takes no long heartbeats
NOTES_KEPT, NOTE_CHARS = 16, 200  # notes of a heartbeat, and characters of each


class Phase(StrEnum):
    """The work that a worker process is at."""

    STARTING = "starting"  # nothing was heard of it
    IMPORTING = "importing"
    LOADING = "loading"
    COMPILING = "compiling"
    IDLE = "idle"
    STEPPING = "stepping"

    @property
    def takes_its_time(self) -> bool:
        """Whether no progress is expected of it: what it does may last, and nothing counts it."""
        return self not in (Phase.IDLE, Phase.STEPPING)


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """The last heartbeat of a worker.

    Attributes:
      beats: heartbeats so far; 0 before the first.
      taken: commands that it has taken, counted from the first one.
      ready: it has loaded its model and carries commands out.
      progress: a number that grows with every step and every part of a prompt.
      phase: what it is doing.
      done, total: of the tensors that it loads, or of the programs that it compiles; a total of 0
        is not known.
      what: the name of what it compiles.
      members: what the other processes of its group do, each as `str` of its heartbeat.
      devices: what it computes on, in JAX's words.
      missing: it has noticed that a command did not arrive.
      answered: the number of the last update of its weights that it has loaded or refused.
      refusal: why it refused that one; empty where it loaded it.
      weights_version: of the weights that it uses.
      noted: how many notes it has made for the log.
      notes: the last of them, each a short line.
    """

    beats: int = 0
    taken: int = 0
    ready: bool = False
    progress: int = 0
    phase: Phase = Phase.STARTING
    done: int = 0
    total: int = 0
    what: str = ""
    members: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    missing: bool = False
    answered: int = 0
    refusal: str = ""
    weights_version: int = 0
    noted: int = 0
    notes: tuple[str, ...] = ()

    def notes_since(self, before: "Heartbeat") -> tuple[str, ...]:
        """Its notes that an earlier heartbeat did not have; the oldest may be gone."""
        new = self.noted - before.noted
        return self.notes[-new:] if new > 0 else ()

    @property
    def takes_its_time(self) -> bool:
        """Whether any process of the worker is in a phase of which no progress is expected."""
        return any(_phase_of(text).takes_its_time for text in (self.phase, *self.members))

    def __str__(self) -> str:
        text = str(self.phase)
        if self.done or self.total:
            text += f" {self.done} of {self.total}" if self.total else f" {self.done}"
        return f"{text} ({self.what})" if self.what else text

    def to_bytes(self) -> bytes:
        """The heartbeat without the number of beats, which the hearer counts."""
        made: bytes = msgpack.packb([getattr(self, name) for name in _FIELDS])
        return made

    @classmethod
    def from_bytes(cls, data: bytes, beats: int) -> "Heartbeat":
        """The heartbeat that `to_bytes` wrote, as heartbeat number `beats`.

        Raises:
          ValueError: the bytes are not a heartbeat.
        """
        try:
            pairs = zip(_FIELDS.items(), msgpack.unpackb(data), strict=True)
            return cls(beats=beats, **{name: read(value) for (name, read), value in pairs})
        except (ValueError, TypeError, LookupError, msgpack.UnpackException) as error:
            raise ValueError(f"not a heartbeat: {data[:200]!r} ({error!r})") from error


class ProcessStats:
    """A process's next words of itself; its main thread writes, its control thread reads.

    Attributes:
      heartbeat: as it stands now.
      members: asked what the other processes of the group do, at every heartbeat.
    """

    def __init__(self) -> None:
        self.heartbeat = Heartbeat(phase=Phase.IMPORTING)
        self.members: Callable[[], tuple[str, ...]] = tuple
        self.told: Callable[[], None] = lambda: None  # wakes the thread that sends heartbeats
        self._writing = threading.Lock()

    def enter(self, phase: Phase, done: int = 0, total: int = 0, what: str = "") -> None:
        """Begin a phase, or a further part of it."""
        now = self.heartbeat
        if (phase, done, total, what) != (now.phase, now.done, now.total, now.what):
            self.change(phase=phase, done=done, total=total, what=what)

    def load(self, done: int, total: int) -> None:
        """Say how many tensors of the model are there."""
        self.enter(Phase.LOADING, done, total)

    def advance(self) -> None:
        """Count a step."""
        self.enter(Phase.STEPPING)
        self.change(progress=self.heartbeat.progress + 1)

    def be_ready(self, devices: tuple[str, ...]) -> None:
        """Say at once that commands are carried out from now on."""
        self.enter(Phase.IDLE)
        self.change(ready=True, devices=devices)
        self.told()

    def answer(self, number: int, refusal: str) -> None:
        """Say at once that update `number` of the weights is loaded, or why it is not."""
        self.change(answered=number, refusal=refusal[:MAX_REFUSAL])
        self.told()

    def use(self, weights_version: int) -> None:
        """Say at once which weights are used."""
        self.change(weights_version=weights_version)
        self.told()

    def note(self, text: str) -> None:
        """Have a line written to the log, with the next heartbeat."""
        notes = (*self.heartbeat.notes, text[:NOTE_CHARS])[-NOTES_KEPT:]
        self.change(noted=self.heartbeat.noted + 1, notes=notes)

    def change(self, **values: Any) -> None:
        """Replace some of the heartbeat's values."""
        with self._writing:
            self.heartbeat = replace(self.heartbeat, **values)

    def now(self, taken: int, missing: bool) -> Heartbeat:
        """The heartbeat of this moment, for a process that has taken so many commands."""
        return replace(self.heartbeat, taken=taken, missing=missing, members=self.members())


class QuietTimer:
    """Seconds without a sign of life, counted only while somebody listened.

    A listener that was away itself (its caller paused, its machine slept) has not heard silence: a
    gap between two looks counts as `LONGEST_LOOK` seconds at most.
    """

    LONGEST_LOOK = 1.0

    def __init__(self, grace: float = 0.0) -> None:
        """Begin with `grace` seconds that count for nothing."""
        self._looked: float | None = None
        self._seconds = -grace

    @property
    def seconds(self) -> float:
        return max(self._seconds, 0.0)

    def look(self, now: float, *, sign: bool) -> None:
        """Note whether there was a sign of life since the last look; `now` in seconds."""
        since = 0.0 if self._looked is None else now - self._looked
        self._looked = now
        self._seconds = 0.0 if sign else self._seconds + min(since, self.LONGEST_LOOK)

    def hear(self) -> None:
        """Note a sign of life between two looks."""
        self._seconds = 0.0


def _phase_of(text: object) -> Phase:
    """The phase that `str` of a heartbeat begins with. ValueError, LookupError: there is none."""
    if not isinstance(text, str):
        raise ValueError(f"{text!r} is no text")
    return Phase(text.split(maxsplit=1)[0])


def _count(value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _texts(values: Iterable[object]) -> tuple[str, ...]:
    return tuple(map(str, values))


def _members(values: Iterable[object]) -> tuple[str, ...]:
    for text in (texts := tuple(values)):
        _phase_of(text)
    return _texts(texts)


# What travels of a heartbeat, in this order, and how each is read.
_FIELDS: dict[str, Callable[[Any], Any]] = {
    "taken": _count, "ready": bool, "progress": _count, "phase": Phase, "done": _count,
    "total": _count, "what": str, "members": _members, "devices": _texts, "missing": bool,
    "answered": _count, "refusal": str, "weights_version": _count, "noted": _count,
    "notes": _texts,
}  # fmt: skip


ACTIVITY_SECONDS = 1.0  # between two readings of the kernel's counts
LEAST_TICKS = 2  # hundredths of a second of CPU time in between; a thread that waits takes none


class Activity:
    """Whether a process of this host has computed, or read from a disk."""

    def __init__(self, pid: int, directory: Path = Path("/proc")) -> None:
        self._path = directory / str(pid) / "stat"
        self._since: float | None = None  # seconds
        self._before = (0, 0)
        self._works = False

    def look(self, now: float) -> bool:
        """Whether it did between the last two readings; `now` in seconds, monotonic.

        A process that is not here (of another host, or dead) did nothing.
        """
        if self._since is not None and now - self._since < ACTIVITY_SECONDS:
            return self._works
        activity = self._read()
        self._works = (
            activity is not None
            and self._since is not None
            and (
                activity[0] - self._before[0] >= LEAST_TICKS
                or activity[1] != self._before[1]
            )
        )  # fmt: skip
        self._since, self._before = now, activity or (0, 0)
        return self._works

    def _read(self) -> tuple[int, int] | None:
        """Ticks of CPU time, and pages read from a disk."""
        try:
            fields = self._path.read_bytes().rpartition(b")")[2].split()
            return int(fields[11]) + int(fields[12]), int(fields[9])
        except (OSError, LookupError, ValueError):
            return None


class Liveness:
    """A process, as one hears of it."""

    def __init__(self, pid: int, *, grace: float = 0.0) -> None:
        """Begin with `grace` seconds in which nothing need be heard."""
        self._beats, self._rest = QuietTimer(grace), QuietTimer()
        self.activity: Callable[[float], bool] = Activity(pid).look

    def hear(self) -> None:
        """Note a sign of life between two looks."""
        self._beats.hear()

    def look(self, now: float, *, beat: bool, limit: float) -> bool:
        """Whether the process lives: False after `limit` seconds without a heartbeat.

        The second half of them, it must not have worked either.

        Args:
          now: seconds, monotonic.
          beat: a heartbeat came since the last look.
          limit: seconds.
        """
        self._beats.look(now, sign=beat)
        works = self.activity(now)  # which compares with the time before
        self._rest.look(now, sign=works or self._beats.seconds <= limit / 2)
        return self._beats.seconds <= limit or self._rest.seconds < limit / 2
