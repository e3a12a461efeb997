"""Waiting for many rings in one thread or in an asyncio program, and the doorbell for it."""

import asyncio
import fcntl
import os
import select

import pytest

from ipc import RingReader, RingWriter, errors, wait_readable
from tests.support.ring_peer import start_peer


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
def test_no_descriptor_without_a_doorbell_or_once_closed(pair, use):
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


def test_async_death_and_cancellation(tmp_path):
    async def run(reader, peer):
        for number in range(3):
            assert (await reader.receive_async()).sequence == number
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(reader.receive_async(), 0.05)
        asyncio.get_running_loop().call_later(0.05, peer.kill)
        with pytest.raises(errors.PeerDied, match="message 2"):
            await asyncio.wait_for(reader.receive_async(), 10)

    with RingReader.create(4, 64, doorbell=True) as reader:
        peer = start_peer(
            "produce", reader.name, tmp_path / "p", count=3, max_bytes=64, then="sleep"
        )
        asyncio.run(run(reader, peer))
        peer.wait(30)


def test_two_tasks_share_a_ring(pair):
    """Each message goes to one task, and no task waits while there is a message."""

    async def both(reader, writer):
        tasks = [asyncio.create_task(reader.receive_async()) for _ in range(2)]
        await asyncio.sleep(0.02)  # until both wait
        for data in (b"one", b"two"):
            writer.send(data)
        return [message.data for message in await asyncio.wait_for(asyncio.gather(*tasks), 10)]

    assert sorted(asyncio.run(both(*pair(doorbell=True)))) == [b"one", b"two"]


def test_other_tasks_get_their_turn_while_messages_keep_coming(pair):
    """With every message there at once, receiving never has to wait."""

    async def consume(reader):
        turns = []

        async def take_turns():
            while True:
                turns.append(len(received))
                await asyncio.sleep(0)

        received = []
        other = asyncio.create_task(take_turns())
        async for message in reader:
            received.append(message.sequence)
        other.cancel()
        return received, turns

    reader, writer = pair(8, doorbell=True)
    for _ in range(8):
        writer.send(b"")
    writer.close()
    received, turns = asyncio.run(consume(reader))
    assert received == list(range(8))
    assert set(turns) >= set(range(8))
