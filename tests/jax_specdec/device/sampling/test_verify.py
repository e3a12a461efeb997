"""Verification: hand-made cases, and the emitted distribution."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jax_specdec.device.drafting import drafters
from jax_specdec.device.sampling.distribution import Sampling
from jax_specdec.device.sampling.random_draws import ACCEPT, RECOVER
from jax_specdec.device.sampling.verify import Drafts, accept_draft, verify
from tests.support import quick_compile

pytestmark = pytest.mark.fast


def rows_choosing(ids, vocab=5):
    """Logits [B, S, V] whose largest are `ids` [B, S]."""
    return jax.nn.one_hot(jnp.asarray(ids), vocab) * 3.0


class Greedy(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_ragged_acceptance(self):
        target = [[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]]
        drafts = [[1, 2], [1, 4], [4, 2], [1, 2], [1, 2]]
        proposed = [2, 2, 2, 1, 0]
        got = self.variant(verify)(
            rows_choosing(target),
            Drafts(jnp.array(drafts), jnp.array(proposed), None),
            Sampling.greedy(5),
            jnp.zeros(5, jnp.int32),
        )
        # all accepted and the bonus; one and the recovered; none; one of one; nothing proposed
        np.testing.assert_array_equal(got.num_tokens, [3, 2, 1, 2, 1])
        np.testing.assert_array_equal(
            got.token_ids, [[1, 2, 3], [1, 2, -1], [1, -1, -1], [1, 2, -1], [1, -1, -1]]
        )

    @chex.variants(with_jit=True, without_jit=True)
    def test_verification_stops_at_an_invalid_row(self):
        logits = np.array(rows_choosing([[1, 2, 3]] * 4))
        logits[0, 1] = [np.nan, -1, 2, 2, 0]  # lowest id among the largest that are not NaN
        logits[1, 0, 4] = np.inf
        logits[2, 1] = -np.inf
        logits[3, 1] = np.nan
        got = self.variant(verify)(
            jnp.asarray(logits),
            Drafts(jnp.array([[1, 2]] * 4), jnp.full(4, 2), None),
            Sampling.greedy(4),
            jnp.zeros(4, jnp.int32),
        )
        np.testing.assert_array_equal(got.num_tokens, [2, 1, 2, 2])
        np.testing.assert_array_equal(
            got.token_ids, [[1, 2, -1], [4, -1, -1], [1, 0, -1], [1, 0, -1]]
        )

    @chex.variants(with_jit=True, without_jit=True)
    def test_no_drafts_is_a_normal_case(self):
        got = self.variant(verify)(
            rows_choosing([[1], [2]]),
            Drafts(jnp.zeros((2, 0), jnp.int32), jnp.zeros(2, jnp.int32), None),
            Sampling.greedy(2),
            jnp.zeros(2, jnp.int32),
        )
        np.testing.assert_array_equal(got.token_ids, [[1], [2]])


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="for 3 rows a slot there are 2 drafts to verify"):
        verify(
            jnp.zeros((1, 3, 4)),
            Drafts(jnp.zeros((1, 3), jnp.int32), jnp.zeros(1, jnp.int32), None),
            Sampling.greedy(1),
            jnp.zeros(1, jnp.int32),
        )


def test_a_token_of_probability_zero_is_never_accepted():
    u = jnp.array([0.0, 0.0, 0.999, 0.5, 0.5])
    p = jnp.array([0.0, 0.2, 0.2, 0.2, 0.0])
    q = jnp.array([0.3, 0.3, 0.2, 0.5, 0.0])
    np.testing.assert_array_equal(accept_draft(u, p, q), [False, True, True, False, False])


P = np.array([[0.45, 0.25, 0.2, 0.1, 0.0], [0.1, 0.1, 0.6, 0.1, 0.1], [0.2] * 5])
Q = np.array([[0.1, 0.2, 0.3, 0.15, 0.25], [0.05, 0.6, 0.15, 0.1, 0.1]])
ROWS = 30_000


def emitted(drafts, draft_logits, accept=accept_draft, seed=1):
    """Tokens [N, 3] and counts [N] of N independent slots with the same rows."""
    sampling = Sampling.greedy(ROWS)._replace(
        temperature=jnp.ones(ROWS), seed=jnp.arange(ROWS, dtype=jnp.uint32) + np.uint32(seed * ROWS)
    )
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(P, jnp.float32)), (ROWS, 3, 5))
    got = jax.jit(verify, static_argnames="accept")(
        logits,
        Drafts(jnp.asarray(drafts), jnp.full(ROWS, 2), draft_logits),
        sampling,
        jnp.zeros(ROWS, jnp.int32),
        accept=accept,
    )
    return np.asarray(got.token_ids), np.asarray(got.num_tokens)


def p_value(ids, probs):
    kept = np.asarray(probs) > 0
    observed = np.bincount(ids, minlength=5)
    if observed[~kept].any():
        return 0.0
    return stats.chisquare(observed[kept], len(ids) * np.asarray(probs)[kept]).pvalue


def sampled_drafts():
    random = np.random.default_rng(0)
    drafts = np.stack([random.choice(5, ROWS, p=q) for q in Q], axis=1).astype(np.int32)
    return drafts, jnp.broadcast_to(jnp.log(jnp.asarray(Q, jnp.float32)), (ROWS, 2, 5))


def test_emitted_tokens_follow_the_target_whatever_was_drafted():
    certain = np.tile([2, 1], (ROWS, 1)).astype(np.int32), None
    for drafts, draft_logits in (sampled_drafts(), certain):
        ids, num = emitted(drafts, draft_logits)
        for j in range(3):
            assert p_value(ids[num > j, j], P[j]) > 1e-3
        assert {1, 2, 3} == set(num.tolist())


@pytest.mark.parametrize("no_token", [-1, 5, 99])
@pytest.mark.parametrize("certain", [True, False])
def test_a_draft_that_is_no_token_is_never_emitted(no_token, certain):
    drafts, draft_logits = sampled_drafts()
    drafts[:, 1] = no_token
    ids, num = emitted(drafts, None if certain else draft_logits)
    if certain:  # the first drafts are then as good as any others
        assert p_value(ids[:, 0], P[0]) > 1e-3
    assert set(num.tolist()) == {1, 2}
    assert p_value(ids[num > 1, 1], P[1]) > 1e-3


def test_a_broken_acceptance_rule_is_noticed():
    drafts, draft_logits = sampled_drafts()
    ids, _ = emitted(drafts, draft_logits, accept=lambda u, p, q: p > 0)
    assert p_value(ids[:, 0], P[0]) < 1e-9


MANY = 200_000


def product_keys_p_value():
    """Of the first tokens, where drafts and verification draw with the keys that the loop uses."""

    @jax.jit
    def first_tokens():
        seeds, position = jnp.arange(MANY, dtype=jnp.uint32), jnp.full(MANY, 7, jnp.int32)
        sampling = Sampling.greedy(MANY)._replace(temperature=jnp.ones(MANY), seed=seeds)
        target, draft = (
            jnp.broadcast_to(jnp.log(jnp.asarray(rows, jnp.float32)), (MANY, *rows.shape))
            for rows in (P[:2], Q[:1])
        )
        drafts = drafters.draw(draft, sampling, position)
        return verify(target, drafts, sampling, position).token_ids[:, 0]

    return p_value(np.asarray(first_tokens()), P[0])


def test_drafting_accepting_and_recovering_draw_independently():
    assert product_keys_p_value() > 1e-3


@pytest.mark.parametrize("purpose", [ACCEPT, RECOVER])
def test_drafts_drawn_with_the_keys_of_verification_are_noticed(monkeypatch, purpose):
    monkeypatch.setattr(drafters, "DRAFT", purpose)
    assert product_keys_p_value() < 1e-9


def test_greedy_and_sampled_requests_share_a_batch():
    drafts, draft_logits = sampled_drafts()
    temperature = (jnp.arange(ROWS) % 2).astype(jnp.float32)
    sampling = Sampling.greedy(ROWS)._replace(
        temperature=temperature, seed=jnp.arange(ROWS, dtype=jnp.uint32)
    )
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(P, jnp.float32)), (ROWS, 3, 5))
    got = verify(
        logits,
        Drafts(jnp.asarray(drafts), jnp.full(ROWS, 2), draft_logits),
        sampling,
        jnp.zeros(ROWS, jnp.int32),
    )
    ids = np.asarray(got.token_ids)
    assert (ids[::2, 0] == 0).all()  # greedy slots
    np.testing.assert_array_equal(
        got.num_tokens[::2], 1 + (drafts[::2, 0] == 0) + ((drafts[::2] == [0, 2]).all(1))
    )
    assert p_value(ids[1::2, 0], P[0]) > 1e-3


VERIFY = quick_compile.jit(verify)


@pytest.mark.parametrize("bad", ["nan", "inf", "nothing"])
def test_a_sampled_slot_stops_at_an_invalid_row_with_its_greedy_token(bad):
    """For every seed: an invalid row has no distribution to draw from."""
    count, vocab = 64, 5
    logits = np.full((count, 3, vocab), -np.inf, np.float32)
    logits[:, 0, 4] = logits[:, 2, 4] = 0  # only token 4 is possible
    logits[:, 1] = [-1, 2, 0, 2, 1]
    logits[:, 1] = {"nan": np.where(np.arange(vocab) == 4, np.nan, logits[:, 1]),
                    "inf": np.where(np.arange(vocab) == 1, np.inf, logits[:, 1]),
                    "nothing": -np.inf}[bad]  # fmt: skip
    greedy_id = 0 if bad == "nothing" else 1
    # Half of the drafts at the invalid row are its greedy id: they are not accepted either.
    drafts = np.full((count, 2), 4, np.int32)
    drafts[::2, 1] = greedy_id
    greedy_sampling = Sampling.greedy(count)
    got = VERIFY(
        jnp.asarray(logits),
        Drafts(jnp.asarray(drafts), jnp.full(count, 2, jnp.int32), None),
        greedy_sampling._replace(
            temperature=jnp.ones(count), seed=jnp.arange(count, dtype=jnp.uint32)
        ),
        jnp.zeros(count, jnp.int32),
    )
    assert (np.asarray(got.num_tokens) == 2).all()
    np.testing.assert_array_equal(got.token_ids, np.tile([4, greedy_id, -1], (count, 1)))
