"""The kind of a batch: what the program of a step and those of its messages are compiled for.

The programs of one kind serve batches that ask for less, too. So what an engine serves needs few of
them, its ladder: a batch takes the lowest rung that serves it.
"""

from collections.abc import Sequence
from typing import NamedTuple, NotRequired, TypedDict

import jax.numpy as jnp

from jax_specdec.declaration import Serves
from jax_specdec.device.loop import host_slots
from jax_specdec.device.loop.host_slots import Slot, widths_of_slots
from jax_specdec.device.loop.state import LoopConfig
from jax_specdec.device.messages.batch_options import (
    Widths,
    changes_bucket,
    chosen_bucket,
    k_bucket,
)
from jax_specdec.device.messages.logit_changes import ChangesSize, changes_size
from jax_specdec.device.messages.row_logprobs import DraftReport
from jax_specdec.requests import SamplingParams, TokenIdRows


class StepOptions(TypedDict):
    """The static arguments of `step`."""

    report_widths: Widths | None
    samples: bool
    num_drafts: NotRequired[int]  # fewer than D


class StepKind(NamedTuple):
    """Everything static about a step and its messages that the loop's configuration leaves open."""

    widths: Widths = Widths()
    reports_drafts: bool = False  # a draft message may follow: its report is made with the drafts
    samples: bool = False  # a slot may have a temperature: a much larger program
    changes: ChangesSize | None = None  # None: no slot changes the logits that choose
    num_drafts: int | None = None  # of a slot, that a step verifies; None: all D

    @classmethod
    def of_slots(cls, slots: Sequence[Slot], vocab_size: int, *, draws: bool = False) -> "StepKind":
        """The cheapest kind that serves these slots.

        Args:
          slots: [B].
          vocab_size: V.
          draws: drafts are drawn, so there is something to report.
        """
        params = [slot.params for slot in slots]
        return cls(
            widths=widths_of_slots(slots, vocab_size),
            reports_drafts=draws and any(slot_params.draft_logprobs for slot_params in params),
            samples=any(slot_params.temperature > 0 for slot_params in params),
            changes=changes_size(params),
        )

    @property
    def has_grammar(self) -> bool:
        """Whether masks are made while the model's forward pass runs."""
        return self.changes is not None and self.changes.grammar

    def narrower(self, num_drafts: int) -> "tuple[StepKind, ...]":
        """The same with steps that verify fewer than D = `num_drafts` drafts: without any.

        There are none where a message reports drafts. Masks of a grammar follow all drafts: steps
        that verify fewer have none.
        """
        if self.reports_drafts or not num_drafts:
            return ()
        changes = None if self.changes is None else self.changes._replace(grammar=False)
        return (self._replace(num_drafts=0, changes=changes),)

    @property
    def step_options(self) -> StepOptions:
        """The static arguments of `step`."""
        options: StepOptions = {
            "report_widths": self.widths if self.reports_drafts else None,
            "samples": self.samples,
        }
        if self.num_drafts is not None:
            options["num_drafts"] = self.num_drafts
        return options

    def serves(self, exact: "StepKind") -> bool:
        """Whether programs of this kind give slots of the kind `exact` what they ask."""
        has, needed = self.widths, exact.widths
        if exact.changes is not None and not (self.changes and self.changes.holds(exact.changes)):
            return False
        return (
            has.num_columns >= needed.num_columns
            and has.chosen >= needed.chosen
            and has.mode >= needed.mode
            and has.kept >= needed.kept
            and has.values & needed.values == needed.values
            and self.reports_drafts >= exact.reports_drafts
            and self.samples >= exact.samples
        )

    def __str__(self) -> str:
        """Its name for people."""
        words = ["sampled" if self.samples else "greedy", "step"]
        names = {
            f"K = {self.widths.k}": self.widths.k is not None,
            f"{self.widths.mode.name.lower()} logprobs": bool(self.widths.mode),
            "kept sets": self.widths.kept,
            "values of rows": self.widths.values > 0,
            "draft logprobs": self.reports_drafts,
            "biases": self.changes is not None and self.changes.ids > 0,
            "penalties": self.changes is not None and self.changes.penalties,
            "grammars": self.has_grammar,
        }
        if more := [name for name, is_there in names.items() if is_there]:
            words += ["with", ", ".join(more)]
        if self.num_drafts is not None:
            words.append(
                "without drafts" if not self.num_drafts else f"of {self.num_drafts} drafts"
            )
        return " ".join(words)


