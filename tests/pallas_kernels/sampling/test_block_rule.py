"""Block verification, by enumeration: its law, and that it never accepts fewer drafts."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sampling import block_rule
from tests.support import quick_compile

SHAPES = [(3, 2), (3, 3), (4, 3)]  # V, D


def models(vocab, drafts, seed):
    """p and q after each prefix, as dictionaries of tuples; some tokens have none of either."""
    rng = np.random.default_rng(seed)
    p, q = {}, {}
    for length in range(drafts + 1):
        for prefix in itertools.product(range(vocab), repeat=length):
            p[prefix] = rng.dirichlet(np.full(vocab, 0.7))
            q[prefix] = rng.dirichlet(np.full(vocab, 0.7))
            p[prefix][rng.integers(vocab)] *= rng.integers(2)
            p[prefix] /= p[prefix].sum()
    return p, q


@quick_compile.jit
def chances(p_draft, q_draft, p, q):
    """Weights [n, D + 1] of prefixes, and the masses [n, D] of what is left, by the rule's code."""
    considered = jnp.ones(p_draft.shape, bool)
    weights = block_rule.prefix_weights(p_draft, q_draft, considered)
    return weights, block_rule.residual_mass(p, q, weights[:, :-1])


def rows_of(p, q, vocab, drafts):
    """All drafts [n, D], and of each its p and q in the rows that it meets."""
    ids = np.array(list(itertools.product(range(vocab), repeat=drafts)))
    rows = [[(p[tuple(x[:i])], q[tuple(x[:i])]) for i in range(drafts)] for x in ids]
    p_rows, q_rows = np.moveaxis(np.array(rows, np.float32), 2, 0)
    at = ids[..., None]
    return ids, p_rows, q_rows, *(np.take_along_axis(x, at, 2)[..., 0] for x in (p_rows, q_rows))


def number_law(weights, masses):
    """The probability of each number of accepted drafts [n, D + 1], in float64."""
    weights, masses = (np.asarray(x, np.float64) for x in (weights, masses))
    drafts = masses.shape[1]
    chance = np.ones_like(weights)
    rest = masses[:, 1:] + 1 - weights[:, 1:-1]
    chance[:, 1:-1] = np.where(rest > 0, masses[:, 1:] / np.where(rest > 0, rest, 1), 0)
    chance[:, -1] = weights[:, -1]
    law = np.empty_like(weights)
    for number in range(drafts + 1):
        law[:, number] = chance[:, number] * np.prod(1 - chance[:, number + 1 :], axis=1)
    return law


@pytest.mark.parametrize(("vocab", "drafts"), SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_laws_of_enumerated_models_are_exact(vocab, drafts, seed):
    """What is emitted, followed by the target's own tokens, is D + 1 tokens of the target."""
    p, q = models(vocab, drafts, seed)
    ids, p_rows, q_rows, p_draft, q_draft = rows_of(p, q, vocab, drafts)
    weights, masses = jax.device_get(chances(p_draft, q_draft, p_rows, q_rows))
    law = number_law(weights, masses)
    emitted = {}
    for row, x in enumerate(ids.tolist()):
        drawn = np.prod([q[tuple(x[:i])][x[i]] for i in range(drafts)])
        for number in range(drafts + 1):
            prefix = tuple(x[:number])
            left = p[prefix]
            if number < drafts:
                left = np.maximum(float(weights[row, number]) * p[prefix] - q[prefix], 0)
            if not left.sum():
                left = p[prefix]
            for token, share in enumerate(left / left.sum()):
                key = (*prefix, token)
                emitted[key] = emitted.get(key, 0) + drawn * law[row, number] * share
    whole = {}
    for key, chance in emitted.items():
        for rest in itertools.product(range(vocab), repeat=drafts + 1 - len(key)):
            text, share = key, chance
            for token in rest:
                share *= p[text][token] if len(text) <= drafts else 1
                text = (*text, token)
            whole[text] = whole.get(text, 0) + share
    for text, chance in whole.items():
        target = np.prod([p[text[:i]][text[i]] for i in range(drafts + 1)])
        assert abs(chance - target) < 2e-6, text


@pytest.mark.parametrize(("vocab", "drafts"), SHAPES)
def test_never_fewer_drafts_are_accepted(vocab, drafts):
    """Of each model in expectation, and for the first draft alone the same number."""
    gains = []
    for seed in range(20):
        p, q = models(vocab, drafts, seed)
        _, p_rows, q_rows, p_draft, q_draft = rows_of(p, q, vocab, drafts)
        weights, masses = jax.device_get(chances(p_draft, q_draft, p_rows, q_rows))
        drawn = np.prod(q_draft.astype(np.float64), axis=1)
        together = drawn @ (number_law(weights, masses) @ np.arange(drafts + 1))
        ratio = np.minimum(1, p_draft / q_draft).astype(np.float64)
        one_by_one = drawn @ np.cumprod(ratio, axis=1).sum(axis=1)
        gains.append(together - one_by_one)
        assert together >= one_by_one - 1e-6
        first = drawn @ np.minimum(1, ratio[:, 0])
        law = number_law(weights[:, :2], masses[:, :1])
        assert abs(drawn @ law[:, 1] - first) < 1e-6
    assert np.mean(gains) > 0.005


@quick_compile.jit
def accepted(u, weights, masses, considered):
    return block_rule.num_accepted(u, weights, masses, considered)


def test_the_last_prefix_that_stays_counts():
    """By hand: of weights 1, .5, .25 and masses .2, .3 the chances are .3 / (.3 + .5) and .25."""
    weights = np.float32([[1, 0.5, 0.25]] * 5)
    masses = np.float32([[0.2, 0.3]] * 5)
    u = np.float32([[0.37, 0.3], [0.38, 0.3], [0.38, 0.24], [0.37, 0.24], [0.4, 0.0]])
    both = np.ones((5, 2), bool)
    np.testing.assert_array_equal(accepted(u, weights, masses, both), [1, 0, 2, 2, 2])
    only_first = both & [True, False]  # then the first one's chance is its weight
    np.testing.assert_array_equal(accepted(u, weights, masses, only_first), [1, 1, 1, 1, 1])
    np.testing.assert_array_equal(accepted(u, weights, masses, ~both), [0] * 5)


def test_weights_where_a_draft_has_no_probability():
    """q = 0 with p > 0 is a ratio without a bound; p = 0 ends a text; nothing is NaN."""
    p = np.float32([[0.5, 0.5], [0, 0.5], [0.5, 0], [0, 0]])
    q = np.float32([[0, 1], [0, 0.5], [1, 0], [0.5, 0.5]])
    weights = quick_compile.jit(block_rule.prefix_weights)(p, q, np.ones((4, 2), bool))
    np.testing.assert_array_equal(weights, [[1, 1, 0.5], [1, 0, 0], [1, 0.5, 0], [1, 0, 0]])
