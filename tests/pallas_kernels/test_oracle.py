"""The float64 oracle that the kernels are compared with."""

import numpy as np
import pytest

from pallas_kernels import TopkLogprobs
from pallas_kernels.testing import oracle

pytestmark = pytest.mark.fast


def test_the_oracle_holds_to_the_stated_bound():
    assert (oracle.ABSOLUTE_ERROR, oracle.RELATIVE_ERROR) == (1e-5, 2e-7)
    exact = np.array([-50.0])
    oracle.assert_logprobs_close((exact + 1.9e-5).astype(np.float32), exact)
    with pytest.raises(AssertionError):
        oracle.assert_logprobs_close((exact + 2.7e-5).astype(np.float32), exact)


def test_oracle_comparison_can_fail():
    """Negative control: a wrong id, rank, logprob or NaN is noticed."""
    rng = np.random.default_rng(4)
    x = rng.normal(size=(3, 50)) * 4
    expected = oracle.topk_logprobs(x, [1, 2, 3], 4)
    good = TopkLogprobs(
        expected.token_ids,
        expected.logprobs.astype(np.float32),
        expected.token_ranks,
        expected.extra_logprobs.astype(np.float32),
    )
    oracle.assert_matches(good, expected)

    def changed(part, place, value):
        array = np.array(getattr(good, part))
        array[place] = value
        return good._replace(**{part: array})

    for bad in (
        changed("token_ids", (1, 2), good.token_ids[1, 2] + 1),
        changed("token_ranks", 0, good.token_ranks[0] + 1),
        changed("logprobs", (2, 1), good.logprobs[2, 1] + np.float32(3e-5)),
        changed("logprobs", (2, 1), np.nan),
        changed("logprobs", (2, 1), -np.inf),
        good._replace(logprobs=good.logprobs.astype(np.float64)),
    ):
        with pytest.raises(AssertionError):
            oracle.assert_matches(bad, expected)
