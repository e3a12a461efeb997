"""Tokens of whole steps as columns of NumPy; no record is touched alone.

`step_rows.py` makes Arrow of them as they come, `column_builder.py` collects them.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ipc import wire
from ipc.field_docs import with_field_docs
from jax_specdec.export.token_columns import NO_RANK, TOKEN_KINDS
from jax_specdec.kept_sets import KeptSets, cells, offsets_of, places_within
from jax_specdec.records.batch import RecordBatch
from jax_specdec.records.decode import Message
from jax_specdec.records.record import Record, digests_of
from jax_specdec.requests import DIGEST_BITS, ROW_VALUES, Request

ACCEPTED, PLAIN = TOKEN_KINDS.index("accepted"), TOKEN_KINDS.index("plain")
RECOVERED, BONUS = TOKEN_KINDS.index("recovered"), TOKEN_KINDS.index("bonus")
Parts = dict[str, list[NDArray[Any]]]
Spoken = tuple[RecordBatch, Message, int]  # records, their message, and how many tokens they have


@with_field_docs
class TokenParts(NamedTuple):
    """N tokens of the records of some steps, and Q requests, each of which has a row.

    Attributes:
      requests: [Q] in the order of their rows.
      places: [R] int64, the rows of all records, batch after batch.
      reasons: [Q] int8 `FinishReason`, 0 where the request goes on.
      row: [N] int64, each token's.
      columns: those of `TokenColumns` that some request asked for, [N] each; a list NAME as
        NAME.counts [N], NAME.ids and NAME.logprobs.
      kept: the tokens' kept sets; None where no request asked for them.
    """

    requests: list[Request]
    places: NDArray[np.int64]
    reasons: NDArray[np.int8]
    row: NDArray[np.int64]
    columns: dict[str, NDArray[Any]]
    kept: KeptSets | None


def token_parts(batches: Sequence[RecordBatch]) -> TokenParts:
    """The columns of some steps' records; batches of one worker in order, none is empty."""
    if not batches:
        return TokenParts([], _NO_ROWS, np.zeros(0, np.int8), _NO_ROWS, dict(_ALWAYS), None)
    requests, places = _rows_of(batches)
    reasons, ends = np.zeros(len(requests), np.int8), _joined(batches, "finish_reason")
    if np.count_nonzero(ends):
        reasons[places[ends > 0]] = ends[ends > 0]
    counts = _joined(batches, "num_tokens")
    lengths = np.array([len(batch) for batch in batches])
    sizes = np.add.reduceat(counts, offsets_of(lengths)[:-1])
    spoken = [
        (batch, batch.message, total)
        for batch, total in zip(batches, sizes.tolist(), strict=True)
        if batch.message is not None and total
    ]
    parts: Parts = {}
    kept = None
    if spoken:
        _add_tokens(parts, batches, counts, sizes, spoken)
        has_rows = any(message.row_columns != 0 for _, message, _ in spoken)
        if has_rows and not _add_table(parts, spoken):
            for batch, message, total in spoken:
                _add_logprobs(parts, batch, message, total)
        if any(batch.joined is not None and batch.joined.any() for batch, _, _ in spoken):
            for batch, _, _ in spoken:
                _add_drafts(parts, batch)
        if np.concatenate([message.kept for _, message, _ in spoken]).any():
            kept = KeptSets.joined([_kept(batch, message) for batch, message, _ in spoken])
    columns = {
        name: pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        for name, pieces in parts.items()
    }
    return TokenParts(
        requests, places, reasons, places.repeat(counts), {**_ALWAYS, **columns}, kept
    )


def _joined(batches: Sequence[RecordBatch], name: str) -> NDArray[Any]:
    """A column of all records: steps alone are too small for NumPy to be quick."""
    return np.concatenate([getattr(batch, name) for batch in batches])


