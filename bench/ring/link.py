"""One transport, set up: a receiver in this process and a sender in a process of its own.

The producer sends each message when the one before has arrived, so that no message waits behind
another.
"""

import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from bench.ring.contenders import CONTENDERS, Receiver
from bench.timing import BenchError
from ipc import RingError

# Before each measurement: the ring learns in 50 ms whether cores are free, and when messages come.
WARM_UP_NS = 120_000_000
WARM_UP_MESSAGES = 20


@dataclass
class Link:
    """One contender, set up: the receiver here and its producer process."""

    name: str
    receiver: Receiver
    process: Any
    control: Connection
    arrived: Any  # shared counter: messages of this order that have arrived


def arrays_of(size: int, seed: int = 0) -> list[np.ndarray]:
    """A step of `size` bytes at most: ids [n] int32, logprobs [n] float32, token ranks int32."""
    rng = np.random.default_rng(seed)
    n = (size - 16) * 10 // 84
    ranks = (size - 16 - 8 * n) // 4
    return [
        rng.integers(0, 1 << 17, n, dtype=np.int32),
        rng.standard_normal(n, dtype=np.float32),
        rng.integers(1, 1 << 17, ranks, dtype=np.int32),
    ]


def produce(name: str, address: Any, core: int, control: Connection, arrived: Any) -> None:
    """Run the producer process, which sends the messages that the measuring process orders."""
    os.sched_setaffinity(0, {core})
    sender = CONTENDERS[name][1](address)
    control.send("ready")
    with suppress(EOFError):
        for size, gap, count, seed in iter(control.recv, None):
            arrays = arrays_of(size, seed)
            for number in range(count):
                while gap and arrived.value < number:
                    time.sleep(20e-6)  # releases the GIL for the thread of multiprocessing.Queue
                if gap >= 1e-3:
                    time.sleep(gap)
                else:
                    until = time.monotonic_ns() + gap * 1e9
                    while time.monotonic_ns() < until:
                        pass
                sender.send(time.monotonic_ns(), arrays)
    sender.close()


def start_unattended(process: Any) -> None:
    """Start a process that ignores Ctrl-C.

    The terminal sends it to every process of the run; this one ends the others.
    """
    resource_tracker.ensure_running()  # its own start would undo the next line
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a child inherits the mask
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def link(name: str, core: int) -> Iterator[Link]:
    """Start a contender's two sides, and end them afterwards.

    Raises:
      NotAvailable: this machine cannot run it.
      BenchError: its producer process did not start.
    """
    receiver = CONTENDERS[name][0]()
    context = multiprocessing.get_context("spawn")
    control, theirs = context.Pipe()
    arrived = context.RawValue("q", 0)
    process = context.Process(
        target=produce, args=(name, receiver.address, core, theirs, arrived), daemon=True
    )
    start_unattended(process)
    theirs.close()
    try:
        try:
            if not control.poll(60):
                raise EOFError
            control.recv()
        except EOFError:
            raise BenchError(f"the producer process of {name} did not start") from None
        yield Link(name, receiver, process, control, arrived)
        with suppress(BrokenPipeError):  # the producer may have ended already
            control.send(None)
        process.join(10)
    finally:
        if process.is_alive():
            process.kill()
            process.join()
        control.close()
        receiver.close()


@contextmanager
def attended(one: Link) -> Iterator[None]:
    """A wait for messages that ends when the producer does; only the ring would notice by itself.

    The system sends SIGCHLD when a child ends, which interrupts any receiver.
    """

    def look(*_: object) -> None:
        if one.process.exitcode is not None:
            raise BenchError(
                f"the producer process of {one.name} ended, with exit status "
                f"{one.process.exitcode}, while its messages were waited for"
            )

    before = signal.signal(signal.SIGCHLD, look)
    try:
        look()  # the producer may have ended already
        yield
    except RingError as error:
        look()
        raise BenchError(f"{one.name}: {error}") from error
    finally:
        signal.signal(signal.SIGCHLD, before)


def check_equal(one: Link, sizes: Iterable[int]) -> None:
    """Check that a random step of every size arrives bit for bit.

    Raises:
      BenchError: it does not.
    """
    for seed, size in enumerate(sizes, start=1):
        one.control.send((size, 0.0, 1, seed))
        with attended(one):
            _, *received = one.receiver.receive()
        for expected, actual in zip(arrays_of(size, seed), received, strict=True):
            if not np.array_equal(expected.view(np.int32), np.asarray(actual).view(np.int32)):
                raise BenchError(f"{one.name} delivered other data than was sent ({size} bytes)")


def measure(one: Link, size: int, gap: float, count: int) -> tuple[float, float, list[float]]:
    """Measure `count` messages of `size` bytes, `gap` seconds apart.

    Returns:
      Seconds a message (median latency, or for gap 0 the mean), the share of a core that this side
      used, and each message's latency (for gap 0 none, as messages wait in line there).

    Raises:
      BenchError: the producer has ended.
    """
    receive, clock, arrived = one.receiver.receive, time.monotonic_ns, one.arrived

    def latencies_of(count: int) -> list[int]:
        arrived.value, found = 0, []
        one.control.send((size, gap, count, 0))
        for _ in range(count):
            step = receive()
            found.append(clock() - step[0])
            del step  # a step is done before the next: its memory serves again, as in C
            arrived.value += 1
        return found

    with attended(one):
        until = clock() + WARM_UP_NS
        while clock() < until:
            latencies_of(WARM_UP_MESSAGES)
        cpu, start = time.process_time(), clock()
        latencies = latencies_of(count)
        elapsed = (clock() - start) * 1e-9
    share = (time.process_time() - cpu) / elapsed
    if not gap:
        return elapsed / count, share, []
    seconds = [ns * 1e-9 for ns in latencies]
    return statistics.median(seconds), share, seconds
