"""What is said where a ring may not be made: in words, and by an error of the project."""

import errno
import re

import posix_ipc
import pytest

from ipc.errors import RingError
from ipc.ring import RingReader

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    "error",
    [
        posix_ipc.PermissionsError("Permission denied"),
        OSError(errno.EROFS, "Read-only file system"),
    ],
)
def test_a_directory_that_cannot_be_written_is_named(error, monkeypatch):
    """Removing what could not be made fails in the same way, and must not hide the reason."""

    def refuse(*_, **__):
        raise error

    for name in ("SharedMemory", "unlink_shared_memory", "unlink_semaphore"):
        monkeypatch.setattr(posix_ipc, name, refuse)
    with pytest.raises(
        RingError, match=re.escape(f"in /dev/shm: {error}. It is shared memory: user ")
    ):
        RingReader.create(2, 8)
