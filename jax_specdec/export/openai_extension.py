"""The extension beside OpenAI's fields: what speculation did to a request, as JSON."""

import math
from collections.abc import Sequence
from typing import Any

from jax_specdec.records.batch import Statistics
from jax_specdec.records.record import Record
from jax_specdec.requests import ROW_VALUES, Request
from jax_specdec.text.detokenize import TokenTable

NEGATIVE_INFINITY = -9999.0  # what OpenAI's API uses for "very unlikely"


def speculation(records: Sequence[Record], table: TokenTable) -> dict[str, Any]:
    """The extension for the tokens in `records`: of one for a chunk, of all for a response.

    `by_step` has one object for each step with tokens, which says the version of the weights. Every
    other key has one value a token: `token_ids` and `token_kinds` (see the function) always;
    `token_ranks` (1 the most likely, 0 an invalid row) and `topk_ids` (without missing ones) where
    logprobs were asked for; `chosen_logprobs` where the request named `extra_token_ids`; `entropy`
    and `log_sum_exp` where it asked for them; `kept_counts`, `kept_token_ids` and `log_kept` where
    it asked for kept sets; and where no logprobs were asked for, `tokens`, the strings that the
    logprobs would have.
    """
    result: dict[str, Any] = {"token_ids": [], "token_kinds": [], "by_step": []}
    for record in records:
        if record.num_tokens:
            result["token_ids"] += record.token_ids.tolist()
            result["token_kinds"] += token_kinds(record)
            result["by_step"].append(_step(record, table))
        for name, values in _columns(record, table).items():
            result.setdefault(name, []).extend(values)
    return result


def token_kinds(record: Record) -> list[str]:
    """The role of each token in verification.

    "accepted": a draft; "recovered": it replaces the first rejected draft; "bonus": it follows
    drafts that were all accepted; "plain": its step had no drafts. A stop can cut the last ones.
    """
    accepted, drafts = record.num_accepted, record.num_drafts
    last = "recovered" if accepted < drafts else "bonus" if drafts else "plain"
    return (["accepted"] * accepted + [last])[: record.num_tokens]


def request_extension(
    request: Request, records: Sequence[Record], table: TokenTable
) -> dict[str, Any]:
    """The extension for a request: its parameters, and its totals once it has ended."""
    params = request.params
    statistics = records[-1].statistics if records else None
    if statistics is None:  # behind a stop string, the engine's last record is yet to come
        steps = [
            Statistics.of_step(record.num_drafts, record.num_accepted, record.num_tokens)
            for record in records
            if record.num_tokens
        ]
        statistics = sum(steps, start=Statistics())
    total = records[-1].cumulative_logprob if records else None
    settings: dict[str, Any] = {}
    if params.extra_token_ids:
        settings["extra_token_ids"] = list(params.extra_token_ids)
    return {
        "prompt": table.decode(request.prompt_token_ids),
        "prompt_token_ids": list(request.prompt_token_ids),
        "temperature": params.temperature,
        "logprobs_mode": params.logprobs_mode.name.lower(),
        "cumulative_logprob": None if total is None else json_number(total),
        "steps": statistics.steps,
        "drafts": statistics.num_drafts,
        "accepted": statistics.num_accepted,
        "acceptance_by_position": list(statistics.acceptance_at),
        **settings,
    }


def json_number(logprob: float) -> float | None:
    """A logprob as a JSON value: -9999.0 for -inf, None for NaN."""
    if math.isnan(logprob):
        return None
    return NEGATIVE_INFINITY if logprob == -math.inf else logprob


def _step(record: Record, table: TokenTable) -> dict[str, Any]:
    """One step: its counts, and the drafts' ids and logprobs where their message came."""
    step: dict[str, Any] = {
        "step": record.step,
        "weights_version": record.weights_version,
        "num_tokens": record.num_tokens,
        "num_drafts": record.num_drafts,
        "num_accepted": record.num_accepted,
    }
    draft = record.draft
    if draft is None:
        return step
    step["draft_token_ids"] = draft.token_ids.tolist()
    step["draft_tokens"] = list(map(table.completion_text.__getitem__, draft.token_ids.tolist()))
    rows, ranks, topk_ids = draft.logprobs, draft.token_ranks, draft.topk_ids
    if rows is not None and ranks is not None and topk_ids is not None:
        values = _numbers(rows.tolist())
        step["draft_logprobs"] = [row[0] for row in values]
        step["draft_token_ranks"] = ranks.tolist()
        step["draft_topk_ids"] = _existing(topk_ids.tolist())
        step["draft_topk_logprobs"] = [
            row[1 : 1 + len(top_ids)]
            for row, top_ids in zip(values, step["draft_topk_ids"], strict=True)
        ]
    chosen = draft.chosen_logprobs
    if chosen is not None and chosen.shape[1]:
        step["draft_chosen_logprobs"] = _numbers(chosen.tolist())
    return step


def _columns(record: Record, table: TokenTable) -> dict[str, list[Any]]:
    """The columns that come only with logprobs, or only without."""
    ranks, topk_ids, chosen = record.token_ranks, record.topk_ids, record.chosen_logprobs
    kept = _kept(record)
    if ranks is None or topk_ids is None or chosen is None:
        tokens = map(table.completion_text.__getitem__, record.token_ids.tolist())
        return {"tokens": list(tokens), **kept}
    columns: dict[str, list[Any]] = {
        "token_ranks": ranks.tolist(),
        "topk_ids": _existing(topk_ids.tolist()),
        **kept,
    }
    for name in ROW_VALUES:
        if (values := getattr(record, name)) is not None:
            columns[name] = [json_number(value) for value in values.tolist()]
    if (digests := record.row_digest) is not None:
        columns["row_digest"] = [f"{digest:016x}" for digest in digests.tolist()]
    if record.request.params.extra_token_ids:
        columns["chosen_logprobs"] = _numbers(chosen.tolist())
    return columns


def _kept(record: Record) -> dict[str, list[Any]]:
    """The columns of kept sets, where they were asked for; a mark has no ids."""
    kept = record.kept
    if kept is None:
        return {}
    return {
        "kept_counts": kept.counts.tolist(),
        "kept_token_ids": [kept.ids(n).tolist() for n in range(len(kept))],
        "log_kept": [json_number(mass) for mass in kept.log_kept.tolist()],
    }


def _existing(topk_ids: list[list[int]]) -> list[list[int]]:
    return [[token_id for token_id in row if token_id >= 0] for row in topk_ids]


def _numbers(rows: list[list[float]]) -> list[list[float | None]]:
    return [[json_number(value) for value in row] for row in rows]