def _rows_of(batches: Sequence[RecordBatch]) -> tuple[list[Request], NDArray[np.int64]]:
    """[Q] the requests, and [R] int64 the row of each record's; steps of one worker in order."""
    if len(batches) == 1:  # with one record at most of each slot, which has a request
        of_slots = map(batches[0].requests.__getitem__, batches[0].slots.tolist())
        by_id = {request.id: request for request in of_slots if request is not None}
        if len(by_id) == len(batches[0]):
            return list(by_id.values()), np.arange(len(batches[0]))
    # Of a worker it is another tuple only where a slot was given or freed.
    tuples = {id(batch.requests): batch.requests for batch in batches}
    starts = offsets_of(np.array([len(slot_tuple) for slot_tuple in tuples.values()]))
    start = dict(zip(tuples, starts.tolist(), strict=False))
    of_batch = np.array([start[id(batch.requests)] for batch in batches])
    places = _joined(batches, "slots") + of_batch.repeat([len(batch) for batch in batches])
    table = np.full(int(starts[-1]), -1, np.int64)
    table[places] = 0
    seen = np.flatnonzero(table == 0)
    slots = list(itertools.chain.from_iterable(tuples.values()))
    seen_slots = [slots[place] for place in seen.tolist()]
    requests = {request.id: request for request in seen_slots if request is not None}
    if len(requests) == len(seen_slots):
        table[seen] = np.arange(len(seen_slots))
    else:  # a request was in several slots
        rows = {name: row for row, name in enumerate(requests)}
        table[seen] = [rows[request.id] for request in seen_slots if request is not None]
    return list(requests.values()), table[places]


def _add_tokens(
    parts: Parts,
    batches: Sequence[RecordBatch],
    counts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    spoken: Sequence[Spoken],
) -> None:
    """Add the tokens of all steps; `counts` [R] are the records', `sizes` the batches'."""
    accepted, drafts = _joined(batches, "num_accepted"), _joined(batches, "num_drafts")
    versions = [0 if b.message is None else b.message.weights_version for b in batches]
    _put(parts, "step", np.array([batch.step for batch in batches], np.int64).repeat(sizes))
    _put(parts, "weights_version", np.array(versions, np.uint32).repeat(sizes))
    _put(parts, "digest", np.array([batch.digest for batch in batches], np.uint16).repeat(sizes))
    # The token behind the accepted drafts is the last one, where no stop has cut it.
    has_last, ends = counts > accepted, counts.cumsum()
    last = np.where(accepted < drafts, RECOVERED, np.where(drafts > 0, BONUS, PLAIN))
    kinds = np.full(int(ends[-1]), ACCEPTED, np.int8)
    kinds[ends[has_last] - 1] = last[has_last]
    _put(parts, "kind", kinds)
    for batch, message, total in spoken:
        ids = message.token_ids
        if total < len(ids):  # not all of them, slot after slot
            starts = message.token_start[batch.slots].repeat(batch.num_tokens)
            ids = ids[starts + places_within(batch.num_tokens)]
        _put(parts, "token_id", ids)


def _add_table(parts: Parts, spoken: Sequence[Spoken]) -> bool:
    """Add logprobs where all tokens of all steps have rows of one width; whether they have."""
    if not all(
        total == len(message.token_ids) == len(message.token_ranks) for _, message, total in spoken
    ):
        return False
    widths = {message.row_columns for _, message, _ in spoken}
    if len(widths) > 1 or None in widths:
        return False
    ids = np.concatenate([message.topk_ids for _, message, _ in spoken])
    if ids.size and int(ids.min()) < 0:  # fewer than K are finite
        return False
    width = widths.pop() or 0
    rows = [message.logprobs.reshape(-1, width) for _, message, _ in spoken]
    logprobs = np.concatenate([block[:, 0] for block in rows])
    sizes = np.full(len(logprobs), width - 1)
    _put(parts, "logprob", logprobs)
    _put(parts, "token_rank", np.concatenate([message.token_ranks for _, message, _ in spoken]))
    _put_list(
        parts, "topk", sizes, ids, np.concatenate([block[:, 1:] for block in rows]).reshape(-1)
    )
    return True


