"""A message from host values: the slow, obvious inverse of `decode`.

A worker packs on the device (`pack`). This function makes messages on the host, and tests compare
the packer with it.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from ipc import wire
from ipc.wire import LogprobsMode, SlotState
from jax_specdec.kept_sets import KeptSets

_PARTS = np.int32, np.int32, np.float32, np.int32, np.int32, np.float32, np.int32  # of a slot


@dataclass(frozen=True, kw_only=True)
class SlotContents:
    """The values that one slot sends: n tokens, r of them with logprobs.

    Attributes, beside the fields of `ipc.wire.SLOT`:
      token_ids: [n].
      token_ranks: [r], empty where `columns` is 0.
      logprobs: [r, columns + num_chosen + values of the row] float32; [0] where `columns` is 0.
      topk_ids: [r, columns - 1], empty where `columns` is 0.
      kept: the kept sets of the emitted tokens; None where they were not asked for.
    """

    state: SlotState = SlotState.TOKENS
    generation: int = 0
    mode: LogprobsMode = LogprobsMode.RAW
    num_drafts: int = 0
    columns: int = 0
    values: int = 0
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

    Sizes are those of the arrays: `decode` refuses a message whose counts contradict one another.

    Raises:
      WireError: a value does not fit its field; the error names it and its limit.
    """
    if max_num_logprobs is None:
        max_num_logprobs = max([1, *(slot.columns for slot in slots)]) - 1
    slot_words = []
    parts: list[list[np.ndarray]] = [[] for _ in _PARTS]
    for slot in slots:
        kept = KeptSets.none() if slot.kept is None else slot.kept
        arrays: list[ArrayLike] = [slot.token_ids, slot.token_ranks, slot.logprobs, slot.topk_ids]
        arrays += [kept.counts, kept.log_kept, kept.token_ids]
        for part, values, dtype in zip(parts, arrays, _PARTS, strict=True):
            part.append(np.asarray(values, dtype).reshape(-1).view(np.uint32))
        fields = {name: getattr(slot, name) for name in wire.SLOT if hasattr(slot, name)}
        fields |= {"num_tokens": parts[0][-1].size, "num_rows": parts[1][-1].size}
        fields["kept"] = slot.kept is not None
        slot_words.append(_words(wire.SLOT, wire.SLOT_WORDS, fields))
    body = [*slot_words, *itertools.chain(*parts)]
    header = {
        "version": wire.VERSION,
        "magic": wire.MAGIC,
        "kind": kind,
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


def _words(fields: dict[str, wire.Field], count: int, values: dict[str, int]) -> np.ndarray:
    checked = {
        name: np.uint32(wire.fits(name, int(value), fields[name])) for name, value in values.items()
    }
    return np.asarray(wire.words_of(np, fields, count, checked), np.uint32)