class PromptKind(NamedTuple):
    """Everything static about the chunks of a prompt with logprobs, and their messages."""

    chunk: int  # positions
    widths: Widths  # of what the prompt's slot asks for

    def __str__(self) -> str:
        """Its name for people."""
        return f"prompt with K = {self.widths.k}"

    @classmethod
    def of_slot(cls, slot: Slot, config: LoopConfig, prefill_chunk: int) -> "PromptKind":
        """The kind for the prompt of a slot that wants its logprobs."""
        widths = widths_of_slots([host_slots.for_prompt(slot)], config.model.vocab_size)
        return cls(host_slots.chunk_size(slot, config, prefill_chunk), widths)

    @classmethod
    def of_all(cls, serves: Serves, config: LoopConfig, prefill_chunk: int) -> "PromptKind | None":
        """The kind for all prompts whose logprobs are served; None where none are."""
        if serves.max_logprobs_of_prompts is None:
            return None
        k = min(serves.max_logprobs_of_prompts, config.model.vocab_size)
        count = serves.num_prompt_chosen
        named = TokenIdRows(b"", count) if count else None
        params = SamplingParams(prompt_logprobs=k, prompt_extra_token_ids=named)
        slot = Slot(params=params, score_from=0)
        chunk = host_slots.chunk_size(slot, config, prefill_chunk, serves)
        widths = Widths(
            k=_served_k(k, config.model.vocab_size),
            chosen=chosen_bucket(count),
            mode=serves.max_logprobs_mode,
        )
        return cls(chunk, widths)


def _served_k(k: int, vocab_size: int) -> int:
    return k_bucket(min(k, vocab_size), vocab_size)


class Ladder(NamedTuple):
    """The kinds of programs that serve what an engine has declared.

    Attributes:
      rungs: of batches, at the full width; lower ones cost less.
      prompt: of prompts with logprobs; None where none are served.
    """

    rungs: tuple[StepKind, ...]
    prompt: PromptKind | None

    @classmethod
    def of(
        cls,
        serves: Serves,
        config: LoopConfig,
        prefill_chunk: int,
        *,
        draws: bool = False,
    ) -> "Ladder":
        """The ladder of a loop; arguments as `StepKind.of_slots`.

        Greedy batches have rungs of their own: their steps have nothing of sampling, and a sixth of
        the instructions. All changes of logits are one rung, the last: a step that makes a changed
        copy of them for a penalty costs little more than one that hands down a bias, and each
        further program makes the start longer. So is all that few ask about logprobs.
        """
        vocab = config.model.vocab_size
        plain = Widths(
            chosen=chosen_bucket(serves.max_extra_token_ids)
        )  # as all rungs: they share their steps
        widths = [plain]
        if serves.max_logprobs is not None:
            widths.append(plain._replace(k=_served_k(serves.max_logprobs, vocab)))
        most = widths[-1]._replace(kept=serves.kept_token_ids)
        if most.k is not None:
            most = most._replace(mode=serves.max_logprobs_mode, values=serves.row_values)
        reports = draws and serves.draft_logprobs
        answers = dict.fromkeys(
            [*((answer_width, False) for answer_width in widths), (most, reports)]
        )

        rungs = [
            StepKind(*answer, samples=samples)
            for samples in dict.fromkeys((False, serves.sampling))
            for answer in answers
        ]
        if serves.max_changed_ids or serves.penalties or serves.grammars:
            ids = changes_bucket(serves.max_changed_ids)
            changes = ChangesSize(ids, serves.penalties, ids > 0, serves.grammars)
            rungs.append(StepKind(most, reports, samples=serves.sampling, changes=changes))
        if serves.alike:
            rungs = rungs[-1:]
        return cls(tuple(rungs), PromptKind.of_all(serves, config, prefill_chunk))

    def lowest(self, exact: StepKind) -> StepKind:
        """The lowest rung that serves batches of the kind `exact`, all of which is declared."""
        return next(rung for rung in self.rungs if rung.serves(exact))


def empty_report(kind: StepKind, shape: tuple[int, ...]) -> DraftReport | None:
    """An empty report on drafts [B, D], for a step of this kind where none was made."""
    if not kind.reports_drafts or kind.widths.k is None:
        return None
    columns, chosen = kind.widths.num_columns, kind.widths.chosen
    return DraftReport(
        jnp.zeros((*shape, columns), jnp.int32),
        jnp.zeros((*shape, columns), jnp.float32),
        jnp.zeros(shape, jnp.int32),
        jnp.zeros((*shape, chosen), jnp.float32),
    )
