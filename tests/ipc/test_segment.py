"""Creating a ring: a full or forbidden /dev/shm is a clear error at once, never a SIGBUS later."""

import errno
import os
import re

import posix_ipc
import pytest

from ipc import RingReader, errors


def test_more_than_the_machine_has():
    with pytest.raises(errors.OutOfSharedMemory, match="free"):
        RingReader.create(65536, 1 << 30)


def test_every_byte_is_reserved_before_it_is_mapped(monkeypatch):
    """ftruncate would succeed on a full /dev/shm and leave a SIGBUS for later."""
    steps = []
    reserve = os.posix_fallocate

    def spy(fd: int, start: int, count: int) -> None:
        steps.append((start, count))
        reserve(fd, start, count)

    monkeypatch.setattr(os, "posix_fallocate", spy)
    with RingReader.create(5, 2 << 20) as reader:
        total = reader._segment.header.geometry.total_bytes
    end = 0
    for start, count in steps:
        assert start == end
        end += count
    assert end == total > 10 << 20


@pytest.mark.parametrize(
    "error",
    [
        posix_ipc.PermissionsError("Permission denied"),
        OSError(errno.EROFS, "Read-only file system"),
    ],
)
def test_a_directory_that_cannot_be_written_is_named(error, monkeypatch):
    """Removing the names that could not be made fails too, and must not hide the reason."""

    def refuse(*_, **__):
        raise error

    for name in ("SharedMemory", "unlink_shared_memory", "unlink_semaphore"):
        monkeypatch.setattr(posix_ipc, name, refuse)
    with pytest.raises(
        errors.RingError, match=re.escape(f"in /dev/shm: {error}. Let user {os.geteuid()} make")
    ):
        RingReader.create(2, 8)
