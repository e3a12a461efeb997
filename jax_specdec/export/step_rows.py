"""Columns of whole steps as Arrow, one row a request; no record is touched alone.

`ColumnBuilder` keeps the records of many requests until they have ended. Here each call makes a
batch of what some steps brought, and forgets it: for who passes records on as they come.
"""

from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jax_specdec.export.arrow import pyarrow
from jax_specdec.export.prompt_columns import PromptColumns
from jax_specdec.export.runs import cells, offsets, sorted_lists, within
from jax_specdec.export.token_columns import KINDS, NOT_ASKED
from jax_specdec.kept_sets import KeptSets
from jax_specdec.records.batch import RecordBatch
from jax_specdec.records.decode import Message
from jax_specdec.records.record import Record

ACCEPTED, PLAIN = KINDS.index("accepted"), KINDS.index("plain")
RECOVERED, BONUS = KINDS.index("recovered"), KINDS.index("bonus")
Parts = dict[str, list[NDArray[Any]]]
# Records with tokens, their message, the rows [N] of their requests, and how many tokens they have.
Spoken = tuple[RecordBatch, Message, NDArray[np.int64], int]


def step_rows(batches: Iterable[RecordBatch], emitted: MutableMapping[str, int]) -> Any:
    """A `pyarrow.RecordBatch` of the records of some steps, one row a request that has any.

    Columns of a row: `request_id`; `position` int64, the place of its first token here in its
    sequence; `finish_reason` int8 `FinishReason`, 0 where it goes on; `cumulative_logprob` float64.
    Lists of a value for each token, in order: `step` int64, `weights_version` uint32, `token_id`
    int32, `kind` int8. Where some request asked for logprobs also `logprob` float32 and
    `token_rank` int32, the lists of lists `topk_ids`, `topk_logprobs`, and what else was asked for:
    `chosen_*`, `draft_*`, `kept_*`. There are no nulls: values are those of `TokenColumns`.

    Where some request's prompt has logprobs here, also: `prompt_start` int64, the place of the
    first such token in the prompt, 0 where there is none; a list of one value for each such token,
    `prompt_weights_version` uint32 and `prompt_token_ranks` int32; and the lists of lists
    `prompt_logprobs` float32, of the token itself, then of the top K, then of the chosen ids, and
    `prompt_topk_ids` int32, -1 where fewer than K are finite. They are those of `PromptRows`.

    Args:
      batches: of any number of workers, those of one in order.
      emitted: for each request that has no end yet, how many of its tokens came before, prompt not
        counted; kept up to date. One that is not there begins.
    """
    taken = [batch for batch in batches if len(batch)]
    rows: dict[str, int] = {}
    prompts: list[int] = []
    parts: Parts = {name: [] for name in ("row", "step", "weights_version", "token_id", "kind")}
    tables: dict[int, NDArray[np.int64]] = {}
    places = [_rows_of(batch, rows, prompts, tables) for batch in taken]
    reasons = np.zeros(len(rows), np.int8)
    sums = np.zeros(len(rows), np.float64)
    of_prompts = PromptColumns()
    spoken: list[Spoken] = []
    for batch, row in zip(taken, places, strict=True):
        if batch.finish_reason.any():
            ends = batch.finish_reason > 0
            reasons[row[ends]] = batch.finish_reason[ends]
        sums[row] = batch.cumulative_logprob
        of_prompts.add(batch, row)
        if batch.message is not None and (total := int(batch.num_tokens.sum())):
            spoken.append((batch, batch.message, row, total))
    if spoken:
        _add_tokens(parts, spoken)
        if any(message.columns.any() for _, message, _, _ in spoken) and not _add_table(
            parts, spoken
        ):
            for batch, message, _, total in spoken:
                _add_logprobs(parts, batch, message, total)
        if any(batch.joined is not None and batch.joined.any() for batch, _, _, _ in spoken):
            for batch, _, _, _ in spoken:
                _add_drafts(parts, batch)
    sets = None
    if any(message.kept.any() for _, message, _, _ in spoken):
        sets = [_kept(batch, message) for batch, message, _, _ in spoken]
    table = _table(rows, prompts, emitted, reasons, sums, parts, sets)
    for name, values in of_prompts.columns(len(rows)).items():
        table = table.append_column(name, values)
    return table


