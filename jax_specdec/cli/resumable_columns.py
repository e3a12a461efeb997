"""Files of columns, one a replica, that an interrupted run can continue.

Each file is a stream of Arrow's IPC format without its end mark: a schema and then batches, of one
row a request that has ended. A batch is written whole; what a run that was killed has left of one
is cut off by the next run. `pyarrow.ipc.open_stream` reads them, and so do other readers of Arrow.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from jax_specdec.cli.resumable import Output, append, foreign
from jax_specdec.export.arrow import pyarrow, sequences_table
from jax_specdec.export.prompt_columns import PromptColumns
from jax_specdec.ray import ColumnBatch, columns

DIGEST = "request_digest"
SUFFIX = ".arrows"


class ColumnsOutput(Output):
    """A folder with a file for each replica."""

    def __init__(self, folder: Path) -> None:
        """Open or create the folder, and read which requests its files have; errors as `Output`."""
        folder.mkdir(parents=True, exist_ok=True)
        self._files: dict[int, IO[bytes]] = {}
        super().__init__(folder, (folder / "lock").open("ab"))

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
        path = self.path / f"replica-{replica}{SUFFIX}"
        file = self._files.get(replica)
        if file is None:
            file = self._files[replica] = self.enter_context(path.open("ab", 0))
            if not file.tell():
                append(file, path, table.schema.serialize())
        for batch in table.combine_chunks().to_batches():
            append(file, path, batch.serialize())
        self.done.update((name, digests[name]) for name in ids)

    def _read(self) -> None:
        for path in sorted(self.path.glob(f"replica-*{SUFFIX}")):
            self._read_file(path, self._batches)

    def _batches(self, file: IO[bytes]) -> Iterator[Mapping[str, str]]:
        pa = pyarrow()
        try:
            schema = pa.ipc.read_schema(pa.ipc.read_message(file))
            if DIGEST not in schema.names or "request_id" not in schema.names:
                raise foreign(file.name)
            yield {}
            while True:
                batch = pa.ipc.read_record_batch(pa.ipc.read_message(file), schema)
                ids = batch.column("request_id").to_pylist()
                yield dict(zip(ids, batch.column(DIGEST).to_pylist(), strict=True))
        except (EOFError, OSError, pa.ArrowInvalid):  # it ends, perhaps in the middle of a batch
            return


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
