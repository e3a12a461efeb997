"""Receiving in an asyncio program, behind RingReader.receive_async() and `async for`.

A separate module, because importing asyncio takes longer than importing the rest of this package.
"""

import asyncio
import os
from collections.abc import AsyncIterator

from ipc.errors import EndOfStream
from ipc.os_errors import explained
from ipc.polling import MessageT_co, Pollable


async def receive(reader: Pollable[MessageT_co]) -> MessageT_co:
    """Returns the next message without blocking the event loop; raises as receive() does."""
    # Give the loop's other tasks their turn, even while messages keep coming.
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
    # A loop keeps one callback per descriptor; several tasks may wait for this ring.
    with explained("wait for the ring"):
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
