"""Creating a ring: a full or forbidden /dev/shm is a clear error at once, never a SIGBUS later."""

import errno
import os
import re
import shutil
import subprocess
import sys

import posix_ipc
import pytest

from ipc import RingReader, errors

FILL = """
import os, sys
from ipc import RingReader, RingWriter, errors, segment

free_bytes = segment._free_bytes
for slots, expected in ((2, None), (64, errors.OutOfSharedMemory), (64, "late"), (2, None)):
    # "late": another process took the room after the check; the kernel says so.
    segment._free_bytes = (lambda: 1 << 30) if expected == "late" else free_bytes
    try:
        with RingReader.create(slots, 60000) as reader, RingWriter.attach(reader.name) as writer:
            for lap in range(3):
                for _ in range(slots):
                    writer.send(b"x" * 60000)   # touches every page: no SIGBUS
                for _ in range(slots):
                    reader.receive(1)
            assert expected is None, "a ring larger than /dev/shm was created"
    except errors.OutOfSharedMemory as error:
        assert expected is not None, error
        assert "it needs 3944448 bytes" in str(error), error
        assert "shm-size" in str(error)
    assert os.listdir("/dev/shm") == [], os.listdir("/dev/shm")
print("fine")
"""
TINY = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$0" -c "$1"'


def test_a_tiny_dev_shm():
    """A mount namespace of its own has a /dev/shm of 1 MiB."""
    unshare = shutil.which("unshare")
    refusals = []
    # Root may mount; elsewhere a user namespace may allow it.
    for flags in (["--mount"], ["--mount", "--user", "--map-root-user"]):
        if unshare is None:
            refusals.append("there is no unshare command")
            break
        probe = [unshare, *flags, "sh", "-c", "mount -t tmpfs -o size=1m tmpfs /dev/shm"]
        allowed = subprocess.run(probe, capture_output=True, text=True)
        if allowed.returncode == 0:
            command = [unshare, *flags, "sh", "-c", TINY, sys.executable, FILL]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            assert (done.stdout, done.stderr, done.returncode) == ("fine\n", "", 0)
            return
        refusals.append(allowed.stderr.strip())
    print(f"NOT RUN on a mounted tiny /dev/shm: {'; '.join(refusals)}")
    test_a_file_size_limit()


def test_a_file_size_limit():
    """RLIMIT_FSIZE leads to the same error and needs no privilege."""
    script = """
import resource, os
from ipc import RingReader, errors
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    RingReader.create(64, 60000)
except errors.OutOfSharedMemory as error:
    print("it needs 3944448 bytes" in str(error))
print([name for name in os.listdir("/dev/shm") if f".{os.getpid()}." in name])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("True\n[]\n", "", 0)


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
