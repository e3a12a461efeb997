"""Rings that nobody closes: dropped in a live process, or left when it ends; a peer that never
attaches, and a fork.

`test_ring_soak` has the deaths of either side in every wait mode.
"""

import contextlib
import gc
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ipc import PeerDied, RingNotFound, RingReader, RingWriter, Undelivered, errors, segment
from tests.support.processes import output_of
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


def written(count, num_slots=64):
    """A writer that nobody has read, and what it has sent."""
    writer, sent = RingWriter.create(num_slots, 64, wait="block"), []
    for number in range(count):
        sent.append(bytes([number]))
        writer.send(sent[-1])
    return writer, sent


def used_ring():
    reader = RingReader.create(2, 64, doorbell=True)
    writer = RingWriter.attach(reader.name)
    reader.fileno()
    writer.send(b"a message")
    assert reader.receive(1).data == b"a message"


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_dropped_ring_leaves_no_handle_and_no_name():
    used_ring()  # what is made once for all rings is there
    assert dropped(used_ring) == (0, 0)
    assert dropped(lambda: RingWriter.create(2, 64)) == (0, 0)
    assert leftovers() == []
    kept = []  # the control: handles of a ring that is not dropped are seen
    descriptors, mappings = dropped(lambda: kept.append(RingWriter.create(2, 64, doorbell=True)))
    assert (descriptors >= 1, mappings >= 3) == (True, True)
    kept.pop().close()


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


LEAVE = """
import os, sys
from ipc import RingReader, RingWriter
kept = RingReader.create(2, 64, doorbell=True)   # global: alive until the interpreter is torn down

def leave():
    ring = RingWriter.create(2, 64)              # alive in the frames of the exception
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
    ("how", "left"), [("sys.exit", 0), ("error", 0), ("exit hooks of a child", 0), ("os._exit", 11)]
)
def test_a_process_that_ends_without_close_leaves_no_name(how, left):
    """Except by os._exit, which runs no hook: the control that there was something to remove."""
    child = subprocess.Popen(
        [sys.executable, "-c", LEAVE, how],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert child.communicate(timeout=60)[0] == "11\n"
    names = [name for name in os.listdir("/dev/shm") if f".{child.pid}." in name]
    for name in names:
        os.unlink(f"/dev/shm/{name}")
    assert len(names) == left


def test_undelivered_messages_mask_no_exception_on_its_way():
    said = "closed with 50 undelivered: no consumer has"
    with pytest.raises(Undelivered, match=said) as lost, written(50)[0] as writer:
        pass
    assert leftovers() == []  # it raises after all is done
    assert pickle.loads(pickle.dumps(lost.value)).messages == 50
    writer.close()  # and once
    for leave in (RingWriter.__exit__, lambda writer, *_: writer.close()):
        writer, _ = written(1)
        try:
            raise ZeroDivisionError
        except ZeroDivisionError as error:
            leave(writer, type(error), error, error.__traceback__)
            (note,) = error.__notes__
        assert "closed with 1 undelivered" in note


def test_a_dropped_producer_is_warned_of_with_what_is_lost():
    with pytest.warns(ResourceWarning, match=r"without close\(\): .* with 1 undelivered"):
        dropped(lambda: written(1))


def test_an_attaching_reader_learns_what_it_missed(monkeypatch):
    """It has opened the memory; then the producer closes, and even ends."""
    is_alive = segment.is_alive
    for alive, messages in ((True, 50), (False, 50), (True, 0)):
        writer, _ = written(messages)
        open_semaphore = segment.open_semaphore

        def close_meanwhile(name, suffix, writer=writer, opened=open_semaphore):
            found = opened(name, suffix)
            if suffix == "joined":
                with contextlib.suppress(Undelivered):
                    writer.close()
            return found

        monkeypatch.setattr(segment, "open_semaphore", close_meanwhile)
        monkeypatch.setattr(segment, "is_alive", lambda one, alive=alive: alive and is_alive(one))
        before = handles()
        error, said = RingNotFound, "its creator closed it"
        if messages:
            error, said = Undelivered, "closed by its producer with 50 undelivered"
        with pytest.raises(error, match=said):
            RingReader.attach(writer.name)
        assert handles() <= before
        monkeypatch.undo()


def test_a_reader_that_took_the_seat_in_time_gets_all(monkeypatch):
    """It attaches while the producer closes: nothing is lost, and close() says nothing."""
    writer, sent = written(1)
    take_seat, readers = segment.Segment.take_seat, []

    def late(one):
        if one.created_here:
            readers.append(RingReader.attach(writer.name))
        return take_seat(one)

    monkeypatch.setattr(segment.Segment, "take_seat", late)
    writer.close()
    with readers[0] as reader:
        assert [message.data for message in reader] == sent


def test_close_with_time_waits_for_a_late_reader():
    (writer, sent), received = written(50), []

    def read():
        with RingReader.attach(writer.name, wait="block") as reader:
            received.extend(message.data for message in reader)

    reading = threading.Timer(0.2, read)
    reading.start()
    writer.close(drain=30)
    reading.join()
    assert received == sent
    # Negative control: nobody comes in time.
    writer, _ = written(1)
    with pytest.raises(ValueError, match="is -1, but must be"):
        writer.close(drain=-1)
    with pytest.raises(Undelivered):
        writer.close(drain=0.05)


def test_a_reader_that_died_leaves_messages_undelivered():
    code = (
        "import os, sys; from ipc import RingReader; reader = RingReader.attach(sys.argv[1]);"
        "reader.receive(30); os.kill(os.getpid(), 9)"
    )

    def read_by_one_that_dies():
        writer, _ = written(3, num_slots=4)
        child = subprocess.Popen([sys.executable, "-c", code, writer.name])
        assert child.wait(30) == -9
        return writer, child

    writer, child = read_by_one_that_dies()
    with pytest.raises(Undelivered, match=rf"2 undelivered: the consumer \(pid {child.pid}\) has"):
        writer.close(drain=30)  # nor does it wait for a dead one
    writer, _ = read_by_one_that_dies()
    writer._next_look_ns = 0
    with pytest.raises(PeerDied):
        writer.send(b"four")
    writer.close()  # who was told is not told again
    assert leftovers() == []


def test_a_peer_that_dies_before_attaching_is_noticed_when_named():
    with RingReader.create(2, 64) as reader:
        peer = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.05)"])
        reader.expect_peer(peer.pid)
        for wait in (reader.wait_attached, reader.receive):
            with pytest.raises(errors.PeerDied, match="no message") as died:
                wait(30)
            assert (died.value.pid, died.value.last_sequence) == (peer.pid, -1)
        peer.wait()
        reader.expect_peer(peer.pid)  # reaped: no such process exists any more
        with pytest.raises(errors.PeerDied):
            reader.receive(30)
    with (  # unnamed: only the caller's timeout can tell
        RingReader.create(2, 64) as reader,
        pytest.raises(errors.RingTimeout, match="no producer attached"),
    ):
        reader.wait_attached(0.05)


FORK = """
import os, sys, gc
from ipc import RingReader, RingWriter, errors

