"""The host's view of the slots: enough to launch a step and to bound its messages.

The host never waits for a step to launch the next one, so everything here is decided from what
requests asked for and from how far their prompts have come.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ipc import wire
from jax_specdec.declaration import EVERYTHING, Serves
from jax_specdec.device.loop.state import MAX_STOP_IDS, Admission, LoopConfig
from jax_specdec.device.messages.batch_options import (
    BatchOptions,
    Widths,
    host_sampling,
    options_of_requests,
    widths_of,
)
from jax_specdec.device.messages.logit_changes import ChangesSize, SlotChanges, changes_of_requests
from jax_specdec.requests import Request, SamplingParams
from jax_specdec.structured.matcher import Matcher

DEFAULT_PARAMS = SamplingParams()
CHUNK_STEP = 64  # tokens of a chunk with logprobs


@dataclass
class Slot:
    """One slot, empty unless `most_tokens` is positive."""

    generation: int = 0
    params: SamplingParams = DEFAULT_PARAMS  # of an empty slot
    most_tokens: int = 0  # a step; 0 while nothing can be emitted
    prefill_at: int | None = None  # next known token to run; None when none is left
    prefill_length: int = 0  # known tokens: the prompt's, after other weights the output's too
    prompt_length: int = 0
    num_emitted: int = 0  # tokens at the prompt's end that were emitted for the request elsewhere
    score_from: int | None = None  # positions whose rows are sent, from here on; None: no more
    grammar: Future[Matcher] | None = None  # where its text is in it; None: it has none
    verdict: int = 0  # PREEMPTED or RECOVERY_STOP until a message has said so, else 0

    @property
    def occupied(self) -> bool:
        return self.most_tokens > 0

    @property
    def next_unscored(self) -> int:
        """Positions of the next chunk that are run before the first whose row is sent."""
        return max((self.score_from or 0) - (self.prefill_at or 0), 0)

    @property
    def decoding(self) -> bool:
        """Whether the next step may emit tokens for it."""
        return self.occupied and self.prefill_at is None


def widths_of_slots(slots: Sequence[Slot], vocab_size: int) -> Widths:
    """The static limits of what these slots ask for."""
    return widths_of([slot.params for slot in slots], vocab_size)


def options_of_slots(slots: Sequence[Slot], widths: Widths) -> BatchOptions:
    """The options of these slots, on the device."""
    return options_of_requests(
        [slot.params for slot in slots],
        widths,
        generation=[slot.generation for slot in slots],
        verdict=[slot.verdict for slot in slots],
    )


class AllOptions(NamedTuple):
    """All options of a step; the same until a slot gets or loses a request."""

    options: BatchOptions
    changes: SlotChanges | None  # None where no slot changes the logits that choose


def all_options(
    slots: Sequence[Slot], widths: Widths, changes_size: ChangesSize | None
) -> AllOptions:
    """All options of these slots, on the device, in tables of the sizes of a program."""
    changes = None
    if changes_size is not None:
        changes = changes_of_requests(
            [slot.params for slot in slots],
            changes_size,
            prompt_lengths=[slot.prompt_length for slot in slots],
            num_emitted=[slot.num_emitted for slot in slots],
        )
    return AllOptions(options_of_slots(slots, widths), changes)


def target_bound(slots: Sequence[Slot]) -> int:
    """The most words of the next step's target message: its bucket is chosen by this."""
    tokens = [slot.most_tokens if slot.decoding else 0 for slot in slots]
    return _bound(slots, tokens, emitted=True)


def draft_bound(slots: Sequence[Slot]) -> int:
    """The most words of the next step's draft message."""
    tokens = [
        slot.most_tokens - 1 if slot.decoding and slot.params.draft_logprobs else 0
        for slot in slots
    ]
    return _bound(slots, tokens)


def prompt_bound(slots: Sequence[Slot], scoring: Slot, num_tokens: int) -> int:
    """The words of a prompt message with `num_tokens` tokens of one of these slots."""
    empty = _bound(slots[1:], [0] * (len(slots) - 1))
    return empty - wire.HEADER_WORDS + _bound([scoring], [num_tokens])


