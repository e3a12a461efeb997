"""The other process in ring tests: `python -m tests.support.ring_peer JSON`.

A message is a function of its number, so either side can make or check any one of them.
"""

import json
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ipc import EndOfStream, PeerClosed, RingReader, RingWriter
from tests.support.paths import ROOT
from tests.support.processes import wait_for

_PATTERN = bytes((i * i * 31 + i * 7 + (i >> 8)) & 255 for i in range(1 << 16)) * 18


def payload(number: int, max_bytes: int) -> tuple[bytes, memoryview]:
    """Returns message `number` in two parts: 8 bytes of number, 0..max_bytes-8 of a pattern."""
    size = (number * 2654435761 % (1 << 32)) * (max_bytes - 7) >> 32
    start = number % 65521
    return number.to_bytes(8, "little"), memoryview(_PATTERN)[start : start + size]


def is_intact(data: bytes, number: int, max_bytes: int) -> bool:
    """Says whether `data` is message `number`, byte for byte."""
    head, body = payload(number, max_bytes)
    return data[:8] == head and memoryview(data)[8:] == body


def record(path: Path) -> memoryview:
    """A peer's own record of what it did, in a mapped file that outlives its SIGKILL.

    Messages sent or received, damaged messages, 1 once it ended as it should.
    """
    if not path.exists():
        path.write_bytes(bytes(24))
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 24)).cast("Q")


def start_peer(job: str, name: str, progress: Path, **options: object) -> subprocess.Popen[bytes]:
    """Starts this module in a process of its own, with the options of `main`."""
    record(progress)
    arguments = json.dumps({"job": job, "name": name, "progress": str(progress)} | options)
    command = [sys.executable, "-m", "tests.support.ring_peer", arguments]
    stdout = subprocess.PIPE if name == "create" else None
    return subprocess.Popen(command, cwd=ROOT, stdout=stdout)


class Killer(threading.Thread):
    """Kills a process a delay after it is `due`, and remembers when. Does not reap it."""

    def __init__(self, pid: int, delay: float, due: Callable[[], bool] = lambda: True) -> None:
        super().__init__(daemon=True)
        self.pid, self.delay, self.due, self.killed_at = pid, delay, due, 0.0
        self.start()

    def run(self) -> None:
        wait_for(self.due)
        time.sleep(self.delay)
        self.killed_at = time.monotonic()
        os.kill(self.pid, 9)


def main(
    job: str, name: str, progress: str, *, wait: str = "predict", count: int = 1 << 62,
    max_bytes: int = 1000, gap_us: float = 0, slots: int = 16, then: str = "close",
) -> None:  # fmt: skip
    """Attaches to a ring, or creates one and prints its name, and produces or consumes messages.

    Args:
      name: "create", or the ring to attach to. then: "sleep", or "close".
    """
    words = record(Path(progress))
    side = RingWriter if job == "produce" else RingReader
    if name == "create":
        ring = side.create(slots, max_bytes, wait=wait)
        print(ring.name, flush=True)
    else:
        ring = side.attach(name, wait=wait)
    _move_messages(ring, words, count, max_bytes, gap_us)
    if then == "sleep":
        time.sleep(1000)
    ring.close()
    words[2] = 1


def _move_messages(
    ring: RingReader | RingWriter, words: memoryview, count: int, max_bytes: int, gap_us: float
) -> None:
    """Moves `count` messages, or those that move until the other side closes."""
    for number in range(count):
        if gap_us:
            time.sleep(gap_us * 1e-6)
        try:
            if isinstance(ring, RingWriter):
                ring.send(*payload(number, max_bytes))
            else:
                message = ring.receive()
                intact = is_intact(message.data, number, max_bytes)
                words[1] += message.sequence != number or not intact
        except (EndOfStream, PeerClosed):
            break
        words[0] = number + 1


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
