"""What a request is to get, in float64 NumPy, as the contract says it; and what it got."""

from collections import Counter

import jax.numpy as jnp
import numpy as np

from ipc.wire import KEPT_ALL, LogprobsMode
from jax_specdec.device.model.params import named_arrays
from pallas_kernels import equal_digests, row_digests
from pallas_kernels.contract.changes import Changes, apply, prepared
from pallas_kernels.testing import oracle
from tests.support import letters, reference_model
from tests.support.changed_choice import changed_row
from tests.support.decoding import random_model
from tests.support.expected_probs import expected_probs

# Float32 forward passes. Half an ulp of the weights moves one row in 500 by 1e-4: of a request's
# rows, one may be so far away.
CLOSE, SELDOM_CLOSE = 2e-4, 5e-4


def logprobs(row, params, mode=None):
    """[V] float64 of a row [V]; NaN where the row is invalid."""
    mode = params.logprobs_mode if mode is None else mode
    if not oracle.is_valid(row):
        return np.full(len(row), np.nan)
    if mode is LogprobsMode.RAW:
        return oracle.log_softmax(row)
    if mode is LogprobsMode.SCALED:
        return oracle.log_softmax(row, params.temperature)
    # Exactly the float32 numbers that the device has.
    numbers = [float(np.float32(x)) for x in (params.temperature, params.top_p, params.min_p)]
    temperature, top_p, min_p = numbers
    with np.errstate(divide="ignore"):
        return np.log(expected_probs(np.asarray(row), temperature, params.top_k, top_p, min_p))


def check_rows(rows, params, token_ids, got, ids, ranks, chosen=None):
    """Delivered rows against their logits [n, V]: ids and ranks equal, logprobs within the bound.

    Args:
      token_ids: [n]. got: [n, K + 1]. ids: [n, K]. ranks: [n]. chosen: [n, C] or None.
    """
    k = params.num_columns - 1
    assert (got.shape, ids.shape) == ((len(rows), k + 1), (len(rows), k))
    for n, (row, token) in enumerate(zip(rows, token_ids, strict=True)):
        table, valid = logprobs(row, params), oracle.is_valid(row)
        best = oracle.top_ids(row, k) if valid else np.array([], int)
        best = best[table[best] > -np.inf]  # what processing excludes is no candidate
        missing = k - len(best)
        expected = [table[token], *table[best], *[-np.inf if valid else np.nan] * missing]
        np.testing.assert_array_equal(ids[n], [*best, *[-1] * missing])
        assert ranks[n] == (oracle.token_rank(row, token) if valid else 0)
        oracle.assert_logprobs_close(got[n], expected)
        if chosen is not None:
            oracle.assert_logprobs_close(chosen[n], table[list(params.extra_token_ids)])


def check_values(rows, params, record):
    """Delivered entropies and log-sum-exps against logits [n, V]; how many there were, by name."""
    exact = {name: [] for name in ("entropy", "log_sum_exp")}
    for row in np.asarray(rows, np.float64):
        table = logprobs(row, params)
        some = table > -np.inf
        scale = 1.0
        if params.logprobs_mode is not LogprobsMode.RAW and params.temperature:
            scale = float(np.float32(params.temperature))
        exact["entropy"].append(-(np.exp(table[some]) * table[some]).sum())
        exact["log_sum_exp"].append(np.logaddexp.reduce(row[some] / scale))
    seen = Counter()
    for name, expected in exact.items():
        found = getattr(record, name)
        assert (found is not None) == getattr(params, name)
        if found is not None:
            np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-5)
            seen[f"{name} {params.logprobs_mode.name.lower()}"] += len(found)
    return seen


def chose(output):
    """The logits [B, S, V] that a step's tokens were chosen from."""
    if output.changes is None:
        return output.logits if output.changed is None else output.changed
    rows, vocabulary = output.logits.reshape(-1, output.logits.shape[-1]), output.logits.shape[-1]
    each = (x if x is None else jnp.asarray(x.reshape(len(rows), -1)) for x in output.changes)
    changed = apply(jnp.asarray(rows), prepared(Changes(*each), vocabulary))
    return np.asarray(changed, np.float32).reshape(output.logits.shape)


