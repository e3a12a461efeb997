"""The error of bytes that are no message. Never jax."""

from ipc import wire


class MessageError(wire.WireError):
    """Bytes that are not a valid message; names the wrong value and what it may be."""
