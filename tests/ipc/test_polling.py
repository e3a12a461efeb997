"""Waiting for many rings in one thread, and the doorbell that makes it possible."""

import fcntl
import os
import select

import pytest

from ipc import RingReader, RingWriter, errors, wait_readable


def test_the_descriptor_follows_the_ring():
    with RingReader.create(8, 64, doorbell=True) as reader:
        poll = select.poll()
        poll.register(reader.fileno(), select.POLLIN)
        assert poll.poll(0) == []
        writer = RingWriter.attach(reader.name)
        assert poll.poll(0) != []  # attaching rings: the peer can be watched from now on
        assert reader.try_receive() is None
        assert poll.poll(0) == []
        for i in range(5):
            writer.send(bytes([i]))
        assert poll.poll(0) != []
        assert [reader.try_receive().data[0] for _ in range(5)] == [0, 1, 2, 3, 4]
        assert reader.try_receive() is None
        assert poll.poll(0) == []
        writer.close()
        assert poll.poll(0) != []
        with pytest.raises(errors.EndOfStream):
            reader.try_receive()


def test_no_wake_up_is_lost_between_the_look_and_the_quieting(pair, monkeypatch):
    """The reader sees a message that comes right before it empties the doorbell."""
    reader, writer = pair(doorbell=True)
    quiet = reader._bell.quiet
    monkeypatch.setattr(reader._bell, "quiet", lambda: (writer.send(b"late"), quiet()))
    assert reader.try_receive().data == b"late"


def test_a_full_doorbell_is_as_good_as_one_ring(pair):
    reader, writer = pair(doorbell=True)
    holds = fcntl.fcntl(writer._bell.fileno(), fcntl.F_SETPIPE_SZ, 4096)
    for i in range(holds + 1):  # one byte more than the FIFO holds: receive() empties nothing
        writer.send(b"")
        assert reader.receive(1).sequence == i
    with pytest.raises(BlockingIOError):
        os.write(writer._bell.fileno(), b"!")
    assert wait_readable([reader], 0) == [reader]
    assert reader.try_receive() is None  # empties it
    assert wait_readable([reader], 0) == []


@pytest.mark.parametrize("use", ["no bell", "never waited for", "waited for"])
def test_without_a_doorbell_and_once_it_is_closed_a_ring_has_no_descriptor(pair, use):
    reader, _ = pair(doorbell=use != "no bell")
    assert use != "waited for" or wait_readable([reader], 0) == [reader]  # the writer has rung
    if use != "no bell":
        reader.close()
    error, said = errors.RingClosed, "this consumer was closed"
    if use == "no bell":
        error, said = errors.RingError, "doorbell=True"
    for call in (reader.fileno, lambda: wait_readable([reader], 0)):
        with pytest.raises(error, match=said):
            call()


def test_waiting_for_no_rings_ends():
    assert wait_readable([], 0) == []
    with pytest.raises(errors.RingError, match="nothing would end the wait"):
        wait_readable([])


def test_fairness_when_all_have_messages(pair):
    readers = []
    for many in (8, 2, 5):
        reader, writer = pair(8, doorbell=True)
        readers.append(reader)
        for _ in range(many):
            writer.send(b"")
    rounds = []
    while ready := wait_readable(readers, 0):
        rounds.append([readers.index(r) for r in ready if r.try_receive() is not None])
    assert [got for got in rounds if got] == [[0, 1, 2]] * 2 + [[0, 2]] * 3 + [[0]] * 3
