"""Where compiled programs are kept from one start to the next.

jax reads and writes the files (its persistent compilation cache); here is decided where they are,
and what is removed. jax writes a file in place. A process that reads half of one compiles as if it
was not there, but one that is killed while it writes leaves a half for ever: so a process that
starts removes halves, and what is old where the files have become too many.

https://docs.jax.dev/en/latest/persistent_compilation_cache.html
"""

import contextlib
import errno
import hashlib
import os
import platform
import stat
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

OFF = "off"
MOST_BYTES = 1 << 31  # beyond it, the oldest go until half of it is left
WRITING_SECONDS = 60.0  # a file that is younger may be one that somebody writes
SUFFIX = "-cache"
CHECKED = "checked"  # names of the files that were found whole: they never change
_ZSTD = b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True)
class Contents:
    """The kept programs of a folder: how many files, and their bytes."""

    count: int
    size: int


def default_folder() -> Path:
    """The folder of this user on machines like this one; made by nobody yet perhaps.

    Programs for a CPU use its instructions, and a home directory may be another machine's too.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "jax-specdec" / f"compiled-{machine()}"


def contents(folder: Path) -> Contents:
    """The contents of a folder; nothing where it is not there."""
    sizes = [file_stat.st_size for _, file_stat in _files(folder)]
    return Contents(len(sizes), sum(sizes))


def clear(folder: Path) -> Contents:
    """Remove a folder's programs; returns what was removed."""
    before = contents(folder)
    for path, _ in list(_files(folder)):
        path.unlink(missing_ok=True)
    (folder / CHECKED).unlink(missing_ok=True)
    return before


def prepare(folder: Path) -> None:
    """Make the folder as `make` does, and remove what is broken or too much; errors as `make`."""
    make(folder)
    _remove_halves(folder)
    _remove_old(folder)


def make(folder: Path) -> None:
    """Make the folder, for this user alone.

    Raises:
      OSError: it cannot be made, or not written into.
      PermissionError: somebody else may write into it: a program from there would be run.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file_stat = folder.stat()
    if file_stat.st_uid != os.geteuid() or file_stat.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            f"{folder} is not this user's alone (mode {stat.filemode(file_stat.st_mode)}), and "
            "what is in there would be run: choose another folder, or chmod 700 it"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "this user may not write there", str(folder))


def _remove_halves(folder: Path) -> None:
    index = folder / CHECKED
    names: set[str] = set()
    with contextlib.suppress(OSError):
        names = set(index.read_text().split())
    complete, now = [], time.time()
    for path, file_stat in list(_files(folder)):
        if path.name in names:
            continue
        if is_whole(path):
            complete.append(path.name)
        elif now - file_stat.st_mtime > WRITING_SECONDS:
            path.unlink(missing_ok=True)
    if complete:
        with index.open("a") as file:
            file.write("".join(f"{name}\n" for name in complete))


def _remove_old(folder: Path) -> None:
    files = sorted(_files(folder), key=lambda path_and_stat: path_and_stat[1].st_mtime)
    total = sum(file_stat.st_size for _, file_stat in files)
    if total <= MOST_BYTES:
        return
    for path, file_stat in files:
        if total <= MOST_BYTES // 2:
            break
        path.unlink(missing_ok=True)
        total -= file_stat.st_size


def is_whole(path: Path) -> bool:
    """Whether a file ends as jax's compression says; False where it cannot be read."""
    try:
        data = path.read_bytes()
        if data.startswith(_ZSTD):
            _zstd_decompress()(data)
            return True
        stream = zlib.decompressobj()
        stream.decompress(data)
    except Exception:  # the library that jax found has errors of its own
        return False
    return stream.eof


def _zstd_decompress() -> Callable[[bytes], bytes]:
    """The function by which jax reads such a file: Python's own from 3.14 on."""
    try:
        from compression import zstd

        decompress: Callable[[bytes], bytes] = zstd.decompress
    except ImportError:
        import zstandard

        decompress = zstandard.ZstdDecompressor().decompress
    return decompress


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    try:
        paths = list(folder.glob(f"*{SUFFIX}"))
    except OSError:
        return
    for path in paths:
        with contextlib.suppress(OSError):  # another process has removed it
            yield path, path.stat()


def machine() -> str:
    """The kind of this machine's CPU."""
    flags = ""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        fields = ("model name", "flags", "Features", "CPU part")
        flags = "".join(dict.fromkeys(line for line in file if line.startswith(fields)))
    return f"{platform.machine()}-{hashlib.sha256(flags.encode()).hexdigest()[:8]}"
