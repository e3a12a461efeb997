"""The ring within one process: what goes in comes out, and every refusal is clear."""

import array
import threading
from dataclasses import FrozenInstanceError
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from ipc import RingReader, RingWriter, errors, segment
from ipc.segment_names import PREFIX
from tests.support.ring_checks import assert_slots_are_accounted_for, leftovers, slot_of


@pytest.mark.parametrize("dtype", ["float32", "uint8", "bool", ">i4", "f4,i4", ml_dtypes.bfloat16])
def test_arrays_of_any_dtype_and_shape(pair, dtype):
    reader, writer = pair(4, 1024)
    sent = np.zeros((2, 3), dtype)
    sent.view(np.uint8)[...] = 1
    writer.send(sent)
    sent.view(np.uint8)[...] = 0  # the sender may reuse its array at once
    back = np.frombuffer(reader.receive(1).data, sent.dtype).reshape(2, 3)
    assert back.tobytes() == b"\x01" * sent.nbytes
    assert not back.flags.writeable


def test_other_buffers(pair):
    reader, writer = pair(4, 1024)
    ones = np.ones((2, 2), np.float32)
    for parts in (
        (array.array("i", [1, 2, 3]), memoryview(ones)), (np.zeros((0, 3)),), (bytearray(),), (),
    ):  # fmt: skip
        writer.send(*parts)
        assert reader.receive(1).data == b"".join(bytes(part) for part in parts)
    for bad, error in (
        ("text", TypeError), (3, TypeError), (np.array(["text"], object), TypeError),
        (np.ones((4, 4))[:, 1], ValueError), (memoryview(b"abcd")[::2], ValueError),
    ):  # fmt: skip
        with pytest.raises(error, match="contiguous" if error is ValueError else None):
            writer.send(bad)
    writer.send(b"still fine")
    assert reader.receive(1).data == b"still fine"


@pytest.mark.parametrize("wait", ["predict", "block", "spin"])
def test_full_and_empty_time_out_and_nothing_is_dropped(pair, wait):
    """`test_ring_model` has the counters of every moment."""
    reader, writer = pair(3, wait=wait)
    for timeout in (0.01, 0):
        with pytest.raises(errors.RingTimeout):
            reader.receive(timeout=timeout)
    for i in range(3):
        writer.send(bytes([i]))
    for timeout in (0, 0.01):
        with pytest.raises(errors.RingFull, match=r"full for .* s, all its slots \(3\) in use"):
            writer.send(b"lost?", timeout=timeout)
    counters = writer.counters()
    assert (counters.waits, counters.capacity) == (2, 3)
    assert counters.wait_ns >= 10_000_000
    with pytest.raises(FrozenInstanceError):
        counters.depth = 1
    assert [reader.receive(0).data[0] for _ in range(3)] == [0, 1, 2]


def test_closing_the_reader_tells_a_writer_that_waits(pair):
    reader, writer = pair(1, wait="block")
    writer.send(b"fills the ring")
    closer = threading.Timer(0.1, reader.close)
    closer.start()
    with pytest.raises(errors.PeerClosed, match="consumer closed"):
        writer.send(b"never read")
    closer.join()


def test_one_producer_one_consumer_and_names_are_removed():
    with RingReader.create(2, 64, doorbell=True) as reader:
        with pytest.raises(errors.RoleTaken, match="consumer already"):
            RingReader.attach(reader.name)
        assert len(leftovers()) == 6
        for name in leftovers():
            assert Path("/dev/shm", name).stat().st_mode & 0o777 == 0o600
        with RingWriter.attach(reader.name) as writer:
            assert leftovers() == []
            with pytest.raises(errors.RingNotFound, match="both sides have attached"):
                RingWriter.attach(reader.name)
            writer.send(b"undisturbed")
            assert reader.receive(1).data == b"undisturbed"


