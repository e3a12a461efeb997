"""Rings in an asyncio program."""

import asyncio

import pytest

from ipc import RingReader, errors
from tests.support.ring_peer import start_peer


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