def for_prompt(slot: Slot) -> Slot:
    """The slot with what its prompt's rows have in place of what those of its tokens have."""
    return replace(slot, params=slot.params.of_prompt)


def prompt_extra_ids(slot: Slot, chunk: int, width: int) -> NDArray[np.int32]:
    """[chunk, width] the ids that the rows of the slot's next chunk name; -1 where there is none.

    The first one is that of the first position that is scored.
    """
    table = np.full((chunk, width), -1, np.int32)
    named = slot.params.prompt_extra_token_ids
    if named is None:
        table[:, : len(slot.params.extra_token_ids)] = slot.params.extra_token_ids
        return table
    # Their first row is that of the first position that the request wants.
    position = max(slot.prefill_at or 0, slot.score_from or 0)
    begin = position - max(slot.params.prompt_logprobs_start - 1, 0)
    rows = named.array[begin : begin + chunk]
    table[: len(rows), : named.width] = rows
    return table


def chunk_size(
    slot: Slot, config: LoopConfig, prefill_chunk: int, serves: Serves = EVERYTHING
) -> int:
    """Prompt tokens of the slot that run between two steps.

    A chunk with logprobs has as many as its message has room for in the ring of an engine that
    serves `serves`, which depends on the columns that the slot asks for; where that is less, a
    multiple of `CHUNK_STEP` if it can be.
    """
    if slot.score_from is None:
        return prefill_chunk
    sizes = (config.num_slots, config.num_positions, prefill_chunk)
    limits = serves.limits(config.model.vocab_size)
    empty = [Slot()] * config.num_slots
    scoring = for_prompt(slot)
    none = prompt_bound(empty, scoring, 0)
    bytes_per_row = prompt_bound(empty, scoring, 1) - none
    fitting = (wire.message_bound(*sizes, limits) - none) // bytes_per_row
    if fitting >= prefill_chunk:
        return prefill_chunk
    return fitting - fitting % CHUNK_STEP if fitting >= CHUNK_STEP else fitting


def _bound(slots: Sequence[Slot], tokens: Sequence[int], *, emitted: bool = False) -> int:
    return wire.words_bound(
        tokens,
        [slot.params.num_columns for slot in slots],
        [
            len(slot.params.extra_token_ids)
            + (wire.num_values(slot.params.row_values) if emitted else 0)
            for slot in slots
        ],
        [slot.params.most_kept if emitted else None for slot in slots],
    )


def admission(
    request: Request, max_length: int, num_drafts: int, draft_token_ids: Sequence[int] = ()
) -> Admission:
    """The device's view of a request; the engine looks for stop ids beyond `MAX_STOP_IDS`.

    Args:
      request: the request.
      max_length: T.
      num_drafts: D.
      draft_token_ids: handed over by a prefill node. Those that the slot cannot verify in its first
        step are left out: drafts only save steps.
    """
    params, prompt = request.params, request.prompt_token_ids
    tokens = np.zeros(max_length, np.int32)
    tokens[: len(prompt)] = prompt
    stop_ids = np.full(MAX_STOP_IDS, -1, np.int32)
    watched = params.stop_token_ids[:MAX_STOP_IDS]
    stop_ids[: len(watched)] = watched
    most = most_drafts(request, num_drafts)
    drafts = np.full(num_drafts, -1, np.int32)
    draft_ids = list(draft_token_ids[: min(most, max_length - len(prompt) - 1)])
    drafts[: len(draft_ids)] = draft_ids
    return Admission(
        tokens=tokens,
        length=np.array(len(prompt), np.int32),
        max_tokens=np.array(params.max_tokens, np.int32),
        max_drafts=np.array(most, np.int32),
        stop_ids=stop_ids,
        sampling=host_sampling([params]),
        draft_token_ids=drafts,
    )


def most_drafts(request: Request, num_drafts: int) -> int:
    """The most drafts of one step of a request: a step emits one token more."""
    return min(num_drafts, request.params.max_tokens - 1)
