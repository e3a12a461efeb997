"""The logprobs of one row in a request's own mode, in float64 NumPy, as the contract says them."""

import numpy as np

from ipc.wire import LogprobsMode
from pallas_kernels.testing import oracle
from tests.support.expected_probs import expected_probs


def logprobs(row, params):
    """[V] float64 of a row [V]; NaN where the row is invalid."""
    if not oracle.is_valid(row):
        return np.full(len(row), np.nan)
    if params.logprobs_mode is LogprobsMode.RAW:
        return oracle.log_softmax(row)
    if params.logprobs_mode is LogprobsMode.SCALED:
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
        table = logprobs(row, params)
        valid = oracle.is_valid(row)
        best = oracle.top_ids(row, k) if valid else np.array([], int)
        best = best[table[best] > -np.inf]  # what processing excludes is no candidate
        expected_ids = np.full(k, -1)
        expected_ids[: len(best)] = best
        expected = np.full(k + 1, -np.inf if valid else np.nan)
        expected[0] = table[token]
        expected[1 : 1 + len(best)] = table[best]
        np.testing.assert_array_equal(ids[n], expected_ids)
        assert ranks[n] == (oracle.token_rank(row, token) if valid else 0)
        oracle.assert_logprobs_close(got[n], expected)
        if chosen is not None:
            oracle.assert_logprobs_close(chosen[n], table[list(params.extra_token_ids)])


def check_records(result, requests, drafts_alone=()):
    """Every row of a run's records, drafts included. Returns (target rows, draft rows) seen.

    Of the requests whose ids are in `drafts_alone`, the rows of drafts alone.
    """
    seen = drafts_seen = 0
    for item in requests:
        params = item.params
        for record in result.records[item.id]:
            output = result.outputs[record.step]
            if record.num_tokens and params.logprobs is not None and item.id not in drafts_alone:
                rows = output.logits[record.slot][: record.num_tokens]
                check_rows(rows, params, record.token_ids, record.logprobs, record.topk_ids,
                           record.token_ranks, record.chosen_logprobs)  # fmt: skip
                seen += len(rows)
            if (draft := record.draft) is None:
                continue
            assert params.draft_logprobs
            count = output.drafts.num[record.slot]
            assert count == record.num_drafts > 0
            ids = output.drafts.token_ids[record.slot][:count]
            np.testing.assert_array_equal(draft.token_ids, ids)
            if params.logprobs is not None:
                rows = output.drafts.report.logits[record.slot][:count]
                check_rows(rows, params, ids, draft.logprobs, draft.topk_ids, draft.token_ranks,
                           draft.chosen_logprobs)  # fmt: skip
                drafts_seen += len(rows)
    return seen, drafts_seen
