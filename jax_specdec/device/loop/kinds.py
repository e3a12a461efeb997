"""The kind of a batch: what the program of a step and those of its messages are compiled for.

The programs of one kind serve batches that ask for less, too. So a batch goes on with those that it
has while closer ones are compiled.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, NotRequired, TypedDict

import jax
import numpy as np

from jax_specdec.device.loop.host_slots import Slot, reads_once, widths_of_slots
from jax_specdec.device.messages.batch_options import Widths
from jax_specdec.device.messages.logit_changes import ChangesSize, changes_size
from jax_specdec.device.messages.row_logprobs import DraftReport

StepKey = tuple[Widths | None, int | None, int, ChangesSize | None, bool, int | None]


class StepOptions(TypedDict):
    """The static arguments of `step`."""

    report_widths: Widths | None
    read_k: int | None
    samples: bool
    num_drafts: NotRequired[int]  # fewer than D


def narrow_widths(num_drafts: int) -> tuple[int, ...]:
    """The widths below D that steps have programs of: none, and half of the drafts."""
    return tuple(dict.fromkeys((0, num_drafts // 2)))[:num_drafts]


class Kind(NamedTuple):
    """Everything static about a step and its messages that the loop's configuration leaves open."""

    widths: Widths = Widths()
    reports_drafts: bool = False  # a draft message may follow: its report is made with the drafts
    reads_once: bool = False  # logprobs take what verification has read
    samples: bool = False  # a slot may have a temperature: a much larger program
    changes: ChangesSize | None = None  # None: no slot changes the logits that choose
    num_drafts: int | None = None  # of a slot, that a step verifies; None: all D

    @classmethod
    def of_slots(
        cls,
        slots: Sequence[Slot],
        vocab_size: int,
        *,
        on_gpu: bool = False,
        draws: bool = False,
        in_tiles: bool = False,
    ) -> "Kind":
        """The cheapest kind that serves these slots.

        Args:
          slots: [B].
          vocab_size: V.
          on_gpu: whether the logits go through the GPU kernels.
          draws: drafts are drawn, so there is something to report.
          in_tiles: rows have bits of their own, so what others ask decides no order of sums.
        """
        params = [slot.params for slot in slots]
        return cls(
            widths=widths_of_slots(slots, vocab_size),
            reports_drafts=draws and any(one.draft_logprobs for one in params),
            reads_once=reads_once(slots, on_gpu) and not in_tiles,
            samples=any(one.temperature > 0 for one in params),
            changes=changes_size(params),
        )

    @property
    def has_grammar(self) -> bool:
        """Whether masks are made while the model's forward pass runs."""
        return self.changes is not None and self.changes.grammar

    def narrower(self, num_drafts: int) -> "tuple[Kind, ...]":
        """The same with steps that verify fewer than D = `num_drafts` drafts.

        There are none where masks follow all drafts, or a message reports them.
        """
        if self.has_grammar or self.reports_drafts:
            return ()
        return tuple(self._replace(num_drafts=width) for width in narrow_widths(num_drafts))

    @property
    def num_programs(self) -> int:
        """The step's, those of its messages, and one for all lengths that are copied."""
        return 3 + self.reports_drafts + 2 * self.has_grammar

    @property
    def step_options(self) -> StepOptions:
        """The static arguments of `step`."""
        options: StepOptions = {
            "report_widths": self.widths if self.reports_drafts else None,
            "read_k": self.widths.k if self.reads_once else None,
            "samples": self.samples,
        }
        if self.num_drafts is not None:
            options["num_drafts"] = self.num_drafts
        return options

    @property
    def step_key(self) -> StepKey:
        """What of the kind the program of a step depends on: less than its messages' do."""
        options = self.step_options
        return (
            options["report_widths"], options["read_k"], self.widths.chosen, self.changes,
            self.samples, self.num_drafts,
        )  # fmt: skip

    @property
    def cost(self) -> tuple[int, ...]:
        """A cheaper kind comes first."""
        changes = self.changes or ChangesSize(0, penalties=False)
        return (
            self.has_grammar, changes.penalties, self.widths.num_columns, self.changes is not None,
            self.reports_drafts, self.widths.mode, self.widths.chosen, self.widths.kept,
            self.samples, changes.ids, changes.holds_back, not self.reads_once,
        )  # fmt: skip

    def serves(self, exact: "Kind", slots: Sequence[Slot]) -> bool:
        """Whether programs of this kind give these slots, of the kind `exact`, what they ask."""
        has, needed = self.widths, exact.widths
        if exact.changes is not None and not (self.changes and self.changes.holds(exact.changes)):
            return False
        return (
            has.num_columns >= needed.num_columns
            and has.chosen >= needed.chosen
            and has.mode >= needed.mode
            and has.kept >= needed.kept
            and self.reports_drafts >= exact.reports_drafts
            and self.samples >= exact.samples
            and self.num_drafts == exact.num_drafts
        )


class PromptKind(NamedTuple):
    """Everything static about the chunks of a prompt with logprobs, and their messages."""

    chunk: int  # positions
    widths: Widths  # of what the prompt's slot asks for

    @property
    def num_programs(self) -> int:
        """As that of a batch's kind."""
        return 3


def as_report(kind: Kind, report: DraftReport | None, drafts: Any) -> DraftReport | None:
    """The report that programs of an earlier kind made, in the widths of this one.

    A slot's own columns are in both. Widths change seldom, and nothing is compiled: it is read.

    Args:
      kind: of the next step.
      report: of the last one, if it made one.
      drafts: [B, D], where they are.
    """
    if not kind.reports_drafts or kind.widths.k is None:
        return None
    shape, columns = drafts.shape, kind.widths.num_columns
    widths = columns, kind.widths.chosen
    if report is not None and widths == (
        report.logprobs.shape[-1],
        report.extra_logprobs.shape[-1],
    ):
        return report
    arrays: Any = (
        np.zeros((*shape, columns), np.int32),
        np.zeros((*shape, columns), np.float32),
        np.zeros(shape, np.int32),
        np.zeros((*shape, kind.widths.chosen), np.float32),
    )
    new = DraftReport(*arrays)
    if report is not None:
        arrays[2][:] = report.token_ranks
        for name in ("token_ids", "logprobs", "extra_logprobs"):
            wide, old = getattr(new, name), np.asarray(getattr(report, name))
            both = min(wide.shape[-1], old.shape[-1])
            wide[..., :both] = old[..., :both]
    placed: DraftReport = jax.device_put(new, drafts.sharding if drafts.committed else None)
    return placed
