"""The error of bytes that are no message."""

from ipc import wire


class MessageError(wire.WireError):
    """Bytes that are not a valid message; names the wrong value and what it may be."""
