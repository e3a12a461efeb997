"""Messages from one process to another through shared memory: here, from worker to engine.

The two sides::

    from ipc import RingReader, RingWriter

    # engine                                          # worker
    with RingReader.create(16, 1 << 20) as reader:    with RingWriter.attach(name) as writer:
        start_worker(reader.name)                         writer.send(header, array)
        for message in reader:                        # leaving the block ends the stream
            handle(message.data)

A ring has one producer and one consumer. Every message arrives once, whole and in order, or the
reader gets an error. One thread serves several rings with `wait_readable`; an asyncio program uses
`async for message in reader` or `await reader.receive_async()`. Both need rings that were created
with doorbell=True. Linux only; needs numpy, posix_ipc and xxhash, never jax.

Code outside of this package imports three modules and no others, which may change: this one,
`ipc.wire` (the bytes of a message) and `ipc.doctor` (what dead processes left in /dev/shm).
"""

from ipc.counters import RingCounters
from ipc.errors import (
    CorruptMessage,
    CorruptSegment,
    EndOfStream,
    ForeignProcess,
    MessageTooLarge,
    OutOfSharedMemory,
    PeerClosed,
    PeerDied,
    RingClosed,
    RingError,
    RingFull,
    RingInUse,
    RingNotFound,
    RingTimeout,
    RoleTaken,
    Undelivered,
)
from ipc.polling import wait_readable
from ipc.reader import ReceivedMessage, RingReader
from ipc.waiting import WaitPolicy
from ipc.writer import RingWriter

__all__ = [
    "RingReader", "RingWriter", "ReceivedMessage", "RingCounters", "WaitPolicy", "wait_readable",
    # Errors; RingError is the base of all.
    "RingError", "RingTimeout", "RingFull", "EndOfStream", "Undelivered", "PeerClosed", "PeerDied",
    "MessageTooLarge", "CorruptMessage", "CorruptSegment", "RingNotFound", "RingInUse",
    "RingClosed", "RoleTaken", "ForeignProcess", "OutOfSharedMemory",
]  # fmt: skip
