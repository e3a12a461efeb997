"""A message from host values: the slow, obvious inverse of `decode`.

A worker packs on the device (`pack`). This function makes messages on the host, and tests compare
the packer with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from ipc import wire
from ipc.wire import LogprobsMode, SlotState
from jax_specdec.kept_sets import KeptSets
from jax_specdec.wording import pluralize


@dataclass(frozen=True, kw_only=True)
class SlotContents:
    """The values that one slot sends: n tokens, r of them with logprobs.

    Attributes, beside the fields of `ipc.wire.SLOT`:
      token_ids: [n].
      token_ranks: [r], empty where `columns` is 0.
      logprobs: [r, columns + num_chosen] float32, empty where `columns` is 0.
      topk_ids: [r, columns - 1], empty where `columns` is 0.
      kept: the kept sets of the emitted tokens; None where they were not asked for.
    """

    state: SlotState = SlotState.TOKENS
    generation: int = 0
    mode: LogprobsMode = LogprobsMode.RAW
    num_drafts: int = 0
    columns: int = 0
    num_chosen: int = 0
    token_ids: ArrayLike = field(default_factory=tuple)
    token_ranks: ArrayLike = field(default_factory=tuple)
    logprobs: ArrayLike = field(default_factory=tuple)
    topk_ids: ArrayLike = field(default_factory=tuple)
    kept: KeptSets | None = None


def encode(
    kind: int,
    step: int,
    slots: Sequence[SlotContents],
    *,
    max_num_logprobs: int | None = None,
    running: bool = True,
    draft_follows: bool = False,
    process_rank: int = 0,
    weights_version: int = 0,
    digest: int = 0,
) -> bytes:
    """The bytes of one message; `max_num_logprobs` defaults to the largest K of the slots.

    Raises:
      WireError: a value does not fit its field (the error names it and its limit), or a slot's
        arrays do not have the sizes that its counts promise.
    """
    if max_num_logprobs is None:
        max_num_logprobs = max((slot.columns - 1 for slot in slots), default=0)
        max_num_logprobs = max(max_num_logprobs, 0)
    slot_words, parts = [], ([], [], [], [], [], [], [])  # type: ignore[var-annotated]
    for slot in slots:
        ids, ranks = _int32(slot.token_ids), _int32(slot.token_ranks)
        logprobs = np.asarray(slot.logprobs, np.float32).reshape(-1)
        topk_ids = _int32(slot.topk_ids)
        rows, k = ranks.size, max(slot.columns - 1, 0)
        width = slot.columns + slot.num_chosen if slot.columns else 0
        if (logprobs.size, topk_ids.size) != (rows * width, rows * k):
            raise wire.WireError(
                f"{pluralize(rows, 'row')} of {pluralize(slot.columns, 'column')} and "
                f"{pluralize(slot.num_chosen, 'chosen id')} need "
                f"{pluralize(rows * width, 'logprob')} and {pluralize(rows * k, 'top-K id')}; "
                f"there are {logprobs.size} and {topk_ids.size}"
            )
        values = {
            "state": slot.state,
            "mode": slot.mode,
            "kept": slot.kept is not None,
            "columns": slot.columns,
            "num_tokens": ids.size,
            "num_rows": rows,
            "num_drafts": slot.num_drafts,
            "num_chosen": slot.num_chosen,
            "generation": slot.generation,
        }
        slot_words.append(_words(wire.SLOT, wire.SLOT_WORDS, values))
        arrays = (ids, ranks, logprobs, topk_ids, *_kept(slot, ids.size))
        for part, array in zip(parts, arrays, strict=True):
            part.append(array.view(np.uint32))
    body = [*slot_words, *(array for part in parts for array in part)]
    header = {
        "version": wire.VERSION,
        "magic": wire.MAGIC,
        "kind": int(kind),
        "max_num_logprobs": max_num_logprobs,
        "running": running,
        "draft_follows": draft_follows,
        "error": 0,
        "error_checks": 0,
        "digest": digest,
        "num_slots": len(slots),
        "num_words": wire.HEADER_WORDS + sum(array.size for array in body),
        "step_low": step & 0xFFFFFFFF,
        "step_high": step >> 32,
        "process_rank": process_rank,
        "weights_version": weights_version,
    }
    return np.concatenate([_words(wire.HEADER, wire.HEADER_WORDS, header), *body]).tobytes()


def _kept(slot: SlotContents, num_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The counts, masses and ids of a slot's kept sets."""
    kept = KeptSets.none() if slot.kept is None else slot.kept
    rows = int(wire.kept_rows(np, slot.state, num_tokens, slot.kept is not None))
    if len(kept) != rows:
        raise wire.WireError(
            f"{pluralize(num_tokens, 'token')} in state {slot.state} have "
            f"{pluralize(rows, 'kept set')}; there are {len(kept)}"
        )
    return _int32(kept.counts), np.asarray(kept.log_kept, np.float32), _int32(kept.token_ids)


def _words(fields: dict[str, wire.Field], count: int, values: dict[str, int]) -> np.ndarray:
    checked = {
        name: np.uint32(wire.fits(name, int(value), fields[name])) for name, value in values.items()
    }
    return np.asarray(wire.words_of(np, fields, count, checked), np.uint32)


def _int32(values: ArrayLike) -> np.ndarray:
    return np.asarray(values, np.int32).reshape(-1)
