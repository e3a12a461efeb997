"""Which payloads carry a checksum (XXH3-64): all, none, or by default those for which it is cheap.

Both sides pay for it, and its price grows with the payload: about a twentieth of a message's time
up to SHORT_BYTES, an eighth of it at 530 KB every 5 ms (docs/ring.md).
"""

from ipc.segment_layout import FLAG_CHECKSUM, FLAG_SHORT_CHECKSUM

SHORT_BYTES = 16384  # payloads up to this size carry one by default


def flags_of(checksum: bool | None) -> int:
    """Returns the segment's flags for `Endpoint.create`'s argument; None is the default."""
    if checksum is None:
        return FLAG_SHORT_CHECKSUM
    return FLAG_CHECKSUM if checksum else 0


def checksum_of(flags: int) -> bool | None:
    """Returns the argument that `flags_of` turned into these flags."""
    if flags & FLAG_CHECKSUM:
        return True
    return None if flags & FLAG_SHORT_CHECKSUM else False


def checked_bytes(flags: int, slot_bytes: int) -> int:
    """Returns the size up to which payloads carry a checksum; -1 where none does."""
    if flags & FLAG_CHECKSUM:
        return slot_bytes
    return SHORT_BYTES if flags & FLAG_SHORT_CHECKSUM else -1