def _add_logprobs(parts: Parts, batch: RecordBatch, message: Message, total: int) -> None:
    slots, counts = batch.slots, batch.num_tokens
    columns = message.columns[slots]
    has_rows = columns > 0
    place = places_within(counts)
    has = has_rows.repeat(counts)
    logprob = np.full(total, np.nan, np.float32)
    rank = np.full(total, NO_RANK, np.int32)
    widths = (columns + message.num_more[slots]).repeat(counts)[has]
    begin = message.logprob_start[slots].repeat(counts)[has] + place[has] * widths
    logprob[has] = message.logprobs[begin]
    rank[has] = message.token_ranks[message.row_start[slots].repeat(counts)[has] + place[has]]
    _put(parts, "logprob", logprob)
    _put(parts, "token_rank", rank)
    k = np.maximum(columns - 1, 0).repeat(counts)
    chosen = np.where(has_rows, message.num_chosen[slots], 0).repeat(counts)
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
    ends = first + columns.repeat(counts) + chosen
    _add_values(parts, message, message.values[slots].repeat(counts), ends)


def _add_values(
    parts: Parts, message: Message, bits: NDArray[np.int64], begin: NDArray[np.int64]
) -> None:
    """Add the values of rows; `bits` [N] say which a token has, `begin` [N] where these begin."""
    for name, value in ROW_VALUES.items():
        has = (bits >> value & 1).astype(np.bool_)
        values = np.full(len(bits), np.nan, np.float32)
        values[has] = message.logprobs[(begin + wire.place_of_value(bits, value))[has]]
        _put(parts, name, values)
    has = bits & DIGEST_BITS == DIGEST_BITS
    low, high = (
        message.logprobs[(begin + wire.place_of_value(bits, value))[has]]
        for value in (wire.RowValue.DIGEST_LOW, wire.RowValue.DIGEST_HIGH)
    )
    digests = np.zeros(len(bits), np.uint64)
    digests[has] = digests_of(low, high)
    _put(parts, "row_digest", digests)


def _add_drafts(parts: Parts, batch: RecordBatch) -> None:
    """Draft j was proposed for the position of emitted token j; only few requests ask for them."""
    counts = batch.num_tokens
    total = int(counts.sum())
    drafted = np.full(total, -1, np.int32)
    logprobs = np.full(total, np.nan, np.float32)
    ranks = np.full(total, NO_RANK, np.int32)
    sizes = np.zeros(total, np.int64)
    chosen: list[tuple[NDArray[Any], NDArray[Any]]] = []
    joined = () if batch.joined is None else np.flatnonzero(batch.joined).tolist()
    ends = counts.cumsum()
    for index in joined:
        draft = Record(batch, index).draft
        n = int(counts[index])
        if draft is None:
            continue
        begin = int(ends[index]) - n
        m = min(n, len(draft.token_ids))
        drafted[begin : begin + m] = draft.token_ids[:m]
        if draft.logprobs is None:
            continue
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
    rows = (message.kept_start[slots].repeat(counts) + places_within(counts))[has]
    sets = message.kept_sets.take(rows)
    sizes = np.zeros(len(has), np.int32)
    masses = np.zeros(len(has), np.float32)
    sizes[has], masses[has] = sets.counts, sets.log_kept
    return KeptSets.of(sizes, masses, sets.token_ids)


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
_NO_ROWS: NDArray[np.int64] = np.empty(0, np.int64)
_ALWAYS: dict[str, NDArray[Any]] = {
    "step": _NO_ROWS, "weights_version": np.empty(0, np.uint32), "digest": np.empty(0, np.uint16),
    "token_id": _NO_IDS, "kind": np.empty(0, np.int8),
}  # fmt: skip
