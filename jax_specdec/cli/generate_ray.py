"""`jax-specdec generate --ray`: prompts through engines on a cluster, into columns."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from jax_specdec.cli import generate, standard_output
from jax_specdec.cli.generate import FINISHED, TextsInOrder
from jax_specdec.cli.resumable_columns import ColumnsOutput
from jax_specdec.export import openai
from jax_specdec.ray import ClusterError, ColumnBatch, RayConfig, RayEngine
from jax_specdec.wording import counted

if TYPE_CHECKING:
    from jax_specdec.cli.prompts import Prompt
    from jax_specdec.engine.config import EngineConfig
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
    cluster = RayConfig(
        replicas=options.replicas, devices=options.replica_devices, address=options.ray
    )
    with opened as output:
        left = generate.left_to_do(prompts, output.done if output else {}, settings)
        if output is not None and output.cut:
            print(f"cut off half-written columns: {output.cut} bytes", file=sys.stderr)
        if len(left) < len(prompts):
            done = f"{len(prompts) - len(left)} of {counted(len(prompts), 'request')}"
            print(f"in the output already: {done}", file=sys.stderr)
        if not left:
            return 0
        show, _ = standard_output.shower(quiet=options.quiet)
        texts = TextsInOrder(left, table, show)
        work = _Work({prompt.request.id: prompt for prompt in left}, settings, output, texts)
        try:
            with RayEngine(config, cluster) as engine:
                for batch in engine.generate([prompt.request for prompt in left]):
                    work.add(batch)
        except ClusterError as error:
            raise ValueError(str(error)) from error
        except BaseException as end:
            kept = f"ended before that: {work.finished} of {counted(len(left), 'request')}"
            if output is not None:
                kept += f", kept in {options.output}: run the same command again for the others"
            end.add_note(kept)
            raise
    for line in work.summary():
        print(line, file=sys.stderr)
    return 1 if work.failed else 0


class _Work:
    """What came of the prompts so far.

    Attributes:
      finished: requests that ended by a stop or at their length.
      failed: id to the reason of those that ended otherwise; they are not written.
    """

    def __init__(
        self,
        prompts: dict[str, Prompt],
        settings: tuple[str, ...],
        output: ColumnsOutput | None,
        texts: TextsInOrder,
    ) -> None:
        self.finished = 0
        self.failed: dict[str, str] = {}
        self._prompts, self._settings, self._output = prompts, settings, output
        self._texts = texts
        self._open: dict[str, list[ColumnBatch]] = {}
        self._tokens, self._began = 0, time.monotonic()

    def add(self, batch: ColumnBatch) -> None:
        """Take a batch, and write the requests that have ended with it."""
        ended: list[ColumnBatch] = []
        self._tokens += batch.num_tokens
        for row, part in enumerate(batch):
            name, reason = part.request_id, part.finish_reason
            self._texts.add(cast("Record", part))  # without a style it reads what both have
            if self._output is not None:
                self._open.setdefault(name, []).append(batch.take([row]))
            if reason is None:
                continue
            mine = self._open.pop(name, [])
            if reason in FINISHED:
                self.finished += 1
                ended += mine
            else:
                self.failed[name] = str(openai.finish_reason(reason))
        if self._output is not None and ended:
            names = {request.id for one in ended for request in one.requests}
            digests = {name: self._prompts[name].digest(*self._settings) for name in names}
            self._output.write(ended, digests)

    def summary(self) -> list[str]:
        """The lines to print at the end."""
        seconds = max(time.monotonic() - self._began, 1e-9)
        line = (
            f"{self.finished} of {counted(len(self._prompts), 'request')}, "
            f"{counted(self._tokens, 'token')} in {seconds:.1f} s, loading included "
            f"({self._tokens / seconds:.1f} a second)"
        )
        early = [f"request {name!r} ended early: {why}" for name, why in self.failed.items()]
        return [line, *early]
