"""`jax-specdec generate --ray`: prompts through engines on a cluster, into columns."""

import argparse
import contextlib
from collections.abc import Sequence
from typing import cast

from jax_specdec.cli import generate, standard_output
from jax_specdec.cli.generate import Tally, TextsInOrder
from jax_specdec.cli.prompts import Prompt
from jax_specdec.cli.resumable_columns import ColumnsOutput
from jax_specdec.engine.config import EngineConfig
from jax_specdec.export.delivery import Delivery
from jax_specdec.ray import ClusterError, ColumnBatch, RayConfig, RayEngine
from jax_specdec.records.record import Record
from jax_specdec.text.detokenize import TokenTable


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
        left = generate.left_to_do(prompts, output, settings)
        if not left:
            return 0
        show, _ = standard_output.shower(quiet=options.quiet)
        work = _Work(left, settings, output, TextsInOrder(left, table, show), table)
        try:
            with work.tally.noting(options.output), RayEngine(config, cluster) as engine:
                for batch in engine.generate([prompt.request for prompt in left]):
                    work.add(batch)
        except ClusterError as error:
            raise ValueError(str(error)) from error
    return work.tally.conclude()


class _Work:
    """What came of the prompts so far, and waits until their requests end.

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
        self.tally.tokens += batch.num_tokens
        for row, part in enumerate(batch):
            name, reason = part.request_id, part.finish_reason
            # Without stop strings and a style, what is read is what both kinds have.
            for shown in self._deliveries[name].push(cast(Record, part)):
                self._texts.add(shown)
            if self._output is not None:
                self._open.setdefault(name, []).append(batch.take([row]))
            if reason is not None:
                mine = self._open.pop(name, [])
                ended += mine if self.tally.end(name, reason) else []
        if self._output is not None and ended:
            names = {request.id for one in ended for request in one.requests}
            digests = {name: self._prompts[name].digest(*self._settings) for name in names}
            self._output.write(ended, digests)
