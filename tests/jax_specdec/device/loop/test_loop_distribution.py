"""Sampled tokens follow the target's processed distribution: a chi-square through the whole loop.

Thousands of requests with different seeds and filters run through worker, messages and output
processor, on a vocabulary of five groups of tokens. The joint frequencies of their first three
tokens are held against products of exact conditional probabilities, float64, from an independent
forward pass.
"""

import functools
from dataclasses import replace

import numpy as np
import pytest

from jax_specdec.device.drafting.corpus import Corpus
from jax_specdec.device.drafting.suffix import SuffixDrafter
from jax_specdec.device.model.params import named_arrays
from tests.support import reference_model
from tests.support.decoding import random_model, request, run
from tests.support.expected_probs import expected_probs
from tests.support.token_statistics import p_value

VOCAB, TOKENS, COUNT = 1100, 3, 2500
PROMPT = (11,) * 8  # one time out of three the model goes on with 11: n-grams are often right
FILTERS = {  # requests take turns
    "none": {"temperature": 0.9},
    "top-k": {"temperature": 1.0, "top_k": 40},
    "top-p": {"temperature": 1.2, "top_p": 0.8},
    "min-p": {"temperature": 1.0, "min_p": 0.02},
    "all": {"temperature": 1.1, "top_k": 300, "top_p": 0.93, "min_p": 0.001},
}
DRAFTERS = {
    "mtp": "mtp",
    "ngram": "ngram",
    "none": "none",
    "suffix": SuffixDrafter(3, Corpus.of([np.array(PROMPT * 2)])),
}


@functools.cache
def model():
    """Rows with a few likely tokens and a tail of unlikely ones, in all groups."""
    params, config = random_model(VOCAB, scale=1.0)
    return replace(params, embedding=3 * params.embedding), config


@functools.cache
def logits_after(prefix):
    params, config = model()
    return reference_model.logits(named_arrays(params), config.to_dict(), [*PROMPT, *prefix])[-1]


@functools.cache
def conditional(name, prefix):
    """Probabilities [V] float64 of the token after the prompt and `prefix`."""
    given = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | FILTERS[name]
    order = ("temperature", "top_k", "top_p", "min_p")
    return expected_probs(logits_after(prefix), *(given[key] for key in order))


def p_values(drafting, accept):
    """Of each filter, from one run of all requests."""
    names = list(FILTERS)
    requests = [
        request(str(n), PROMPT, seed=n, max_tokens=TOKENS, **FILTERS[names[n % len(names)]])
        for n in range(COUNT)
    ]
    result = run(
        requests, drafting, num_slots=500, max_length=16, chunk=8, accept=accept, model=model()
    )
    found = result.state.statistics
    if drafting != "none":
        assert found.num_accepted > COUNT / 20
        assert accept is not None or found.num_drafts - found.num_accepted > COUNT / 20
    tokens = [result.token_ids(item.id) for item in requests]
    return [
        p_value(tokens[n :: len(names)], functools.partial(conditional, name))
        for n, name in enumerate(names)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_distribution_is_the_targets(name):
    """Every filter cuts, several groups of tokens are drawn from, and cells are many."""
    for filtered in FILTERS:
        kept = np.flatnonzero(conditional(filtered, ()))
        assert filtered == "none" or len(kept) < VOCAB
        assert len(set(kept // 256)) > 2
    assert min(p_values(DRAFTERS[name], None)) > 1e-3 / len(FILTERS)


@pytest.mark.slow
def test_a_broken_acceptance_rule_fails():
    """Every draft of positive probability is accepted."""
    assert max(p_values("ngram", lambda u, p, q: p > 0)) < 1e-9
