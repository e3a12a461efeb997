"""Limits of the operating system become RingErrors that name them; nothing is left open."""

import contextlib
import errno
import os
import re
import types
from unittest import mock

import posix_ipc
import pytest

from ipc import RingError, RingReader, errors, os_errors
from tests.support.processes import output_of

# Tries to make and attach rings with 0, 1, 2, ... free descriptors, until there are enough.
DESCRIPTORS = """
import asyncio, os, resource
from ipc import RingReader, RingWriter, aio, errors
from ipc.doctor import find_ring_files

def descriptors():
    return len(os.listdir("/proc/self/fd")) - 1    # without that of the listing

def refused(count, call, *words):
    before = descriptors()
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + count, 4096))
    try:
        made.append(call())
        return False
    except errors.RingError as error:
        for word in ("descriptors open and may have", "ulimit -n", *words):
            assert word in str(error), error
        assert error.__cause__.errno == 24, error.__cause__
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    assert descriptors() == before
    return True

def with_enough(name, call):
    print(name, next(count for count in range(20) if not refused(count, call)))
    return made.pop()

made = []
with_enough("create", lambda: RingReader.create(2, 64, doorbell=True)).close()
assert not [name for name in os.listdir("/dev/shm") if f".{os.getpid()}." in name]
with_enough("doctor", find_ring_files)
creator = RingReader.create(2, 64, doorbell=True)
# A failed attempt gives the seat back.
writer = with_enough("attach", lambda: RingWriter.attach(creator.name))
# The creator opens a pidfd of the attacher here.
assert refused(0, lambda: creator.receive(5), "watch")
writer.send(b"after all that")
assert creator.receive(5).data == b"after all that"
creator.wait_attached(5)
assert refused(0, creator.fileno)
assert creator.fileno() > 0
loop = asyncio.new_event_loop()
task = loop.create_task(creator.receive_async())
assert refused(0, lambda: loop.run_until_complete(task), "cannot wait for the ring: this process")
loop.close()
writer.close()
creator.close()
"""


def test_a_process_without_free_descriptors_is_told_so():
    lines = output_of(DESCRIPTORS, quiet=True, timeout=60).splitlines()
    counts = dict(line.split() for line in lines)
    assert [*counts] == ["create", "doctor", "attach"]
    assert min(map(int, counts.values())) > 0


LIMITS = """
import os, resource
from ipc import RingReader, errors
def refused(limit, most, *shape):
    resource.setrlimit(limit, (most, most))
    try:
        RingReader.create(*shape)
    except errors.OutOfSharedMemory as error:
        assert not [name for name in os.listdir("/dev/shm") if f".{os.getpid()}." in name]
        return str(error)
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
most = used + (32 << 20)
text = refused(resource.RLIMIT_AS, most, 8, 8 << 20)
assert "no memory for a ring with num_slots=8" in text, text
assert f"{most} (RLIMIT_AS)" in text and "ulimit -v" in text, text
assert "no room" not in text and "are free" not in text, text
text = refused(resource.RLIMIT_FSIZE, 2 << 20, 64, 60_000)
assert "has no room for a ring" in text and "it needs 3944448 bytes" in text, text
with RingReader.create(1, 1 << 20):
    print("a smaller one fits")
"""


def test_only_a_limit_of_files_is_a_lack_of_shared_memory():
    assert output_of(LIMITS, quiet=True, timeout=60) == "a smaller one fits\n"


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (OSError(errno.ENFILE, "too many"), "file-max"),
        (OSError(errno.EMFILE, "too many"), r"descriptors open and may have \d+ \(RLIMIT_NOFILE\)"),
        (OSError(errno.ENOMEM, "no memory"), "RLIMIT_AS"),
        (MemoryError(), "RLIMIT_AS"),
        (OSError(errno.ENOSPC, "no space"), "Free some of it"),
        (OSError(errno.EIO, "broken"), "broken"),
    ],
)
def test_each_refusal_names_its_limit(error, what):
    with (
        pytest.raises(RingError, match=f"^cannot do it: .*{what}") as info,
        os_errors.explained("do it"),
    ):
        raise error
    assert info.value.__cause__ is error
    with pytest.raises(ZeroDivisionError), os_errors.explained("do it"):  # a bug stays a bug
        raise ZeroDivisionError


def test_where_no_descriptor_is_left_to_count_them(monkeypatch):
    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    monkeypatch.setattr(os_errors.os, "listdir", mock.Mock(side_effect=error))
    assert "all descriptors" in os_errors.reason(OSError(errno.EMFILE, ""))


def test_more_than_the_machine_has():
    with pytest.raises(errors.OutOfSharedMemory, match="free"):
        RingReader.create(65536, 1 << 30)


@contextlib.contextmanager
def refused_files(error, files=40, favail=5):
    """A /dev/shm that takes no further file, and counts its inodes so."""
    counted = os.statvfs("/dev/shm")
    values = {name: getattr(counted, name) for name in dir(counted) if name.startswith("f_")}
    values |= {"f_files": files, "f_favail": favail}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "statvfs", lambda path: types.SimpleNamespace(**values))
        patch.setattr(posix_ipc, "SharedMemory", mock.Mock(side_effect=error))
        yield


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("counts", "error", "what"),
    [
        ({}, FULL, r"has bytes, but no inodes left for a ring .*needs 6, 5 are free.*nr_inodes"),
        ({"favail": 0}, FULL, "needs 6, 0 are free"),
        ({"favail": 6}, FULL, "has no room"),  # the control: that many are enough
        ({"files": 0, "favail": 0}, FULL, "has no room"),  # nothing counts them
        ({"favail": 6}, OSError(errno.EDQUOT, "Quota"), r"user \d+ may have no more .*6 inodes"),
    ],
)
def test_advice_is_about_what_is_missing(counts, error, what):
    """Inodes, bytes or a quota."""
    with refused_files(error, **counts), pytest.raises(errors.RingError, match=what) as info:
        RingReader.create(2, 64)
    assert isinstance(info.value, errors.OutOfSharedMemory)
    assert ("--shm-size" in str(info.value)) == ("no room" in what)


def test_lack_of_bytes_comes_before_lack_of_inodes():
    with refused_files(FULL), pytest.raises(errors.OutOfSharedMemory, match="has no room"):
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
    for name in ("SharedMemory", "unlink_shared_memory", "unlink_semaphore"):
        monkeypatch.setattr(posix_ipc, name, mock.Mock(side_effect=error))
    with pytest.raises(
        errors.RingError, match=re.escape(f"in /dev/shm: {error}. Let user {os.geteuid()} make")
    ):
        RingReader.create(2, 8)
