"""Rings that nobody closes: dropped in a live process, or left when the process ends."""

import gc
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from ipc import EndOfStream, PeerClosed, PeerDied, RingReader, RingWriter
from ipc.endpoint import Endpoint
from tests.support.ring_checks import leftovers


def handles():
    """Descriptors of this process, and its mappings of rings' memory and semaphores."""
    descriptors = len(os.listdir("/proc/self/fd"))
    maps = Path("/proc/self/maps").read_text().splitlines()
    return descriptors, sum("/dev/shm/" in line for line in maps)


def dropped(make):
    """Makes something and drops the last reference to it; returns what is left of its handles."""
    gc.collect()
    before = handles()
    make()
    gc.collect()
    after = handles()
    return after[0] - before[0], after[1] - before[1]


def used_ring():
    reader = RingReader.create(2, 64, doorbell=True)
    writer = RingWriter.attach(reader.name)
    reader.fileno()
    writer.send(b"a message")
    assert reader.receive(1).data == b"a message"


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_dropped_ring_leaves_no_handle_and_no_name(monkeypatch):
    used_ring()  # what is made once for all rings is there
    assert dropped(used_ring) == (0, 0)
    assert dropped(lambda: RingWriter.create(2, 64)) == (0, 0)
    assert leftovers() == []
    # Negative control: without a finalizer, of either side.
    finalizer, rings = Endpoint.__del__, []
    monkeypatch.setattr(Endpoint, "__del__", lambda ring: rings.append(ring))
    descriptors, mappings = dropped(used_ring)
    assert descriptors >= 2
    assert mappings >= 5
    monkeypatch.setattr(Endpoint, "__del__", finalizer)
    rings.clear()


def test_dropping_a_ring_is_warned_of():
    with pytest.warns(ResourceWarning, match=r"RingReader /jax-specdec-ring\..* without close"):
        dropped(lambda: RingReader.create(2, 64))


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_dropped_producer_is_no_orderly_end():
    """What it had sent is delivered, and then the reader learns that more may have been meant."""
    with RingReader.create(2, 64) as reader:
        writer = RingWriter.attach(reader.name)
        writer.send(b"sent")
        del writer
        gc.collect()
        assert reader.receive(1).data == b"sent"
        for _ in range(2):
            with pytest.raises(PeerDied, match="dropped the ring without closing it") as died:
                reader.receive(1)
            gone = pickle.loads(pickle.dumps(died.value))
            assert (gone.side, gone.pid, gone.last_sequence) == ("producer", os.getpid(), 0)
            assert gone.dropped
    with RingReader.create(2, 64) as reader:
        RingWriter.attach(reader.name).close()  # closed before it is dropped
        gc.collect()
        with pytest.raises(EndOfStream):
            reader.receive(1)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_dropped_consumer_stops_the_writer():
    with RingWriter.create(2, 64) as writer:
        reader = RingReader.attach(writer.name)
        writer.send(b"never read")
        del reader
        gc.collect()
        with pytest.raises(PeerClosed):
            writer.send(b"nor this")


LEAVE = """
import os, sys, threading
from ipc import RingReader, RingWriter
kept = RingReader.create(2, 64, doorbell=True)   # global: alive until the interpreter is torn down

def leave():
    ring = RingWriter.create(2, 64)              # alive in the frames of the exception
    print(sum(f".{os.getpid()}." in name for name in os.listdir("/dev/shm")), flush=True)
    if sys.argv[1] == "exit hooks of a child":
        if os.fork() == 0:
            raise SystemExit(0)
        os.wait()
        print(sum(f".{os.getpid()}." in name for name in os.listdir("/dev/shm")), flush=True)
    if sys.argv[1] == "os._exit":
        os._exit(0)
    if sys.argv[1] == "error":
        raise ZeroDivisionError
    sys.exit(3)

leave()
"""


@pytest.mark.parametrize(
    ("how", "left"),
    [("sys.exit", 0), ("error", 0), ("exit hooks of a child", 0), ("os._exit", 11)],
)
def test_a_process_that_ends_without_close_leaves_no_name(how, left):
    """Except by os._exit, which runs no hook: the control that there was something to remove."""
    child = subprocess.Popen(
        [sys.executable, "-c", LEAVE, how],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    counts = child.communicate(timeout=60)[0].split()
    assert counts == ["11"] * (2 if how == "exit hooks of a child" else 1)
    names = [name for name in os.listdir("/dev/shm") if f".{child.pid}." in name]
    for name in names:
        os.unlink(f"/dev/shm/{name}")
    assert len(names) == left


END = """
import sys
from ipc import RingWriter
writer = RingWriter.attach(sys.argv[1])
writer.send(b"the last one")
if sys.argv[2] == "error":
    raise ZeroDivisionError
def leave(writer):
    sys.exit(0)
leave(writer)
"""


@pytest.mark.parametrize("how", ["error", "exit"])
def test_the_end_of_a_process_is_a_death_and_no_orderly_end(how):
    with RingReader.create(2, 64) as reader:
        child = subprocess.Popen(
            [sys.executable, "-c", END, reader.name, how], stderr=subprocess.DEVNULL
        )
        reader.expect_peer(child.pid)
        assert reader.receive(30).data == b"the last one"
        with pytest.raises(PeerDied):
            reader.receive(30)
        child.wait(30)
