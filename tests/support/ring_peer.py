"""The other process in ring tests: `python -m tests.support.ring_peer produce|consume NAME ...`.

A message is a function of its number, so either side can make or check any one of them.
"""

import argparse
import mmap
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from ipc import EndOfStream, PeerClosed, RingReader, RingWriter
from tests.support.paths import ROOT

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


@dataclass(frozen=True, slots=True)
class Progress:
    """A peer's own record of what it did, in a mapped file that outlives its SIGKILL.

    Attributes:
      words: messages sent or received, damaged messages, 1 once it ended as it should.
    """

    words: memoryview
    done = property(lambda self: self.words[0])
    damaged = property(lambda self: self.words[1])
    finished = property(lambda self: self.words[2] == 1)

    @classmethod
    def at(cls, path: Path) -> "Progress":
        if not path.exists():
            path.write_bytes(bytes(24))
        with path.open("r+b") as file:
            return cls(memoryview(mmap.mmap(file.fileno(), 24)).cast("Q"))


def start_peer(job: str, name: str, progress: Path, **options: object) -> subprocess.Popen[bytes]:
    """Starts this module in a process of its own, with the options of `main`."""
    Progress.at(progress)
    command = [sys.executable, "-m", "tests.support.ring_peer", job, name, str(progress)]
    for key, value in options.items():
        command += [f"--{key.replace('_', '-')}", str(value)]
    stdout = subprocess.PIPE if name == "create" else None
    return subprocess.Popen(command, cwd=ROOT, stdout=stdout)


class Killer(threading.Thread):
    """Kills a process after a delay, and remembers when. Does not reap it."""

    def __init__(self, pid: int, delay: float) -> None:
        super().__init__(daemon=True)
        self.pid, self.delay, self.killed_at = pid, delay, 0.0
        self.start()

    def run(self) -> None:
        time.sleep(self.delay)
        self.killed_at = time.monotonic()
        os.kill(self.pid, 9)


def main() -> None:
    """Attaches to a ring, or creates one, and moves messages as the options say."""
    options = _options()
    if options.core >= 0:
        os.sched_setaffinity(0, {options.core})
    words = Progress.at(options.progress).words
    ring = _open_ring(options)
    _move_messages(ring, words, options)
    if options.then == "sleep":
        time.sleep(1000)
    elif options.then == "exit":
        os._exit(0)
    ring.close()
    words[2] = 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("job", choices=["produce", "consume"])
    parser.add_argument("name", help="the ring to attach to, or `create` to make one and print it")
    parser.add_argument("progress", type=Path)
    parser.add_argument("--wait", default="predict")
    parser.add_argument("--count", type=int, default=1 << 62)
    parser.add_argument("--max-bytes", type=int, default=1000)
    parser.add_argument("--gap-us", type=float, default=0)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--core", type=int, default=-1)
    parser.add_argument("--then", choices=["close", "sleep", "exit"], default="close")
    return parser.parse_args()


def _open_ring(options: argparse.Namespace) -> RingReader | RingWriter:
    side = RingWriter if options.job == "produce" else RingReader
    if options.name != "create":
        return side.attach(options.name, wait=options.wait)
    ring = side.create(options.slots, options.max_bytes, wait=options.wait)
    print(ring.name, flush=True)
    return ring


def _move_messages(
    ring: RingReader | RingWriter, words: memoryview, options: argparse.Namespace
) -> None:
    """Moves `count` messages, or those that move until the other side closes."""
    for number in range(options.count):
        if options.gap_us:
            time.sleep(options.gap_us * 1e-6)
        try:
            if isinstance(ring, RingWriter):
                ring.send(*payload(number, options.max_bytes))
            else:
                message = ring.receive()
                intact = is_intact(message.data, number, options.max_bytes)
                words[1] += message.sequence != number or not intact
        except (EndOfStream, PeerClosed):
            break
        words[0] = number + 1


if __name__ == "__main__":
    main()
