"""Records of a run against logprobs [N, V] in float64 of another implementation."""

import numpy as np


def log_softmax(logits):
    return logits - np.logaddexp.reduce(logits, axis=1)[:, None]


def check_logprobs(found, rows, k, *, own, top, tie):
    """Column 0 and the top K of each token; returns how many positions had a near tie.

    Where two neighbors are closer than `tie`, either order is right.

    Args:
      found: the records. rows: the logprobs behind their tokens.
      own, top: tolerances of the emitted tokens and of the top K.
    """
    got = np.concatenate([record.logprobs for record in found])
    top_ids = np.concatenate([record.topk_ids for record in found])
    ids = np.concatenate([record.token_ids for record in found])
    order = np.argsort(-rows, axis=1, kind="stable")[:, : k + 1]
    ordered = np.take_along_axis(rows, order, axis=1)
    np.testing.assert_allclose(got[:, 0], rows[np.arange(len(ids)), ids], **own)
    np.testing.assert_allclose(got[:, 1:], ordered[:, :k], **top)
    apart = -np.diff(ordered) > tie
    sure = apart & np.column_stack([np.ones(len(ids), bool), apart[:, :-1]])
    assert (top_ids == order[:, :k])[sure].all()
    return int((~apart).any(axis=1).sum())


def check_greedy(ids, rows, tie):
    """Each token is the likeliest, or one that nearly ties; returns the share of the former."""
    best = np.sort(rows, axis=1)[:, -2:]
    sure = best[:, 1] - best[:, 0] > tie
    assert (ids == rows.argmax(axis=1))[sure].all()
    return sure.mean()
