"""Sampled tokens follow the target's processed distribution: a chi-square through the whole loop.

Thousands of requests with different seeds run through worker, messages and output processor; the
joint frequencies of their first three tokens are held against the product of exact conditional
probabilities, float64, from an independent forward pass.
"""

import functools
import itertools

import numpy as np
import pytest
from scipy import stats

from jax_specdec.device.model.params import named_arrays
from jax_specdec.device.sampling.verify import accept_draft
from tests.jax_specdec.device.sampling.test_distribution import expected_probs
from tests.support import reference_model
from tests.support.decoding import random_model, request, run

VOCAB, TOKENS, COUNT = 6, 3, 2500
TEMPERATURE, TOP_P = 1.2, 0.93
PROMPT = (4,) * 8  # this model goes on with 4 two times out of three: n-grams are often right


def always(u, p, q):
    """A broken rule: every draft of positive probability is accepted."""
    return p > 0


@functools.cache
def exact():
    """Probability of every triple of tokens after the prompt. [V, V, V] float64"""
    params, config = random_model(VOCAB, scale=2.0)
    weights, sizes = named_arrays(params), config.to_dict()

    @functools.cache
    def conditional(prefix):
        row = reference_model.logits(weights, sizes, [*PROMPT, *prefix])[-1]
        return expected_probs(row, TEMPERATURE, 0, TOP_P, 0.0)

    table = np.zeros((VOCAB,) * TOKENS)
    for a, b, c in itertools.product(range(VOCAB), repeat=TOKENS):
        if conditional(())[a] and conditional((a,))[b]:
            table[a, b, c] = conditional(())[a] * conditional((a,))[b] * conditional((a, b))[c]
    return table


def p_value(name, accept):
    options = {"max_tokens": TOKENS, "temperature": TEMPERATURE, "top_p": TOP_P}
    requests = [request(str(seed), PROMPT, seed=seed, **options) for seed in range(COUNT)]
    result = run(
        requests,
        name,
        num_slots=500,
        max_length=16,
        chunk=8,
        accept=accept,
        model=random_model(VOCAB, scale=2.0),
    )
    found = result.state.statistics
    assert found.num_accepted > COUNT / 10
    if accept is accept_draft:
        assert found.num_drafts - found.num_accepted > COUNT / 10
    observed = np.zeros((VOCAB,) * TOKENS)
    for item in requests:
        observed[tuple(result.token_ids(item.id))] += 1
    expected = COUNT * exact()
    if observed[expected == 0].any():
        return 0.0
    frequent = expected >= 5
    cells = np.append(observed[frequent], observed[~frequent].sum())
    wanted = np.append(expected[frequent], expected[~frequent].sum())
    return stats.chisquare(cells[wanted > 0], wanted[wanted > 0]).pvalue


@pytest.mark.parametrize("name", ["mtp", "ngram"])
def test_the_distribution_is_the_targets(name):
    np.testing.assert_allclose(exact().sum(), 1.0, rtol=1e-12)
    kept = int((exact() > 0).sum())
    assert 30 < kept < VOCAB**TOKENS  # top-p cuts, and leaves enough to tell
    assert p_value(name, accept_draft) > 1e-3


@pytest.mark.parametrize("name", ["mtp", "ngram"])
@pytest.mark.slow
def test_a_broken_acceptance_rule_fails(name):
    assert p_value(name, always) < 1e-9
