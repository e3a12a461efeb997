"""Shared memory between the model worker and the engine. Needs numpy and posix_ipc, never jax.

This door, `ipc.wire` (the bytes of a message) and `ipc.doctor` (what dead processes left) are all
that anything outside may import; what lies behind them may change.
"""

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
)
from ipc.polling import wait_readable
from ipc.ring import ReceivedMessage, RingCounters, RingReader, RingWriter

__all__ = [
    "RingReader",
    "RingWriter",
    "ReceivedMessage",
    "RingCounters",
    "wait_readable",
    # Errors; all of them are a RingError.
    "RingError",
    "RingTimeout",
    "RingFull",
    "EndOfStream",
    "PeerClosed",
    "PeerDied",
    "MessageTooLarge",
    "CorruptMessage",
    "CorruptSegment",
    "RingNotFound",
    "RingInUse",
    "RingClosed",
    "RoleTaken",
    "ForeignProcess",
    "OutOfSharedMemory",
]
