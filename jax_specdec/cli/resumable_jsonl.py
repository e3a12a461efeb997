"""A file with one JSON record a line, which an interrupted run can continue.

A record is written whole, with its line end last. So a run that was killed leaves whole lines, and
after them at most one half-written line, which the next run cuts off.
"""

import fcntl
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

_BEGIN = b'{"id": '  # every record begins so; other content is not cut off


class OutputError(ValueError):
    """A file cannot be continued; says why and the way out."""


def lock(file: IO[Any], path: Path) -> None:
    """Keep other processes from writing `path` until `file` is closed.

    Raises:
      OutputError: another process writes it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputError(
            f"another process writes {path}: wait for it, or choose another output"
        ) from None


class JsonlOutput:
    """Appends records to a file, from one process at a time.

    Attributes:
      done: id to digest of the records in the file; empty for a pipe or a device.
      cut: bytes of a half-written line that were cut off.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file, and read its records.

        Raises:
          OSError: the file cannot be written.
          OutputError: another process writes it, or it holds something other than records.
        """
        self._path = path
        self.done: dict[str, str] = {}
        self.cut = 0
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666), "ab", 0)
        try:
            if stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                lock(self._file, self._path)
                self._read()
        except BaseException:
            self._file.close()
            raise

    def write(self, id: str, digest: str, record: Mapping[str, Any]) -> None:
        """Append one record, and hand it to the system: it outlives this process.

        Raises:
          OSError: the record cannot be written whole; the next run cuts off what there is of it.
        """
        line = json.dumps({"id": id, **record, "request_digest": digest}, allow_nan=False)
        left = memoryview(line.encode() + b"\n")
        try:
            while left:  # a write to a disk that fills up may be short
                left = left[self._file.write(left) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        self.done[id] = digest

    def close(self) -> None:
        """Close the file, so that another process may write it."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _read(self) -> None:
        whole = 0
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n") and _BEGIN[: len(line)] == line[: len(_BEGIN)]:
                    self.cut = len(line)
                    break
                whole += len(line)
                try:
                    record = json.loads(line)
                    self.done[str(record["id"])] = str(record["request_digest"])
                except (ValueError, KeyError, TypeError) as error:
                    raise OutputError(
                        f"{self._path}, line {number}, is not a record of this command: choose "
                        "another file, or remove this one"
                    ) from error
        if self.cut:
            self._file.truncate(whole)
