"""Files of columns, one a replica, that an interrupted run can continue.

Each file is a stream of Arrow's IPC format without its end mark: a schema and then batches, of one
row a request that has ended. A batch is written whole; what a run that was killed has left of one
is cut off by the next run. `pyarrow.ipc.open_stream` reads them, and so do other readers of Arrow.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from jax_specdec.cli.resumable_jsonl import OutputError, lock
from jax_specdec.export.arrow import pyarrow, sequences_table
from jax_specdec.export.prompt_columns import PromptColumns
from jax_specdec.ray import ColumnBatch, columns

DIGEST = "request_digest"
SUFFIX = ".arrows"


class ColumnsOutput:
    """A folder with a file for each replica, written by one process at a time.

    Attributes:
      done: id to digest of the requests in all files.
      cut: bytes of half-written batches that were cut off.
    """

    def __init__(self, folder: Path) -> None:
        """Open or create the folder, and read which requests its files have.

        Raises:
          OSError: it cannot be read or written.
          OutputError: another process writes there, or a file is none of these.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.done: dict[str, str] = {}
        self.cut = 0
        self._files: dict[int, IO[bytes]] = {}
        self._lock = (folder / "lock").open("ab")
        try:
            lock(self._lock, folder)
            for path in sorted(folder.glob(f"replica-*{SUFFIX}")):
                self._read(path)
        except BaseException:
            self._lock.close()
            raise

    def write(self, batches: Sequence[ColumnBatch], digests: Mapping[str, str]) -> None:
        """Append the requests of `batches`, all of whose tokens these have; by replica of the last.

        Args:
          digests: of the requests, by id.

        Raises:
          OSError: they cannot be written whole; the next run cuts off what there is.
        """
        pa = pyarrow()
        table = sequences_table(columns(batches))
        ids = table["request_id"].to_pylist()
        for name, values in _of_prompts(batches, ids).items():
            table = table.append_column(name, values)
        table = table.append_column(DIGEST, pa.array([digests[name] for name in ids]))
        replica = batches[-1].replica
        file = self._files.get(replica)
        if file is None:
            path = self._folder / f"replica-{replica}{SUFFIX}"
            file = self._files[replica] = path.open("ab", 0)
            if not file.tell():
                _write(file, memoryview(table.schema.serialize()), path)
        for batch in table.combine_chunks().to_batches():
            _write(file, memoryview(batch.serialize()), Path(file.name))
        self.done.update((name, digests[name]) for name in ids)

    def close(self) -> None:
        """Close all files."""
        for file in (*self._files.values(), self._lock):
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _read(self, path: Path) -> None:
        pa = pyarrow()
        whole, size = 0, path.stat().st_size
        with path.open("rb") as file:
            schema = None
            while whole < size:
                try:
                    message = pa.ipc.read_message(file)
                    if schema is None:
                        schema = pa.ipc.read_schema(message)
                        names = schema.names
                        if DIGEST not in names or "request_id" not in names:
                            raise OutputError(
                                f"{path} is no file of this command: choose another folder, or "
                                "remove it"
                            )
                    else:
                        batch = pa.ipc.read_record_batch(message, schema)
                        ids = batch.column("request_id").to_pylist()
                        self.done.update(zip(ids, batch.column(DIGEST).to_pylist(), strict=True))
                except (EOFError, OSError, pa.ArrowInvalid):
                    self.cut += size - whole
                    break
                whole = file.tell()
        if whole < size:
            os.truncate(path, whole)


def read_columns(folder: Path) -> Any:
    """A `pyarrow.Table` of all files of a folder, for `arrow.from_sequences`; one row a request.

    Raises:
      FileNotFoundError: there is none.
    """
    pa = pyarrow()
    paths = sorted(folder.glob(f"replica-*{SUFFIX}"))
    if not paths:
        raise FileNotFoundError(f"{folder} has no file replica-*{SUFFIX}")
    tables = []
    for path in paths:
        with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as reader:
            tables.append(reader.read_all())
    return pa.concat_tables(tables)


def _of_prompts(batches: Sequence[ColumnBatch], ids: Sequence[str]) -> dict[str, Any]:
    """The columns of the prompts' logprobs, of the requests `ids` in their order."""
    found, places = PromptColumns(), {name: at for at, name in enumerate(ids)}
    for batch in batches:
        for part in batch:
            if (rows := part.prompt) is not None:
                found.put(places[part.request_id], part.prompt_weights_versions, rows)
    return found.columns(len(ids), always=True)


def _write(file: IO[bytes], left: memoryview, path: Path) -> None:
    try:
        while left:  # a write to a disk that fills up may be short
            left = left[file.write(left) :]
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