reader = RingReader.create(4, 64, doorbell=True)
writer = RingWriter.attach(reader.name)
reader.fileno()
waiting = RingReader.create(4, 64)   # its names still exist
writer.send(b"before")
if os.fork() == 0:
    refused = 0
    for call in (lambda: writer.send(b"child"), reader.receive, reader.try_receive,
                 waiting.wait_attached, lambda: waiting.expect_peer(1)):
        try:
            call()
        except errors.ForeignProcess:
            refused += 1
    for ring in (reader, writer, waiting):
        ring.close()
    del reader, writer, waiting, ring, call
    gc.collect()
    os._exit(0 if refused == 5 else 1)
assert os.wait()[1] == 0, "the child was not refused everywhere"
writer.send(b"after")
assert [reader.receive(1).data for _ in range(2)] == [b"before", b"after"]
assert reader.try_receive() is None, "the child's close() ended the stream"
with RingWriter.attach(waiting.name) as late:
    late.send(b"names survived")
    assert waiting.receive(1).data == b"names survived"
if os.fork() == 0:
    sys.exit(0)   # a child that ends normally, with every finalizer
os.wait()
writer.send(b"still")
assert reader.receive(1).data == b"still"
writer.close()
try:
    reader.receive(1)
except errors.EndOfStream:
    print("fine")
"""


def test_a_forked_child_cannot_disturb_the_ring():
    assert output_of(FORK, quiet=True, timeout=60) == "fine\n"
