"""Sampled tokens stay independent draws of p, however a drafter uses the tokens that it has seen.

The target here says the same p in every row, so that any dependence between emitted tokens is the
drafter's doing: thousands of slots run real drafters and real verification for many steps, without
a model in between.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jax_specdec.device.drafting.corpus import Corpus
from jax_specdec.device.drafting.drafters import Context
from jax_specdec.device.drafting.from_function import CallableDrafter
from jax_specdec.device.drafting.suffix import SuffixDrafter
from pallas_kernels.sampling.drafts import draw
from pallas_kernels.sampling.parameters import Sampling
from pallas_kernels.sampling.types import Drafts
from pallas_kernels.sampling.verification import verify
from tests.support import quick_compile

P, Q = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.25, 0.15, 0.2, 0.4])
SLOTS, STEPS, D = 5_000, 7, 3


def guesses(params, context):
    """Drafts drawn from Q, without a look at the text."""
    row = jnp.broadcast_to(jnp.log(jnp.asarray(Q, jnp.float32)), (SLOTS, 1, 4))
    row = quick_compile.unknown(row)
    places = [context.lengths + ahead for ahead in range(D)]
    return Drafts.joined([draw(row, context.sampling, place) for place in places], context.limit)


def picky(params, context):
    """The same, up to the first draft with id 3: a length that looks at values."""
    drafts = guesses(params, context)
    liked = jnp.cumprod((drafts.token_ids < 3).astype(jnp.int32), axis=1)
    return drafts._replace(num=jnp.minimum(drafts.num, liked.sum(axis=1, dtype=jnp.int32)))


def drawn(function):
    return CallableDrafter(function, D, 4, drawn=True)


@partial(quick_compile.jit, static_argnums=0)
def emitted(drafter):
    """Tokens [B, T], how many of them each slot has [B], and its drafts in each step [N, B]."""
    length = STEPS * (D + 1) + 1
    sampling = Sampling.greedy(SLOTS)._replace(
        temperature=jnp.ones(SLOTS), seed=jnp.arange(SLOTS, dtype=jnp.uint32)
    )
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(P, jnp.float32)), (SLOTS, D + 1, 4))
    logits = quick_compile.unknown(logits)
    index = jnp.arange(D + 1, dtype=jnp.int32)[None, :]
    slots = jnp.arange(SLOTS)[:, None]

    def advance(carry, _):
        tokens, lengths, drafts, state = carry
        verified = verify(logits, drafts, sampling, lengths)
        where = jnp.where(index < verified.num_tokens[:, None], lengths[:, None] + index, length)
        tokens = tokens.at[slots, where].set(verified.token_ids, mode="drop")
        lengths = lengths + verified.num_tokens
        context = Context(
            tokens=tokens,
            lengths=lengths,
            verified=verified,
            num_drafts=drafts.num,
            hidden=jnp.zeros((SLOTS, D + 1, 1)),
            positions=jnp.zeros((SLOTS, D + 1), jnp.int32),
            sampling=sampling,
            limit=jnp.full(SLOTS, D, jnp.int32),
        )
        proposed, state = drafter.propose(None, state, context)
        return (tokens, lengths, proposed, state), drafts.num

    drafts, state = drafter.init(SLOTS, length)
    tokens = jnp.zeros((SLOTS, length), jnp.int32)
    begun = tokens, jnp.ones(SLOTS, jnp.int32), drafts, state
    (tokens, lengths, _, _), nums = jax.lax.scan(advance, begun, length=STEPS)
    return tokens, lengths, nums


def p_value(drafter):
    """The least p-value of neighboring tokens over the places that every slot reached."""
    tokens, lengths, _ = map(np.asarray, emitted(drafter))
    assert lengths.min() > STEPS
    worst = 1.0
    for place in range(1, STEPS):
        pairs = tokens[:, place] * 4 + tokens[:, place + 1]
        observed = np.bincount(pairs, minlength=16)
        worst = min(worst, stats.chisquare(observed, SLOTS * np.outer(P, P).ravel()).pvalue)
    return worst


SUFFIX = SuffixDrafter(
    D, Corpus.of([np.array([0, 1, 2, 3, 0, 2, 1, 0])]), max_match=4, max_candidates=8
)


@pytest.mark.parametrize(
    ("drafter", "lengths"),
    [
        pytest.param(SUFFIX, {1, 2, 3}, id="suffix"),
        pytest.param(drawn(guesses), {D}, id="drawn", marks=pytest.mark.slow),
    ],
)
def test_tokens_are_independent_draws_of_the_targets(drafter, lengths):
    assert p_value(drafter) > 1e-3
    assert set(np.ravel(emitted(drafter)[2][2:])) >= lengths


@pytest.mark.slow
def test_a_length_that_looks_at_the_drafts_is_noticed():
    assert p_value(drawn(picky)) < 1e-9
