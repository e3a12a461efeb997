"""Drafters in the worker's own loop change no token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_specdec.device.drafting import draw
from jax_specdec.device.drafting.corpus import Corpus
from jax_specdec.device.drafting.drafters import MtpDrafter, NgramDrafter, NoDrafter
from jax_specdec.device.drafting.from_function import CallableDrafter
from jax_specdec.device.drafting.suffix import SuffixDrafter
from pallas_kernels.sampling.types import Drafts
from tests.support.decoding import VOCAB, random_model, request, run

D = 3


def guesses(params, context):
    """Drafts drawn from logits that favor the last token and the next id."""
    last = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)[:, 0]
    drawn = []
    for ahead in range(D):
        logits = 2 * jax.nn.one_hot(last, VOCAB) + jax.nn.one_hot((last + 1) % VOCAB, VOCAB)
        place = context.lengths + ahead
        drawn.append(
            draw(logits[:, None], context.sampling, place, report_drafts=context.report_drafts)
        )
        last = drawn[-1].token_ids[:, 0]
    return Drafts.joined(drawn, context.limit)


DRAFTERS = {
    "ngram": lambda: NgramDrafter(D),
    "suffix": lambda: SuffixDrafter(D),
    "callable": lambda: CallableDrafter(guesses, D, VOCAB, drawn=True),
    "mtp": lambda: MtpDrafter(random_model()[1], D),
}
# Prompts around the borders of chunks; without logprobs, which other tests hold against float64.
REQUESTS = [
    request(f"r{size}", np.random.default_rng(size).integers(0, VOCAB, size), max_tokens=24)
    for size in (1, 8, 9, 17, 25)
]


@pytest.fixture(scope="module")
def plain():
    return run(REQUESTS, "none")


def accepted_of(result):
    records = [record for found in result.records.values() for record in found]
    return sum(r.num_accepted for r in records), sum(r.num_drafts for r in records)


@pytest.mark.parametrize(
    "name", ["suffix", "mtp", pytest.param("callable", marks=pytest.mark.slow)]
)
def test_greedy_ids_are_those_of_plain_decoding(plain, name):
    result = run(REQUESTS, DRAFTERS[name]())
    accepted, proposed = accepted_of(result)
    assert 0 < accepted < proposed
    for item in REQUESTS:
        assert result.token_ids(item.id) == plain.token_ids(item.id)


@pytest.mark.parametrize("name", ["suffix", "ngram"])
def test_sampled_ids_are_those_of_plain_decoding(name):
    """Certain drafts change no token of a seed, at the width of plain decoding's steps either."""
    requests = [
        dataclasses.replace(item, params=dataclasses.replace(item.params, temperature=0.4, seed=n))
        for n, item in enumerate(REQUESTS)
    ]
    result, narrow = run(requests, DRAFTERS[name]()), run(requests, NoDrafter())
    accepted, proposed = accepted_of(result)
    assert 0 < accepted < proposed
    for item in requests:
        assert result.token_ids(item.id) == narrow.token_ids(item.id)


@pytest.mark.slow
def test_a_corpus_of_the_answers_makes_nearly_every_draft_right(plain):
    """The corpus holds the answers; the tokens stay the same."""
    answers = [np.array([*item.prompt_token_ids, *plain.token_ids(item.id)]) for item in REQUESTS]
    result = run(REQUESTS, SuffixDrafter(D, Corpus.of(answers)))
    accepted, proposed = accepted_of(result)
    assert accepted > 60
    assert accepted / proposed > 0.9
    for item in REQUESTS:
        assert result.token_ids(item.id) == plain.token_ids(item.id)


def test_repetitive_text_is_drafted_whole():
    """A model that repeats itself: all drafts of the later steps are accepted."""
    params, config = random_model()
    flat = dataclasses.replace(params, layers=jax.tree.map(jnp.zeros_like, params.layers))
    item = request("r", [1, 2, 3], max_tokens=60)
    result = run([item], SuffixDrafter(D), model=(flat, config))
    later = result.records["r"][8:]
    assert sum(record.num_accepted for record in later) == sum(r.num_drafts for r in later) > 20
    assert result.token_ids("r") == run([item], "none", model=(flat, config)).token_ids("r")
