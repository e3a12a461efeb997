"""Columns of whole steps as Arrow, one row a request; no record is touched alone. No jax.

`ColumnBuilder` keeps the records of many requests until they have ended. Here each call makes a
batch of what some steps brought, and forgets it: for who passes records on as they come.
"""

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jax_specdec.export.arrow import pyarrow
from jax_specdec.export.prompt_columns import PromptColumns
from jax_specdec.export.token_columns import KINDS, NOT_ASKED
from jax_specdec.kept_sets import KeptSets
from jax_specdec.records.batch import RecordBatch
from jax_specdec.records.decode import Message
from jax_specdec.records.record import Record

ACCEPTED, PLAIN = KINDS.index("accepted"), KINDS.index("plain")
RECOVERED, BONUS = KINDS.index("recovered"), KINDS.index("bonus")
Parts = dict[str, list[NDArray[Any]]]


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
    ranked = any(_asks(batch.message) for batch in taken)
    drafted = any(batch.joined is not None and batch.joined.any() for batch in taken)
    kept = any(b.message is not None and b.message.kept.any() for b in taken)
    sets: list[KeptSets] = []
    of_prompts = PromptColumns()
    for batch, row in zip(taken, places, strict=True):
        ends = batch.finish_reason > 0
        reasons[row[ends]] = batch.finish_reason[ends]
        sums[row] = batch.cumulative_logprob
        of_prompts.add(batch, row)
        if batch.message is None or not batch.num_tokens.any():
            continue
        _add_tokens(parts, batch, batch.message, row)
        if ranked:
            _add_logprobs(parts, batch, batch.message)
        if drafted:
            _add_drafts(parts, batch)
        if kept:
            sets.append(_kept(batch, batch.message))
    table = _table(rows, prompts, emitted, reasons, sums, parts, sets if kept else None)
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
    for slot in batch.slots[found < 0].tolist():
        request = batch.requests[slot]
        assert request is not None  # a record exists only for an occupied slot
        table[slot] = row = rows.setdefault(request.id, len(rows))
        if row == len(prompts):
            prompts.append(len(request.packed_prompt) // 4)
    return table[batch.slots]


def _asks(message: Message | None) -> bool:
    return message is not None and bool(message.columns.any())


def _add_tokens(parts: Parts, batch: RecordBatch, message: Message, row: NDArray[np.int64]) -> None:
    counts = batch.num_tokens
    total = int(counts.sum())
    within = _within(counts)
    parts["row"].append(row.repeat(counts))
    parts["step"].append(np.full(total, batch.step, np.int64))
    parts["weights_version"].append(np.full(total, message.weights_version, np.uint32))
    if total == len(message.token_ids):  # all of them, slot after slot
        parts["token_id"].append(message.token_ids)
    else:
        starts = message.token_start[batch.slots].repeat(counts)
        parts["token_id"].append(message.token_ids[starts + within])
    accepted, drafts = batch.num_accepted, batch.num_drafts
    last = np.where(accepted < drafts, RECOVERED, np.where(drafts > 0, BONUS, PLAIN))
    kinds = np.where(within < accepted.repeat(counts), ACCEPTED, last.repeat(counts))
    parts["kind"].append(kinds.astype(np.int8))


def _add_logprobs(parts: Parts, batch: RecordBatch, message: Message) -> None:
    slots, counts = batch.slots, batch.num_tokens
    columns = message.columns[slots]
    total = int(counts.sum())
    if total == len(message.token_ids) == len(message.token_ranks) and not message.num_chosen.any():
        width = int(columns[0])
        if (columns == width).all():  # a table of equal rows
            rows = message.logprobs.reshape(total, width)
            sizes = np.full(total, width - 1)
            if width == 1 or int(message.topk_ids.min()) >= 0:
                _put(parts, "logprob", rows[:, 0])
                _put(parts, "token_rank", message.token_ranks)
                _put_list(parts, "topk", sizes, message.topk_ids, rows[:, 1:].reshape(-1))
                _put_list(parts, "chosen", np.zeros_like(sizes), _NO_IDS, _NO_LOGPROBS)
                return
    asked = columns > 0
    within = _within(counts)
    has = asked.repeat(counts)
    logprob = np.full(total, np.nan, np.float32)
    rank = np.full(total, NOT_ASKED, np.int32)
    widths = (columns + message.num_chosen[slots]).repeat(counts)[has]
    begin = message.logprob_start[slots].repeat(counts)[has] + within[has] * widths
    logprob[has] = message.logprobs[begin]
    rank[has] = message.token_ranks[message.row_start[slots].repeat(counts)[has] + within[has]]
    _put(parts, "logprob", logprob)
    _put(parts, "token_rank", rank)
    k = np.maximum(columns - 1, 0).repeat(counts)
    chosen = np.where(asked, message.num_chosen[slots], 0).repeat(counts)
    tops = message.topk_start[slots].repeat(counts) + within * k
    first = np.zeros(total, np.int64)
    first[has] = begin
    ids = message.topk_ids[_cells(tops, k)]
    values = message.logprobs[_cells(first + 1, k)]
    if ids.size and int(ids.min()) < 0:  # fewer than K are finite
        there = ids >= 0
        k = np.bincount(np.arange(total).repeat(k)[there], minlength=total)
        ids, values = ids[there], values[there]
    _put_list(parts, "topk", k, ids, values)
    values = message.logprobs[_cells(first + columns.repeat(counts), chosen)]
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
    rows = (message.kept_start[slots].repeat(counts) + _within(counts))[has]
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
    joined = {name: np.concatenate(found) for name, found in parts.items() if found}
    of_row = joined.pop("row", np.empty(0, np.int64))
    counts = np.bincount(of_row, minlength=len(rows))
    order = None
    if (of_row[1:] < of_row[:-1]).any():
        # Of 16 bits, NumPy's stable sort is a radix sort.
        small = of_row.astype(np.uint16) if len(rows) < 1 << 16 else of_row
        order = small.argsort(kind="stable")
    positions = np.empty(len(rows), np.int64)
    for name, row in rows.items():
        before = emitted.get(name, 0)
        positions[row] = prompts[row] + before
        emitted[name] = before + int(counts[row])
    if reasons.any():
        names = list(rows)
        for row in np.flatnonzero(reasons).tolist():
            emitted.pop(names[row], None)
    outer = _offsets(counts)
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
        takes, sizes = _sorted_lists(sizes, order)
        inner = pa.array(_offsets(sizes))
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


def _within(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, .. of each of the runs that `counts` [N] long, one after the other."""
    ends = counts.cumsum()
    return np.arange(int(ends[-1]) if ends.size else 0) - (ends - counts).repeat(counts)


def _cells(starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """The places of runs of `sizes` [N] from `starts` [N] on, one after the other."""
    return _within(sizes) + starts.repeat(sizes)


def _sorted_lists(
    sizes: NDArray[np.int64], order: NDArray[np.int64] | None
) -> tuple[Callable[[NDArray[Any]], NDArray[Any]], NDArray[np.int64]]:
    """What puts lists of `sizes` [N] into another order, and their sizes there."""
    if order is None:
        return lambda values: values, sizes
    size = int(sizes[0])
    if (sizes == size).all():
        return lambda values: values.reshape(-1, size)[order].reshape(-1), sizes
    ends = sizes.cumsum()
    cells = _cells((ends - sizes)[order], sizes[order])
    return lambda values: values[cells], sizes[order]


def _offsets(counts: NDArray[Any]) -> NDArray[np.int32]:
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    return offsets


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
