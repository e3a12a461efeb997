"""The contract of `topk_logprobs` and `greedy` in float64 NumPy, one row at a time: slow and plain.

Nothing here is shared with the code under test, so that the two cannot be wrong in the same way.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

ABSOLUTE_ERROR = 1e-5
RELATIVE_ERROR = 2e-7


class Expected(NamedTuple):
    """Like `TopkLogprobs`, with float64 logprobs and each row's state."""

    token_ids: np.ndarray  # [R, K + 1] int32
    logprobs: np.ndarray  # [R, K + 1] float64
    token_ranks: np.ndarray  # [R] int32
    extra_logprobs: np.ndarray  # [R, C] float64


def topk_logprobs(
    logits: Any,
    token_ids: Any,
    k: int,
    *,
    row_ids: Any = None,
    num_rows: Any = None,
    temperatures: Any = None,
    extra_token_ids: Any = None,
) -> Expected:
    """logits [N, V], token_ids [R], row_ids [R], temperatures [R], extra_token_ids [R, C]."""
    logits = np.asarray(logits).astype(np.float64)
    token_ids = np.asarray(token_ids)
    num_targets = len(token_ids)
    extra = np.zeros((num_targets, 0), int) if extra_token_ids is None else extra_token_ids
    extra = np.asarray(extra)
    out = Expected(
        np.full((num_targets, k + 1), -1, np.int32),
        np.full((num_targets, k + 1), np.nan),
        np.zeros(num_targets, np.int32),
        np.full(extra.shape, np.nan),
    )
    for r in range(num_targets):
        row = r if row_ids is None else int(row_ids[r])
        if (num_rows is not None and r >= num_rows) or not 0 <= row < len(logits):
            continue  # skipped
        x = logits[row]
        token = int(token_ids[r])
        out.token_ids[r, 0] = token
        if not is_valid(x):
            continue
        temperature = 1.0 if temperatures is None else float(temperatures[r])
        lp = log_softmax(x, temperature)
        ids = top_ids(x, k)
        out.token_ids[r, 1 : 1 + len(ids)] = ids
        out.logprobs[r, 1:] = -np.inf
        out.logprobs[r, 1 : 1 + len(ids)] = lp[ids]
        if 0 <= token < len(x):
            out.logprobs[r, 0] = lp[token]
            out.token_ranks[r] = token_rank(x, token)
        for c, other in enumerate(extra[r]):
            if 0 <= other < len(x):
                out.extra_logprobs[r, c] = lp[other]
    return out


def is_valid(x: ArrayLike) -> bool:
    """x [V]: no NaN, no +inf, at least one finite logit."""
    x = np.asarray(x, np.float64)
    return bool(not np.isnan(x).any() and np.isfinite(x.max()))


def log_softmax(x: ArrayLike, temperature: float = 1.0) -> np.ndarray:
    """[V] float64 of a valid row; temperature 0 means greedy and uses 1."""
    x = np.asarray(x, np.float64)
    scaled = (x - x.max()) / (temperature or 1.0)
    result: np.ndarray = scaled - np.log(np.exp(scaled).sum())
    return result


def top_ids(x: ArrayLike, k: int) -> np.ndarray:
    """Ids of the k largest finite logits of a valid row, ties lowest id first; may be fewer."""
    x = np.asarray(x, np.float64)
    order = np.argsort(-x, kind="stable")[:k]
    found: np.ndarray = order[np.isfinite(x[order])]
    return found


def token_rank(x: ArrayLike, token: int) -> int:
    """1 + the number of strictly larger logits."""
    x = np.asarray(x, np.float64)
    return 1 + int((x > x[token]).sum())


def greedy_token_id(x: ArrayLike) -> int:
    """The lowest id among the largest non-NaN logits; 0 if all are NaN."""
    x = np.asarray(x, np.float64)
    numbers = np.flatnonzero(~np.isnan(x))
    return 0 if len(numbers) == 0 else int(numbers[np.argmax(x[numbers])])


def assert_logprobs_close(actual: Any, expected: Any) -> None:
    """Within the contract's error bound; NaN and -inf must be at the same places."""
    actual = np.asarray(actual)
    assert actual.dtype == np.float32, actual.dtype
    expected = np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    with np.errstate(over="ignore"):  # beyond float32's range the nearest answer is -inf
        expected = np.where(np.isinf(expected.astype(np.float32)), -np.inf, expected)
    with np.errstate(invalid="ignore"):
        bound = ABSOLUTE_ERROR + RELATIVE_ERROR * np.abs(expected)
        error = np.abs(actual.astype(np.float64) - expected)
        fine = (error <= bound) | (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    bad = np.argwhere(~fine)
    assert len(bad) == 0, (
        f"{len(bad)} logprobs differ, first at {tuple(bad[0])}: "
        f"{actual[tuple(bad[0])]} against {expected[tuple(bad[0])]}"
    )


def assert_matches(actual: Any, expected: Expected) -> None:
    """Ids and ranks equal, logprobs within the bound."""
    np.testing.assert_array_equal(np.asarray(actual.token_ids), expected.token_ids)
    np.testing.assert_array_equal(np.asarray(actual.token_ranks), expected.token_ranks)
    assert_logprobs_close(actual.logprobs, expected.logprobs)
    assert_logprobs_close(actual.extra_logprobs, expected.extra_logprobs)


def edge_rows(vocabulary: int, dtype: Any, group_width: int) -> np.ndarray:
    """[7, V] logits with every edge of the contract, an ordinary row first.

    Ties are spread over groups of `group_width` columns, into which a kernel may cut the row; it
    must have more than 300 columns, and than 5 groups.
    """
    rng = np.random.default_rng(vocabulary)
    ids = np.arange(vocabulary)
    normal = np.round(rng.normal(size=vocabulary) * 4, 1)
    # Equal largest logits in three groups, the first and the last id, and zeros of both signs.
    ties = np.where(ids % 2 == 0, -0.0, 0.0)
    ties[[vocabulary - 1, group_width, 2 * group_width - 1, 5 * group_width + 3]] = 7.0
    few = np.full(vocabulary, -np.inf)
    few[vocabulary - 2] = -3.0
    rows = [
        normal,
        ties,
        few,
        np.where(ids == 9, np.nan, normal),
        np.where(ids == vocabulary - 1, np.inf, normal),
        np.full(vocabulary, -np.inf),
        np.where(ids == 300, -np.nan, -np.inf),
    ]
    return np.stack(rows).astype(np.dtype(dtype))