def _rows_of(
    batch: RecordBatch,
    rows: dict[str, int],
    prompts: list[int],
    tables: dict[int, NDArray[np.int64]],
) -> NDArray[np.int64]:
    """[N] int64, the row of each record's request; new requests get further rows.

    Args:
      tables: [B] the rows of some steps' slots, -1 where unknown, by their tuple of requests:
        it is another one only where a slot was given or freed.
    """
    table = tables.get(id(batch.requests))
    if table is None:
        table = tables[id(batch.requests)] = np.full(len(batch.requests), -1, np.int64)
    found = table[batch.slots]
    if int(found.min()) >= 0:
        return found
    slots = batch.slots[found < 0]
    # A record exists only for an occupied slot.
    requests = [one for slot in slots.tolist() if (one := batch.requests[slot]) is not None]
    table[slots] = [rows.setdefault(request.id, len(rows)) for request in requests]
    begun = [request for request in requests if rows[request.id] >= len(prompts)]
    prompts += [len(request.packed_prompt) // 4 for request in begun]
    return table[batch.slots]


def _add_tokens(parts: Parts, spoken: Sequence[Spoken]) -> None:
    """Add the tokens of all steps at once: a step alone is too small for NumPy to be quick."""
    counts = np.concatenate([batch.num_tokens for batch, _, _, _ in spoken])
    accepted = np.concatenate([batch.num_accepted for batch, _, _, _ in spoken])
    drafts = np.concatenate([batch.num_drafts for batch, _, _, _ in spoken])
    totals = np.array([total for _, _, _, total in spoken])
    versions = [message.weights_version for _, message, _, _ in spoken]
    parts["row"].append(np.concatenate([row for _, _, row, _ in spoken]).repeat(counts))
    parts["step"].append(np.array([b.step for b, _, _, _ in spoken], np.int64).repeat(totals))
    parts["weights_version"].append(np.array(versions, np.uint32).repeat(totals))
    last = np.where(accepted < drafts, RECOVERED, np.where(drafts > 0, BONUS, PLAIN))
    kinds = np.where(within(counts) < accepted.repeat(counts), ACCEPTED, last.repeat(counts))
    parts["kind"].append(kinds.astype(np.int8))
    for batch, message, _, total in spoken:
        ids = message.token_ids
        if total < len(ids):  # not all of them, slot after slot
            starts = message.token_start[batch.slots].repeat(batch.num_tokens)
            ids = ids[starts + within(batch.num_tokens)]
        parts["token_id"].append(ids)


def _add_table(parts: Parts, spoken: Sequence[Spoken]) -> bool:
    """Add logprobs where all tokens of all steps have rows of one width; whether they have."""
    if not all(
        total == len(message.token_ids) == len(message.token_ranks)
        for _, message, _, total in spoken
    ):
        return False
    requests = {id(batch.requests): batch.requests for batch, _, _, _ in spoken}
    asked = [one.params for each in requests.values() for one in each if one is not None]
    widths = {params.num_columns for params in asked}
    if len(widths) > 1 or any(params.extra_token_ids for params in asked):
        return False
    ids = np.concatenate([message.topk_ids for _, message, _, _ in spoken])
    if ids.size and int(ids.min()) < 0:  # fewer than K are finite
        return False
    (width,) = widths
    rows = np.concatenate([message.logprobs for _, message, _, _ in spoken]).reshape(-1, width)
    sizes = np.full(len(rows), width - 1)
    _put(parts, "logprob", rows[:, 0])
    _put(parts, "token_rank", np.concatenate([message.token_ranks for _, message, _, _ in spoken]))
    _put_list(parts, "topk", sizes, ids, rows[:, 1:].reshape(-1))
    return True


def _add_logprobs(parts: Parts, batch: RecordBatch, message: Message, total: int) -> None:
    slots, counts = batch.slots, batch.num_tokens
    columns = message.columns[slots]
    asked = columns > 0
    place = within(counts)
    has = asked.repeat(counts)
    logprob = np.full(total, np.nan, np.float32)
    rank = np.full(total, NOT_ASKED, np.int32)
    widths = (columns + message.num_chosen[slots]).repeat(counts)[has]
    begin = message.logprob_start[slots].repeat(counts)[has] + place[has] * widths
    logprob[has] = message.logprobs[begin]
    rank[has] = message.token_ranks[message.row_start[slots].repeat(counts)[has] + place[has]]
    _put(parts, "logprob", logprob)
    _put(parts, "token_rank", rank)
    k = np.maximum(columns - 1, 0).repeat(counts)
    chosen = np.where(asked, message.num_chosen[slots], 0).repeat(counts)
    tops = message.topk_start[slots].repeat(counts) + place * k
    first = np.zeros(total, np.int64)
    first[has] = begin
    ids = message.topk_ids[cells(tops, k)]
    values = message.logprobs[cells(first + 1, k)]
    if ids.size and int(ids.min()) < 0:  # fewer than K are finite
        there = ids >= 0
        k = np.bincount(np.arange(total).repeat(k)[there], minlength=total)
        ids, values = ids[there], values[there]
    _put_list(parts, "topk", k, ids, values)
    values = message.logprobs[cells(first + columns.repeat(counts), chosen)]
    named = [
        np.tile(np.array(_params(batch, slot).extra_token_ids, np.int32), n)
        for slot, n in zip(slots.tolist(), counts.tolist(), strict=True)
    ] if chosen.any() else []  # fmt: skip
    ids = np.concatenate(named) if named else _NO_IDS
    _put_list(parts, "chosen", chosen, ids, values)


def _add_drafts(parts: Parts, batch: RecordBatch) -> None:
    """Draft j was proposed for the position of emitted token j; only few requests ask for them."""
    counts = batch.num_tokens
    total = int(counts.sum())
    drafted = np.full(total, -1, np.int32)
    logprobs = np.full(total, np.nan, np.float32)
    ranks = np.full(total, NOT_ASKED, np.int32)
    sizes = np.zeros(total, np.int64)
    chosen: list[tuple[NDArray[Any], NDArray[Any]]] = []
    joined = () if batch.joined is None else np.flatnonzero(batch.joined).tolist()
    ends = counts.cumsum()
    for index in joined:
        draft = Record(batch, index).draft
        n = int(counts[index])
        if draft is None or draft.logprobs is None:
            continue
        begin = int(ends[index]) - n
        m = min(n, len(draft.token_ids))
        drafted[begin : begin + m] = draft.token_ids[:m]
        logprobs[begin : begin + m] = draft.logprobs[:m, 0]
        assert draft.token_ranks is not None
        ranks[begin : begin + m] = draft.token_ranks[:m]
        extra = _params(batch, int(batch.slots[index])).extra_token_ids
        if extra and draft.chosen_logprobs is not None:
            sizes[begin : begin + m] = len(extra)
            chosen.append(
                (np.tile(np.array(extra, np.int32), m), draft.chosen_logprobs[:m].ravel())
            )
    _put(parts, "draft_token_id", drafted)
    _put(parts, "draft_logprob", logprobs)
    _put(parts, "draft_token_rank", ranks)
    none = (_NO_IDS, _NO_LOGPROBS)
    ids, values = zip(*(chosen or [none]), strict=True)
    _put_list(parts, "draft_chosen", sizes, np.concatenate(ids), np.concatenate(values))


def _kept(batch: RecordBatch, message: Message) -> KeptSets:
    slots, counts = batch.slots, batch.num_tokens
    has = message.kept[slots].astype(np.bool_).repeat(counts)
    rows = (message.kept_start[slots].repeat(counts) + within(counts))[has]
    sets = message.kept_sets.take(rows)
    sizes = np.zeros(len(has), np.int32)
    masses = np.zeros(len(has), np.float32)
    sizes[has], masses[has] = sets.counts, sets.log_kept
    return KeptSets.of(sizes, masses, sets.token_ids)


def _table(
    rows: dict[str, int],
    prompts: Sequence[int],
    emitted: MutableMapping[str, int],
    reasons: NDArray[np.int8],
    sums: NDArray[np.float64],
    parts: Parts,
    sets: Sequence[KeptSets] | None,
) -> Any:
    pa = pyarrow()
    joined = {
        name: found[0] if len(found) == 1 else np.concatenate(found)
        for name, found in parts.items()
        if found
    }
    of_row = joined.pop("row", np.empty(0, np.int64))
    counts = np.bincount(of_row, minlength=len(rows))
    order = None
    if (of_row[1:] < of_row[:-1]).any():
        # Of 16 bits, NumPy's stable sort is a radix sort.
        small = of_row.astype(np.uint16) if len(rows) < 1 << 16 else of_row
        order = small.argsort(kind="stable")
    before = np.array([emitted.get(name, 0) for name in rows], np.int64)
    positions = np.array(prompts, np.int64) + before
    emitted.update(zip(rows, (before + counts).tolist(), strict=True))
    if reasons.any():
        names = list(rows)
        for row in np.flatnonzero(reasons).tolist():
            emitted.pop(names[row], None)
    outer = offsets(counts)
    columns: dict[str, Any] = {
        "request_id": pa.array(list(rows), pa.string()),
        "position": positions,
        "finish_reason": reasons,
        "cumulative_logprob": sums,
    }
    kinds = {"step": np.int64, "weights_version": np.uint32, "token_id": np.int32, "kind": np.int8}
    for name, kind in kinds.items():
        joined.setdefault(name, np.empty(0, kind))

    def whole(name: str, values: Any) -> None:
        columns[name] = pa.ListArray.from_arrays(pa.array(outer), values)

    for name, values in joined.items():
        if "." not in name:
            whole(name, pa.array(values if order is None else values[order]))
    for name in ("topk", "chosen", "draft_chosen"):
        sizes = joined.get(f"{name}.counts")
        if sizes is None or not sizes.any():
            continue
        takes, sizes = sorted_lists(sizes, order)
        inner = pa.array(offsets(sizes))
        for what in ("ids", "logprobs"):
            values = takes(joined[f"{name}.{what}"])
            whole(f"{name}_{what}", pa.ListArray.from_arrays(inner, pa.array(values)))
    if sets is not None and len(of_row):
        joint = KeptSets.joined(sets)
        joint = joint if order is None else joint.take(order)
        whole("kept_count", pa.array(joint.counts))
        whole("log_kept", pa.array(joint.log_kept))
        inner = pa.array(joint.offsets.astype(np.int32))
        whole("kept_ids", pa.ListArray.from_arrays(inner, pa.array(joint.token_ids)))
    return pa.RecordBatch.from_arrays(
        [one if isinstance(one, pa.Array) else pa.array(one) for one in columns.values()],
        names=list(columns),
    )


def _params(batch: RecordBatch, slot: int) -> Any:
    request = batch.requests[slot]
    assert request is not None
    return request.params


def _put(parts: Parts, name: str, values: NDArray[Any]) -> None:
    parts.setdefault(name, []).append(values)


def _put_list(
    parts: Parts, name: str, counts: NDArray[Any], ids: NDArray[Any], logprobs: NDArray[Any]
) -> None:
    _put(parts, f"{name}.counts", counts)
    _put(parts, f"{name}.ids", ids)
    _put(parts, f"{name}.logprobs", logprobs)


_NO_IDS: NDArray[np.int32] = np.empty(0, np.int32)
_NO_LOGPROBS: NDArray[np.float32] = np.empty(0, np.float32)
