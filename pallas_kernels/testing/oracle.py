"""The contract of `topk_logprobs` and `greedy` in float64 NumPy, one row at a time: slow and plain.

Nothing here is shared with the code under test, so that the two cannot be wrong in the same way.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

if TYPE_CHECKING:
    from pallas_kernels.contract.types import TopkLogprobs

ABSOLUTE_ERROR = 1e-5
RELATIVE_ERROR = 2e-7
ENTROPY_ERROR = 1e-5
RELATIVE_ENTROPY_ERROR = 2e-6


class Expected(NamedTuple):
    """Like `TopkLogprobs`, with float64 logprobs and each row's state."""

    token_ids: np.ndarray  # [R, K + 1] int32
    logprobs: np.ndarray  # [R, K + 1] float64
    token_ranks: np.ndarray  # [R] int32
    extra_logprobs: np.ndarray  # [R, C] float64
    log_sum_exp: np.ndarray  # [R] float64
    entropy: np.ndarray  # [R] float64
    top_logits: np.ndarray  # [R, K] float64


def topk_logprobs(
    logits: ArrayLike,
    token_ids: ArrayLike,
    k: int,
    *,
    row_ids: ArrayLike | None = None,
    num_rows: int | None = None,
    temperatures: ArrayLike | None = None,
    extra_token_ids: ArrayLike | None = None,
    allowed: ArrayLike | None = None,
    bias_token_ids: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    rank_ties: str = "strict",
) -> Expected:
    """logits [N, V], token_ids [R], row_ids [R], temperatures [R], extra_token_ids [R, C].

    allowed [R, ceil(V / 32)], bias_token_ids and bias [R, D]. All results are there, as if asked.
    """
    logits = np.asarray(logits)
    token_ids = np.asarray(token_ids)
    num_targets = len(token_ids)
    no_tokens = np.zeros((num_targets, 0), int)
    extra = np.asarray(no_tokens if extra_token_ids is None else extra_token_ids)
    rows = np.arange(num_targets) if row_ids is None else np.asarray(row_ids)
    t = np.ones(num_targets) if temperatures is None else np.asarray(temperatures)
    words = None if allowed is None else np.asarray(allowed)
    biased = np.asarray(no_tokens if bias_token_ids is None else bias_token_ids)
    added = np.asarray(no_tokens if bias is None else bias)
    out = Expected(
        np.full((num_targets, k + 1), -1, np.int32),
        np.full((num_targets, k + 1), np.nan),
        np.zeros(num_targets, np.int32),
        np.full(extra.shape, np.nan),
        np.full(num_targets, np.nan),
        np.full(num_targets, np.nan),
        np.full((num_targets, k), np.nan),
    )
    for r in range(num_targets):
        row = int(rows[r])
        if (num_rows is not None and r >= num_rows) or not 0 <= row < len(logits):
            continue  # skipped
        x = with_changes(
            logits[row],
            None if words is None else words[r],
            zip(biased[r], added[r], strict=True),
        )
        token = int(token_ids[r])
        out.token_ids[r, 0] = token
        if not is_valid(x):
            continue
        temperature = float(t[r])
        lp = log_softmax(x, temperature)
        ids = top_ids(x, k)
        out.token_ids[r, 1 : 1 + len(ids)] = ids
        out.logprobs[r, 1:] = -np.inf
        out.logprobs[r, 1 : 1 + len(ids)] = lp[ids]
        out.log_sum_exp[r] = log_sum_exp(x, temperature)
        out.entropy[r] = entropy(lp)
        out.top_logits[r] = -np.inf
        out.top_logits[r, : len(ids)] = x[ids]
        if 0 <= token < len(x):
            out.logprobs[r, 0] = lp[token]
            out.token_ranks[r] = token_rank(x, token, rank_ties)
        for c, other in enumerate(extra[r]):
            if 0 <= other < len(x):
                out.extra_logprobs[r, c] = lp[other]
    return out


def with_changes(
    row: np.ndarray, allowed: np.ndarray | None, biases: Iterable[tuple[int, float]]
) -> np.ndarray:
    """The changed logits [V] float64 of a row; allowed: words; biases: pairs of id and number."""
    x = np.asarray(row).astype(np.float64)
    sums: dict[int, np.float32] = {}
    with np.errstate(invalid="ignore", over="ignore"):
        for token, number in biases:
            sums[int(token)] = sums.get(int(token), np.float32(0)) + np.float32(number)
        for token, total in sums.items():
            if 0 <= token < len(x):
                x[token] = np.float32(x[token]) + total
    if allowed is not None:
        for token in range(len(x)):
            if not int(allowed[token // 32]) >> token % 32 & 1:
                x[token] = -np.inf
    return x


def log_sum_exp(x: ArrayLike, temperature: float = 1.0) -> float:
    """log(sum(exp(x / T))) of a valid row [V]; temperature 0 uses 1."""
    x = np.asarray(x, np.float64)
    t = temperature or 1.0
    with np.errstate(over="ignore"):
        return float(x.max() / t + np.log(np.exp((x - x.max()) / t).sum()))


def entropy(logprobs: ArrayLike) -> float:
    """-sum(p log p) in nats of logprobs [V]."""
    finite = np.asarray(logprobs, np.float64)
    finite = finite[finite > -np.inf]
    return float(-(np.exp(finite) * finite).sum())


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
    ids: np.ndarray = order[np.isfinite(x[order])]
    return ids


def token_rank(x: ArrayLike, token: int, rank_ties: str = "strict") -> int:
    """1 + the number of strictly larger logits; or "inclusive", those at least as large."""
    x = np.asarray(x, np.float64)
    if rank_ties == "inclusive":
        return int((x >= x[token]).sum())
    return 1 + int((x > x[token]).sum())


def greedy_token_id(x: ArrayLike) -> int:
    """The lowest id among the largest non-NaN logits; 0 if all are NaN."""
    x = np.asarray(x, np.float64)
    numbers = np.flatnonzero(~np.isnan(x))
    return 0 if len(numbers) == 0 else int(numbers[np.argmax(x[numbers])])


def assert_logprobs_close(actual: ArrayLike, expected: ArrayLike) -> None:
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


def assert_matches(actual: "TopkLogprobs", expected: Expected) -> None:
    """Ids and ranks equal, logprobs within the bound."""
    np.testing.assert_array_equal(np.asarray(actual.token_ids), expected.token_ids)
    np.testing.assert_array_equal(np.asarray(actual.token_ranks), expected.token_ranks)
    assert_logprobs_close(actual.logprobs, expected.logprobs)
    assert_logprobs_close(actual.extra_logprobs, expected.extra_logprobs)
    if actual.log_sum_exp is not None:
        assert_logprobs_close(actual.log_sum_exp, expected.log_sum_exp)
    if actual.entropy is not None:
        assert_entropies_close(actual.entropy, expected.entropy)
    if actual.top_logits is not None:
        np.testing.assert_array_equal(actual.top_logits, expected.top_logits.astype(np.float32))


def assert_entropies_close(actual: ArrayLike, expected: ArrayLike) -> None:
    """Within the contract's bound; NaN at the same places."""
    actual = np.asarray(actual)
    assert actual.dtype == np.float32, actual.dtype
    expected = np.asarray(expected, np.float64)
    bound = ENTROPY_ERROR + RELATIVE_ENTROPY_ERROR * np.abs(expected)
    error = np.abs(actual.astype(np.float64) - expected)
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
    assert np.all((error <= bound) | np.isnan(expected)), (actual, expected, error)


def edge_rows(vocabulary: int, dtype: DTypeLike, group_width: int) -> np.ndarray:
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