def test_who_attaches_too_late_is_told_why(monkeypatch):
    with RingReader.create(2, 64) as reader:
        reader._segment.semaphores["seat"].acquire(0)  # the instant before the names go
        with pytest.raises(errors.RoleTaken, match="producer already"):
            RingWriter.attach(reader.name)
        monkeypatch.setattr(segment, "is_alive", lambda creator: False)
        with pytest.raises(errors.PeerDied, match="consumer") as died:
            RingWriter.attach(reader.name)
        assert (died.value.last_sequence, leftovers()) == (-1, [])  # of a dead creator


def test_names_and_sizes_are_checked():
    for bad in ("", "x", "/x", "/../x", "/dev/shm/x", f"/{PREFIX}.1.2.3.{'g' * 32}", b"/x", None):
        with pytest.raises(errors.RingNotFound, match="not the name of a ring"):
            RingWriter.attach(bad)
    with pytest.raises(TypeError, match=r"slot_bytes is 64\.0, but must be a whole number, 1 to"):
        RingReader.create(2, 64.0)
    reader = RingReader.create(2, 64)
    reader.close()
    with pytest.raises(errors.RingNotFound, match="its creator closed it"):
        RingWriter.attach(reader.name)


def test_arguments_are_checked():
    sizes, one_of = "must be from 1", "must be one of predict, block, spin"
    for shape, options, said in (
        *((shape, {}, sizes) for shape in ((0, 64), (2, 0), (65537, 64), (2, 1 << 35))),
        ((2, 64), {"wait": "poll"}, one_of),
        ((2, 64), {"checksum": None}, "checksum is None, but must be True or False"),
    ):
        with pytest.raises(ValueError, match=said):
            RingReader.create(*shape, **options)
    with RingReader.create(2, 64) as reader:
        with pytest.raises(ValueError, match=one_of):
            RingWriter.attach(reader.name, wait="poll")
        for timeout in (-1, float("nan")):
            with pytest.raises(ValueError, match="timeout"):
                reader.receive(timeout)
        RingWriter.attach(reader.name).close()  # the refused attach did not take the seat


def test_the_slot_freed_last_is_filled_next(pair):
    """A consumer that keeps up gets all its messages from one slot, in both cores' caches."""
    reader, writer = pair(3)
    for number in range(10):
        writer.send(b"")
        reader.receive(1)
        assert slot_of(writer, number) == 2
    for _ in range(3):
        writer.send(b"")
    for _ in range(2):
        reader.receive(1)
    second = slot_of(writer, 11)
    writer.send(b"three")
    assert slot_of(writer, 13) == second


def test_freeing_too_much_does_not_disturb_the_writer(pair):
    """The consumer may lose its messages; the writer neither fails nor leaves its slots."""
    reader, writer = pair(3)
    for _ in range(100):
        reader._post_freed()
    for number in range(20):
        assert writer.send(bytes(64), timeout=0) == number
    assert_slots_are_accounted_for(writer)


def test_two_threads_on_one_side_are_refused():
    def wait_in_vain() -> None:
        with pytest.raises(errors.RingTimeout):
            reader.receive(0.3)

    with RingReader.create(2, 64, wait="block") as reader:
        waiting = threading.Thread(target=wait_in_vain)
        waiting.start()
        while not reader._busy:
            pass
        for call in (reader.try_receive, reader.close, lambda: reader.receive(0)):
            with pytest.raises(errors.RingInUse, match="one call at a time"):
                call()
        waiting.join()
        assert reader.try_receive() is None


@pytest.mark.parametrize("how", ["receive", "try_receive"])
def test_a_last_message_comes_before_the_death(pair, how):
    """The producer posts and dies after this side found no message and before it asks why."""
    reader, writer = pair(wait="block")
    last_words = [b"last"]

    def die() -> errors.PeerDied:
        while last_words:
            writer.send(last_words.pop())
        return errors.PeerDied("producer", 1, reader._last_crossed())

    reader._obstacle = reader._items.obstacle = die
    call = getattr(reader, how)
    assert call().data == b"last"
    reader._next_look_ns = 0
    with pytest.raises(errors.PeerDied, match="message 0"):
        call()
