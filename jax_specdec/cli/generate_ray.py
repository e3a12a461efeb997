"""`jax-specdec generate --ray`: prompts through engines on a cluster, into columns.

A folder has a file for each replica: a stream of Arrow's IPC format without its end mark, a schema
and then batches, of one row a request that has ended. A batch is written whole; what a run that was
killed has left of one is cut off by the next run. `pyarrow.ipc.open_stream` reads them, and so do
other readers of Arrow.
"""

import argparse
import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from jax_specdec.cli import generate, standard_output
from jax_specdec.cli.generate import Tally, TextsInOrder
from jax_specdec.cli.prompts import Prompt
from jax_specdec.cli.resumable import Output, append_bytes, foreign
from jax_specdec.engine.config import EngineConfig
from jax_specdec.export.arrow import pyarrow, sequences_table
from jax_specdec.export.delivery import Delivery
from jax_specdec.export.prompt_columns import PromptColumns
from jax_specdec.ray import ClusterError, ColumnBatch, RayConfig, RayEngine, columns
from jax_specdec.records.record import Record
from jax_specdec.text.detokenize import TokenTable

DIGEST = "request_digest"
_SUFFIX = ".arrows"


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
        path = self.path / f"replica-{replica}{_SUFFIX}"
        file = self._files.get(replica)
        if file is None:
            file = self._files[replica] = self.enter_context(path.open("ab", 0))
            if not file.tell():
                append_bytes(file, path, table.schema.serialize())
        for batch in table.combine_chunks().to_batches():
            append_bytes(file, path, batch.serialize())
        self.done.update((name, digests[name]) for name in ids)

    def _read(self) -> None:
        for path in sorted(self.path.glob(f"replica-*{_SUFFIX}")):
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


def read_table(folder: Path) -> Any:
    """A `pyarrow.Table` of all files of a folder, for `arrow.from_sequences`; one row a request.

    Raises:
      FileNotFoundError: there is none.
    """
    pa = pyarrow()
    paths = sorted(folder.glob(f"replica-*{_SUFFIX}"))
    if not paths:
        raise FileNotFoundError(f"{folder} has no file replica-*{_SUFFIX}")
    tables = []
    for path in paths:
        with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as reader:
            tables.append(reader.read_all())
    return pa.concat_tables(tables)


def _of_prompts(batches: Sequence[ColumnBatch], ids: Sequence[str]) -> dict[str, Any]:
    """The columns of the prompts' logprobs, of the requests `ids` in their order."""
    columns, places = PromptColumns(), {name: at for at, name in enumerate(ids)}
    for batch in batches:
        for part in batch:
            if (rows := part.prompt) is not None:
                columns.put(places[part.request_id], part.prompt_weights_versions, rows)
    return columns.columns(len(ids), always=True)


def run(
    options: argparse.Namespace,
    config: EngineConfig,
    prompts: Sequence[Prompt],
    settings: tuple[str, ...],
    table: TokenTable,
) -> int:
    """Run the prompts that the output lacks; returns the exit status, 1 where a request failed.

    Raises:
      OSError, ValueError: an option or a file cannot be used.
      WorkerFailed: no replica is left; its note says what was kept.
    """
    opened: contextlib.AbstractContextManager[ColumnsOutput | None] = (
        ColumnsOutput(options.output) if options.output else contextlib.nullcontext()
    )
    if any(prompt.stops for prompt in prompts):
        raise ValueError(
            "stop strings are not for --ray, whose columns have no text: write stop_sequences "
            "(token ids that end a text) in the lines of a .jsonl file"
        )
    cluster = RayConfig(
        replicas=options.replicas, devices=options.replica_devices, address=options.ray
    )
    with opened as output:
        remaining = generate.left_to_do(prompts, output, settings)
        if not remaining:
            return 0
        if output is None and generate.needs_records(remaining):
            print("logprobs are not shown: --output FOLDER keeps columns of them", file=sys.stderr)
        show, _ = standard_output.shower(quiet=options.quiet)
        work = _Work(remaining, settings, output, TextsInOrder(remaining, table, show), table)
        try:
            with work.tally.noting(options.output), RayEngine(config, cluster) as engine:
                for batch in engine.generate([prompt.request for prompt in remaining]):
                    work.add(batch)
        except ClusterError as error:
            raise ValueError(str(error)) from error
    return work.tally.conclude()


class _Work:
    """Results of the prompts so far, and a wait for the end of their requests.

    Attributes:
      tally: what became of them.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        settings: tuple[str, ...],
        output: ColumnsOutput | None,
        texts: TextsInOrder,
        table: TokenTable,
    ) -> None:
        self.tally = Tally(len(prompts))
        self._prompts = {prompt.request.id: prompt for prompt in prompts}
        self._settings, self._output, self._texts = settings, output, texts
        self._open: dict[str, list[ColumnBatch]] = {}
        self._deliveries = {id: Delivery(table) for id in self._prompts}

    def add(self, batch: ColumnBatch) -> None:
        """Take a batch, and write the requests that have ended with it."""
        ended: list[ColumnBatch] = []
        self.tally.count(batch.num_tokens)
        for row, part in enumerate(batch):
            name, reason = part.request_id, part.finish_reason
            # Without stop strings and a style, what is read is what both kinds have.
            for shown in self._deliveries[name].push(cast(Record, part)):
                self._texts.add(shown)
            if self._output is not None:
                self._open.setdefault(name, []).append(batch.take([row]))
            if reason is not None:
                batches = self._open.pop(name, [])
                ended += batches if self.tally.end(name, reason) else []
        if self._output is not None and ended:
            names = {request.id for batch in ended for request in batch.requests}
            digests = {name: self._prompts[name].digest(*self._settings) for name in names}
            self._output.write(ended, digests)
