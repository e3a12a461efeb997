"""Named shared memory and its semaphores: create, attach, unlink, close.

`ipc.segment_names` says which names a ring has.

The names are removed as soon as both sides have attached; after that no crash leaves a file behind.
A segment is never recovered after a crash.
"""

import contextlib
import errno
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import posix_ipc

from ipc import segment_layout as layout
from ipc.errors import (
    CorruptSegment,
    OutOfSharedMemory,
    PeerDied,
    RingError,
    RingNotFound,
    RoleTaken,
    Undelivered,
)
from ipc.os_errors import error_number, explained, reason
from ipc.peers import ProcessIdentity, current_process, is_alive
from ipc.protocol import SEMAPHORES
from ipc.segment_names import (
    SHM_DIRECTORY,
    bell_path,
    creator_of,
    new_name,
    remove_names,
    unlink_names,
)
from ipc.semaphore import Semaphore

# shmem's fallocate gives up and undoes its work at every signal: reserve in small steps.
_ALLOCATION_STEP = 4 << 20


@dataclass(slots=True)
class Segment:
    """One side's handles on a ring: the mapping and the semaphores.

    Attributes:
      buffer: the mapping as bytes.
      words: the mapping as 64-bit words; reading or writing one is one aligned load or store.
    """

    name: str
    role: layout.Role
    header: layout.SegmentHeader
    me: ProcessIdentity
    memory: mmap.mmap
    semaphores: dict[str, Semaphore]
    buffer: memoryview = field(init=False)
    words: memoryview = field(init=False)

    def __post_init__(self) -> None:
        self.buffer = memoryview(self.memory)
        self.words = self.buffer.cast("Q")

    @classmethod
    def create(cls, role: layout.Role, geometry: layout.Geometry, flags: int) -> "Segment":
        """Creates a ring of which the calling process is one side.

        Leaves nothing behind on failure. Raises OutOfSharedMemory when /dev/shm has no room.
        """
        me = current_process()
        name = new_name(me)
        session = int.from_bytes(os.urandom(8)) or 1
        header = layout.SegmentHeader(geometry, role, me, session, flags)
        with _explained(name, geometry), contextlib.ExitStack() as undo:
            undo.callback(remove_names, name)
            memory = _create_memory(name, geometry.total_bytes)
            undo.callback(memory.close)
            memory[: layout.SEGMENT_HEADER_BYTES] = header.pack()
            semaphores = {}
            for suffix, value in SEMAPHORES.items():
                semaphores[suffix] = Semaphore.create(f"{name}.{suffix}", value)
                undo.callback(semaphores[suffix].close)
            if flags & layout.FLAG_DOORBELL:
                os.mkfifo(bell_path(name), 0o600)
            undo.pop_all()
        segment = cls(name, role, header, me, memory, semaphores)
        segment._write_line()
        return segment

    @classmethod
    def attach(cls, name: str, role: layout.Role) -> "Segment":
        """Takes the free side of a ring. The attacher calls `complete` once it is ready.

        Raises:
          RingNotFound: no such ring (any more).
          PeerDied: the creator has ended, and left no message that this side could read.
          RoleTaken: this side is the creator's, or another process took it.
          CorruptSegment: the memory is not a ring of this version.
        """
        creator = creator_of(name) if isinstance(name, str) else None
        if creator is None:
            raise RingNotFound(f"{name!r} is not the name of a ring: use the creator's .name")
        me = current_process()
        if not creator.shares_namespaces(me):
            raise RingError(
                f"ring {name} was created in pid namespace {creator.pid_namespace} and time "
                f"namespace {creator.time_namespace}, this process is in {me.pid_namespace} and "
                f"{me.time_namespace}. Run both in the same two: otherwise neither could tell "
                "whether the other lives"
            )
        with explained(f"attach to ring {name}"), contextlib.ExitStack() as undo:
            header, memory = _open_memory(name)
            undo.callback(memory.close)
            if header.creator != creator:
                raise CorruptSegment(
                    f"ring {name} names {header.creator} as its creator, not {creator}"
                )
            if header.creator_role == role:
                raise RoleTaken(
                    f"ring {name} has its {role} already: the creator, pid {creator.pid}"
                )
            semaphores = {}
            for suffix in SEMAPHORES:
                semaphores[suffix] = open_semaphore(name, suffix)
                undo.callback(semaphores[suffix].close)
            segment = cls(name, role, header, me, memory, semaphores)
            undo.callback(segment.buffer.release)
            undo.callback(segment.words.release)
            segment._refuse_if_closed()
            if not is_alive(creator) and not segment.has_messages_for(role):
                unlink_names(name)  # the creator died before it could
                raise PeerDied(str(role.other), creator.pid, -1)
            if not segment.take_seat():
                segment._refuse_if_closed()
                raise RoleTaken(
                    f"ring {name} has its {role} already, or its {role.other} is closing it"
                )
            undo.pop_all()
        return segment

    def _refuse_if_closed(self) -> None:
        """Raises what an attacher must know of a ring whose creator closed it meanwhile."""
        closed = self.words[(self.role.other.line + layout.LINE_CLOSED) // 8]
        if closed > 1:
            raise Undelivered(
                f"ring {self.name} was closed by its {self.role.other} with {closed - 1} "
                "undelivered, before this process attached. Create a new ring",
                closed - 1,
            )
        if closed:
            raise _missing(self.name)

    def has_messages_for(self, role: layout.Role) -> bool:
        """Whether the other side has committed messages, which `role` is there to read."""
        return role is layout.Role.CONSUMER and self.semaphores["items"].value > 0

    def take_seat(self) -> bool:
        """Takes the attacher's seat, so that nobody else attaches; False if it is taken."""
        try:
            self.semaphores["seat"].acquire(0)
        except posix_ipc.BusyError:
            return False
        return True

    def say_closed(self, num_undelivered: int) -> None:
        """Leaves word for a process that is about to attach: the creator has closed the ring."""
        self.words[(self.role.line + layout.LINE_CLOSED) // 8] = 1 + num_undelivered

    def leave_seat(self) -> None:
        """Gives the attacher's seat back, as it cannot go on; never after `complete`."""
        self.semaphores["seat"].release()

    @property
    def created_here(self) -> bool:
        return self.header.creator_role == self.role

    def complete(self) -> None:
        """Does the attacher's last step: names itself, tells the creator, removes the names."""
        self._write_line()
        self.semaphores["joined"].release()  # JOINED: the line is visible before this post
        unlink_names(self.name)

    def peer(self) -> ProcessIdentity:
        """Reads who the other side is. The creator calls this only after taking `joined`."""
        if not self.created_here:
            return self.header.creator
        offset = self.role.other.line  # JOINED: read after the attacher's post
        raw = bytes(self.buffer[offset : offset + layout.IDENTITY_BYTES])
        return layout.unpack_identity(raw, self.header.session, self.me)

    def _write_line(self) -> None:
        offset = self.role.line
        line = layout.pack_identity(self.me, self.header.session)
        self.buffer[offset : offset + layout.IDENTITY_BYTES] = line

    def close(self) -> None:
        """Closes this process's handles; leaves the names and the other side's handles alone."""
        self.words.release()
        self.buffer.release()
        self.memory.close()
        for semaphore in self.semaphores.values():
            semaphore.close()


def _free_bytes() -> int:
    # /dev/shm may be as large as the machine's memory: filling it would wake the OOM killer, which
    # may end any process. (This does not see a container's memory limit.)
    stat = os.statvfs(SHM_DIRECTORY)
    with open("/proc/meminfo", "rb") as file:
        fields = dict(line.split(b":") for line in file)
    return min(stat.f_bavail * stat.f_frsize, int(fields[b"MemAvailable"].split()[0]) * 1024)


def _free_files() -> int | None:
    """How many more files fit; None where nothing counts them."""
    stat = os.statvfs(SHM_DIRECTORY)
    return stat.f_favail if stat.f_files else None


def _files_of_a_ring() -> int:
    """The most inodes that a ring takes while it is made.

    The memory, the semaphores and the FIFO; or, for a moment, one more for a semaphore, which has
    two names (sem_open makes a file and links it).
    """
    return 1 + len(SEMAPHORES) + 1


def _create_memory(name: str, total_bytes: int) -> mmap.mmap:
    if total_bytes > _free_bytes():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    # Size 0 here: posix_ipc would use ftruncate, which succeeds on a full /dev/shm and leaves a
    # SIGBUS for later. posix_fallocate reserves the pages or says ENOSPC.
    shared = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600, size=0)
    try:
        for start in range(0, total_bytes, _ALLOCATION_STEP):
            os.posix_fallocate(shared.fd, start, min(_ALLOCATION_STEP, total_bytes - start))
        return _map(shared.fd, total_bytes)
    finally:
        shared.close_fd()


def _open_memory(name: str) -> tuple[layout.SegmentHeader, mmap.mmap]:
    # Flags and size stay 0: O_CREAT with a size would truncate a live ring.
    try:
        shared = posix_ipc.SharedMemory(name, flags=0, size=0)
    except posix_ipc.ExistentialError:
        raise _missing(name) from None
    except posix_ipc.PermissionsError:
        raise RingError(
            f"ring {name} belongs to another user: run both sides as one user"
        ) from None
    try:
        file_bytes = os.fstat(shared.fd).st_size
        header = layout.SegmentHeader.unpack(
            os.pread(shared.fd, layout.SEGMENT_HEADER_BYTES, 0), file_bytes
        )
        return header, _map(shared.fd, file_bytes)
    finally:
        shared.close_fd()


def _map(fd: int, total_bytes: int) -> mmap.mmap:
    # MAP_POPULATE: the page faults of the first lap happen here, not in the first messages.
    return mmap.mmap(fd, total_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def open_semaphore(name: str, suffix: str) -> Semaphore:
    try:
        return Semaphore.open(f"{name}.{suffix}")
    except posix_ipc.ExistentialError:
        raise _missing(name) from None


def _missing(name: str) -> RingNotFound:
    return RingNotFound(
        f"no ring is named {name}: its creator closed it, or both sides have attached, which "
        "removes the name. Create a new ring: a name serves one attacher, once"
    )


@contextlib.contextmanager
def _explained(name: str, geometry: layout.Geometry) -> Iterator[None]:
    """Turns what the operating system refuses while a ring is made into RingErrors."""
    try:
        yield
    except RingError:
        raise
    except (OSError, MemoryError, posix_ipc.Error) as error:
        raise _refusal(error, name, geometry) from error


def _refusal(error: Exception, name: str, geometry: layout.Geometry) -> RingError:
    number = error_number(error)
    if number in (errno.EROFS, errno.EACCES):
        return RingError(
            f"cannot create a ring in {SHM_DIRECTORY}: {error}. Let user {os.geteuid()} make files "
            "there (the usual mode of this directory is 1777)"
        )
    size = f"a ring with num_slots={geometry.num_slots} and slot_bytes={geometry.slot_bytes}"
    if number == errno.ENOMEM:
        return OutOfSharedMemory(
            f"no memory for {size}, which maps {geometry.total_bytes} bytes: {reason(error)}: "
            "fewer or smaller slots"
        )
    if number not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
        return RingError(f"cannot create ring {name}: {reason(error)}")
    files, free = _files_of_a_ring(), _free_files()
    if geometry.total_bytes <= _free_bytes() and free is not None and free < files:
        return OutOfSharedMemory(
            f"{SHM_DIRECTORY} has bytes, but no inodes left for {size}: it needs {files}, {free} "
            f"are free ({error}). Remove files there (`python -m ipc.doctor "
            "--remove` finds those of dead rings), or mount it with more of them (mount -o "
            f"remount,nr_inodes=... {SHM_DIRECTORY})"
        )
    if number == errno.EDQUOT:
        return OutOfSharedMemory(
            f"user {os.geteuid()} may have no more in {SHM_DIRECTORY} for {size}, which needs "
            f"{geometry.total_bytes} bytes and {files} inodes ({error}). Remove files there, use "
            "fewer or smaller slots, or have the user's quota raised"
        )
    return OutOfSharedMemory(
        f"{SHM_DIRECTORY} has no room for {size}: it needs {geometry.total_bytes} bytes, "
        f"{_free_bytes()} are free ({error}). Use fewer or smaller slots, or give the container "
        "more (docker run --shm-size)"
    )


assert layout.PAGE_BYTES % mmap.PAGESIZE == 0 or mmap.PAGESIZE % layout.PAGE_BYTES == 0