def check_records(result, requests, model=None):
    """Every value of a run's records, drafts and prompts included, against float64.

    Returns how much of what was seen, as a `Counter`: rows with logprobs, rows of drafts, rows that
    were changed and those of them behind a draft, accepted drafts, and kept sets by size.
    """
    params, config = model or random_model()
    weights, seen = named_arrays(params), Counter()
    chosen_from = [chose(output) for output in result.outputs]
    for item in requests:
        emitted, own_rows = [], []
        for record in result.records[item.id]:
            output = result.outputs[record.step]
            both = output.logits, chosen_from[record.step]
            own, changed = (x[record.slot][: record.num_tokens] for x in both)
            for n, token in enumerate(record.token_ids.tolist()):
                seen += _check_choice(own[n], changed[n], item, emitted, record, n)
                emitted.append(token)
            own_rows.extend(own)
            assert (record.row_digest is not None) == item.params.row_digest
            if record.row_digest is not None:  # of the model's logits, whatever changed them
                words = row_digests(jnp.asarray(own, output.logits.dtype))
                assert equal_digests(record.row_digest, np.asarray(words)).all()
                seen["digests"] += len(own)
            processed = item.params.logprobs_mode is LogprobsMode.PROCESSED
            if item.params.logprobs is None:
                assert record.logprobs is record.cumulative_logprob is None
            elif record.num_tokens:
                check_rows(changed if processed else own, item.params, record.token_ids,
                           record.logprobs, record.topk_ids, record.token_ranks,
                           record.chosen_logprobs)  # fmt: skip
                seen["rows"] += len(own)
                seen += check_values(changed if processed else own, item.params, record)
            seen["accepted"] += record.num_accepted
            seen["drafts"] += _check_drafts(output, record, item.params)
        whole = [*item.prompt_token_ids, *emitted]
        table = reference_model.logits(weights, config.to_dict(), whole)[:-1]
        _check_text(table, own_rows, result.records[item.id], item)
    return seen


def _check_choice(own, changed, item, emitted, record, n):
    """The n-th row of a record: its logits, its token, and its kept set."""
    params = item.params
    allowed = own if params.structured is None else letters.masked(own, emitted)
    expected = changed_row(allowed, params, item.prompt_token_ids, emitted)
    np.testing.assert_allclose(changed, expected, rtol=1e-6, atol=1e-5)
    kept = logprobs(changed, params, LogprobsMode.PROCESSED) > -np.inf
    assert kept[record.token_ids[n]]
    is_changed = bool((changed != own).any())
    seen = Counter(changed=is_changed, behind=is_changed and n > 0)
    if not params.kept_token_ids:
        assert record.kept is None
        return seen
    share = 0.0
    if params.temperature:
        share = np.logaddexp.reduce(oracle.log_softmax(changed, params.temperature)[kept])
    np.testing.assert_allclose(record.kept.log_kept[n], share, atol=1e-5)
    assert record.kept.counts[n] == (KEPT_ALL if kept.all() else kept.sum())
    ids = [] if kept.all() else np.flatnonzero(kept).tolist()
    assert record.kept.ids(n).tolist() == ids
    return seen + Counter({f"kept {kept.sum()}": 1})


def _check_drafts(output, record, params):
    """The rows of a record's drafts, accepted or not; returns their number."""
    draft = record.draft
    if draft is None:
        return 0
    assert params.draft_logprobs
    count = output.drafts.num[record.slot]
    assert count == record.num_drafts > 0
    ids = output.drafts.token_ids[record.slot][:count]
    np.testing.assert_array_equal(draft.token_ids, ids)
    if params.logprobs is None:
        return 0
    rows = output.drafts.report.logits[record.slot][:count]
    check_rows(rows, params, ids, draft.logprobs, draft.topk_ids, draft.token_ranks,
               draft.chosen_logprobs)  # fmt: skip
    return len(rows)


def _check_text(table, own_rows, records, item):
    """Against a forward pass over the whole text, without a cache or drafts."""
    prompt = item.prompt_token_ids
    raw = [oracle.log_softmax(row) for row in own_rows]
    exact = [oracle.log_softmax(row) for row in table[len(prompt) - 1 :]]
    np.testing.assert_allclose(raw, exact, atol=SELDOM_CLOSE)
    assert sum(abs(a - b).max() > CLOSE for a, b in zip(raw, exact, strict=True)) <= 1
    parts = [record.prompt for record in records if record.prompt is not None]
    for part in parts:
        rows = table[part.start - 1 :][: len(part.token_ids)]
        pairs = zip(rows, part.token_ids, strict=True)
        expected = [logprobs(row, item.params)[token] for row, token in pairs]
        np.testing.assert_allclose(part.logprobs[:, 0], expected, atol=SELDOM_CLOSE)
    scored = [token for part in parts for token in part.token_ids.tolist()]
    assert scored == ([] if item.params.prompt_logprobs is None else list(prompt[1:]))
    if item.params.logprobs is not None:
        sums = np.concatenate([record.logprobs[:, 0] for record in records if record.num_tokens])
        total = sums.astype(np.float64).sum()
        np.testing.assert_allclose(records[-1].cumulative_logprob, total, rtol=1e-12)
