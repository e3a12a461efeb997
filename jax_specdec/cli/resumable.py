"""Outputs that an interrupted run can continue, each written by one process at a time."""

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

_BEGIN = b'{"id": '  # every record of JSON begins so; other content is not cut off


class OutputError(ValueError):
    """An output cannot be continued; says why and the way out."""


class Output(contextlib.ExitStack):
    """The output of runs in a file or a folder; use it as a context manager.

    Attributes:
      path: of the file or folder.
      done: id to digest of the requests in it; empty for a pipe or a device.
      cut: bytes of half-written records that were cut off.
    """

    def __init__(self, path: Path, locked: IO[Any]) -> None:
        """Keep other processes from writing to `path`, and read what it has.

        Args:
          path: what is written to.
          locked: a file that all writers of it have open.

        Raises:
          OSError: it cannot be read or written.
          OutputError: another process writes there, or it holds something other than records.
        """
        super().__init__()
        self.path = path
        self.done: dict[str, str] = {}
        self.cut = 0
        self.enter_context(locked)
        with contextlib.ExitStack() as opening:
            opening.callback(self.close)
            if stat.S_ISREG(os.fstat(locked.fileno()).st_mode):
                try:
                    fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise OutputError(
                        f"another process writes {path}: wait for it, or choose another output"
                    ) from None
                self._read()
            opening.pop_all()

    def _read(self) -> None:
        """Learn what is done, and cut off what is half written."""
        raise NotImplementedError

    def _read_file(
        self, path: Path, records: Callable[[IO[bytes]], Iterator[Mapping[str, str]]]
    ) -> None:
        """Learn what an appended file has, and cut off what is behind its last whole record.

        Args:
          records: yields the digests of each whole record by id, with the file behind it.
        """
        complete = 0
        with path.open("rb") as file:
            for digests in records(file):
                self.done |= digests
                complete = file.tell()
        if torn := path.stat().st_size - complete:
            self.cut += torn
            os.truncate(path, complete)


def append_bytes(file: IO[bytes], path: Path, data: bytes | memoryview) -> None:
    """Write all of `data` to a file of this path, and hand it to the system, which keeps it.

    Raises:
      OSError: it cannot be written whole; the next run cuts off what there is of it.
    """
    unwritten = memoryview(data)
    try:
        while unwritten:  # a write to a disk that fills up may be short
            unwritten = unwritten[file.write(unwritten) :]
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def record_line(id: str, digest: str, record: Mapping[str, Any]) -> str:
    """The line of a record, with its end."""
    return json.dumps({"id": id, **record, "request_digest": digest}, allow_nan=False) + "\n"


def foreign(what: str) -> OutputError:
    """The error of content that no run has written."""
    return OutputError(f"{what} is not of this command: choose another output, or remove it")


class JsonlOutput(Output):
    """A file with one JSON record a line.

    A record is written whole, with its line end last. So a run that was killed leaves whole lines,
    and after them at most one half-written line.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file, and read its records; errors as `Output`."""
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        self._file = os.fdopen(opened, "ab", 0)
        super().__init__(path, self._file)

    def write(self, id: str, digest: str, record: Mapping[str, Any]) -> None:
        """Append one record; errors as `append_bytes`."""
        append_bytes(self._file, self.path, record_line(id, digest, record).encode())
        self.done[id] = digest

    def _read(self) -> None:
        self._read_file(self.path, self._lines)

    def _lines(self, file: IO[bytes]) -> Iterator[Mapping[str, str]]:
        for number, line in enumerate(iter(file.readline, b""), 1):
            if not line.endswith(b"\n") and _BEGIN[: len(line)] == line[: len(_BEGIN)]:
                return
            try:
                record = json.loads(line)
                yield {str(record["id"]): str(record["request_digest"])}
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise foreign(f"{self.path}, line {number},") from error
