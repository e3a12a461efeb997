"""Receiving in an asyncio program, from rings created with doorbell=True.

message = await receive(reader)
async for message in reader: ...
"""

import asyncio
import os
from collections.abc import AsyncIterator

from ipc.errors import EndOfStream
from ipc.polling import MessageT_co, Pollable


async def receive(reader: Pollable[MessageT_co]) -> MessageT_co:
    """Returns the next message without blocking the event loop; raises as receive() does.

    Several tasks may wait for one ring: each message goes to one of them.
    """
    # Even if messages are always there, the loop's other tasks get their turn.
    await asyncio.sleep(0)
    while (message := reader.try_receive()) is None:
        await _until_readable(reader.fileno())
    return message


async def messages(reader: Pollable[MessageT_co]) -> AsyncIterator[MessageT_co]:
    """Yields every message up to the end of the stream."""
    while True:
        try:
            message = await receive(reader)
        except EndOfStream:
            return
        yield message


async def _until_readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    readable = loop.create_future()
    # A loop has one callback a descriptor: another task that waits for this ring needs its own.
    fd = os.dup(fd)

    def wake() -> None:
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(fd, wake)
    try:
        await readable
    finally:
        loop.remove_reader(fd)
        os.close(fd)
