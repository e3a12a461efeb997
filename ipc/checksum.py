"""The optional checksum of payloads: XXH3-64, from the `checksum` extra."""

from collections.abc import Callable

from ipc.errors import RingError


def digest_function() -> Callable[[bytes | memoryview], int]:
    """Returns the function. Raises RingError where xxhash is not installed."""
    try:
        from xxhash import xxh3_64_intdigest
    except ImportError:
        raise RingError(
            "payload checksums need xxhash: pip install 'xxhash>=3.5', or create the "
            "ring with checksum=False"
        ) from None
    return xxh3_64_intdigest
