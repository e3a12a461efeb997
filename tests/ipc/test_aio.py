"""Rings in an asyncio program."""

import asyncio

import pytest

from ipc import RingReader, RingWriter, errors
from tests.support.ring_checks import leftovers
from tests.support.ring_peer import is_intact, start_peer


@pytest.fixture(autouse=True)
def nothing_left_behind():
    yield
    assert leftovers() == []


@pytest.mark.fast
def test_async_iteration_over_a_producer_process(tmp_path):
    """Another task gets its turn for every message."""

    async def consume(reader):
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0)
                ticks += 1

        ticker = asyncio.create_task(tick())
        numbers = []
        async for message in reader:
            numbers.append(message.sequence)
            assert is_intact(message.data, message.sequence, 500)
        ticker.cancel()
        return numbers, ticks

    with RingReader.create(4, 500, doorbell=True) as reader:
        peer = start_peer(
            "produce", reader.name, tmp_path / "p", count=300, max_bytes=500, gap_us=20
        )
        numbers, ticks = asyncio.run(consume(reader))
        assert numbers == list(range(300))
        assert ticks >= 299  # the event loop kept running
        assert peer.wait(30) == 0


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


def test_two_tasks_share_a_ring():
    """Each message goes to one task, and no task waits while there is a message."""

    async def both(reader, writer):
        tasks = [asyncio.create_task(reader.receive_async()) for _ in range(2)]
        await asyncio.sleep(0.02)  # until both wait
        for data in (b"one", b"two"):
            writer.send(data)
        return [message.data for message in await asyncio.wait_for(asyncio.gather(*tasks), 10)]

    with (
        RingReader.create(4, 64, doorbell=True) as reader,
        RingWriter.attach(reader.name) as writer,
    ):
        assert sorted(asyncio.run(both(reader, writer))) == [b"one", b"two"]


def test_other_tasks_get_their_turn_while_messages_keep_coming():
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

    with (
        RingReader.create(8, 64, doorbell=True) as reader,
        RingWriter.attach(reader.name) as writer,
    ):
        for _ in range(8):
            writer.send(b"")
        writer.close()
        received, turns = asyncio.run(consume(reader))
    assert received == list(range(8))
    assert set(turns) >= set(range(8))
