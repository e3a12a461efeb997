"""What a learner refuses of a rollout: other logits, impossible sets and temperatures."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import row_digests
from pallas_kernels.sampling import (
    check_digests,
    check_kept,
    kept_logprobs,
    learner_logprobs,
    rollout_logprobs,
)

pytestmark = pytest.mark.fast
V = 40
IDS = jnp.array([1, 2, 3], jnp.int32)
SETS = np.int32([[1, 7, 30], [2, 3, -1], [-1, -1, -1]])
KEPT = SETS, np.int32([3, 2, -1]), np.zeros(3, np.float32)


def some_logits(dtype="float32"):
    return jnp.asarray(np.random.default_rng(0).normal(size=(3, V)), dtype)


def as_numbers(words):
    """Digests as a record has them."""
    return np.ascontiguousarray(words).view("<u8")[..., 0]


LEARNERS = {
    "rollout_logprobs": lambda x, digests: rollout_logprobs(x, IDS, row_digests=digests),
    "rollout_logprobs, kept": lambda x, digests: rollout_logprobs(
        x, IDS, KEPT, row_digests=digests
    ),
    "kept_logprobs": lambda x, digests: kept_logprobs(x, IDS, KEPT, row_digests=digests),
}


@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.parametrize("form", [np.asarray, as_numbers, jnp.asarray])
def test_equal_rows_pass_and_other_rows_are_refused(name, form):
    x, learner = some_logits(), LEARNERS[name]
    if form is jnp.asarray:
        digests = row_digests(x)
    else:
        digests = form(np.asarray(row_digests(x)))
    np.testing.assert_array_equal(learner(x, digests), learner(x, None))
    other = np.array(x)
    other.view(np.uint32)[1, 5] ^= 1  # the last bit of a token that nobody drew
    with pytest.raises(
        ValueError, match=r"1 of 3 rows have other logits .* first at \[1\].*weights"
    ):
        learner(jnp.asarray(other), digests)


@pytest.mark.parametrize("name", LEARNERS)
def test_under_jit_a_row_of_other_logits_is_nan(name):
    x, learner = some_logits(), LEARNERS[name]
    words = row_digests(x)
    moved = x.at[2, 0].add(1)
    run = jax.jit(learner)
    expected = np.where([False, False, True], np.nan, learner(moved, None))
    np.testing.assert_allclose(run(moved, words), expected, rtol=1e-6)
    np.testing.assert_allclose(run(x, words), learner(x, None), rtol=1e-6)


def test_rows_without_a_digest_are_not_compared():
    x = some_logits()
    digests = as_numbers(np.asarray(row_digests(x))).copy()
    digests[1] = 0
    moved = x.at[1, 0].add(1)
    np.testing.assert_array_equal(
        rollout_logprobs(moved, IDS, row_digests=digests), rollout_logprobs(moved, IDS)
    )
    assert np.asarray(check_digests(row_digests(moved), digests)).all()


def test_digests_of_another_dtype_or_kind_are_refused():
    x, words = some_logits(), row_digests(some_logits())
    narrow = x.astype(jnp.bfloat16)
    for call in (
        lambda: rollout_logprobs(narrow, IDS, row_digests=words),
        lambda: jax.jit(lambda x: rollout_logprobs(x, IDS, row_digests=np.asarray(words)))(narrow),
        lambda: check_digests(row_digests(narrow), words),
    ):
        with pytest.raises(ValueError, match="are of float32 logits and these are bfloat16"):
            call()
    for wrong, error in (
        (np.zeros((3, 2), np.int32), TypeError),
        (np.zeros(3, bool), TypeError),
        (np.zeros(3, np.uint32), ValueError),  # what jax.jit makes of a record's
        (np.zeros(2, np.uint64), ValueError),
        ([1, 2, 3], TypeError),
        (5, TypeError),
    ):
        with pytest.raises(error, match="row_digests"):
            kept_logprobs(x, IDS, KEPT, row_digests=wrong)


WRONG = {
    "an id of V": ((0, (0, 2), V), r"kept.token_ids has 40 at \[0, 2\], outside.*\(0 to 39\)"),
    "an id below 0": ((0, (1, 0), -3), r"has -3 at \[1, 0\], outside"),
    "an id twice": ((0, (0, 1), 1), r"names 1 twice in row \[0\]"),
    "too large a count": ((1, 1, 4), r"kept.counts has 4 at \[1\].* at most the 3 columns"),
    "an unknown mark": ((1, 2, -3), r"kept.counts has -3 at \[2\]"),
    "a share above 1": ((2, 2, 0.5), r"kept.log_kept has 0.5 at \[2\].* at most 0"),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("form", [np.asarray, jnp.asarray])
def test_sets_that_cannot_be_are_refused(kind, form):
    (field, place, value), said = WRONG[kind]
    arrays = [x.copy() for x in KEPT]
    arrays[field][place] = value
    kept = tuple(map(form, arrays))
    x, states = some_logits(), jnp.ones((3, 4))
    calls = [
        lambda: kept_logprobs(x, IDS, kept),
        lambda: rollout_logprobs(x, IDS, kept),
        lambda: learner_logprobs(states, jnp.ones((V, 4)), IDS, kept),
        lambda: check_kept(kept, V),
    ]
    if form is np.asarray:  # known to a program that is traced
        calls.append(lambda: jax.jit(lambda x: kept_logprobs(x, IDS, kept))(x))
    for call in calls:
        with pytest.raises(ValueError, match=said):
            call()


def test_sets_in_any_order_are_one_set():
    turned = KEPT[0][:, ::-1].copy()
    turned[1] = 3, 2, 39  # behind its two ids
    x = some_logits()
    found = kept_logprobs(x, IDS, (turned, *KEPT[1:]))
    np.testing.assert_allclose(found, kept_logprobs(x, IDS, KEPT), rtol=1e-6)


@pytest.mark.parametrize("t", [-1.0, np.nan, np.float32([1, 1, -0.5])])
def test_temperatures_that_are_none_are_refused(t):
    x = some_logits()
    with pytest.raises(ValueError, match=r"temperatures has (-1|nan|-0.5): give those of the req"):
        kept_logprobs(x, IDS, KEPT, t)
    jitted = jax.jit(lambda t: kept_logprobs(x, IDS, KEPT, t))(jnp.asarray(t))
    assert np.isnan(jitted).any()
