"""Adaptive draft length: the rule, the statistics, and the drafters that they limit."""

import functools

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_specdec.device.drafting.adaptive import Adaptive, best_length, updated
from jax_specdec.device.drafting.drafters import Chunk, NgramDrafter, NoDrafter
from jax_specdec.device.drafting.from_function import CallableDrafter
from pallas_kernels.sampling.types import Drafts
from tests.support import quick_compile
from tests.support.decoding import VOCAB
from tests.support.draft_contexts import context

D = 4


def plain_average(acceptance, steps, weight):
    """The average, updated by one draft after the other."""
    for accepted, proposed in steps:
        for fate in [1] * accepted + [0] * (accepted < proposed):
            acceptance += weight * (fate - acceptance)
    return acceptance


UPDATED = quick_compile.jit(updated, static_argnums=3)
STEPS = st.lists(st.tuples(st.integers(0, D), st.integers(0, D)).map(sorted), max_size=30)


class Rule(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_the_length_that_makes_most_tokens_in_a_time(self):
        rates = [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 1.0]
        for cost in (0.0, 0.05, 0.3):
            got = self.variant(lambda a, c=cost: best_length(a, 8, c))(jnp.array(rates)).tolist()
            for rate, length in zip(rates, got, strict=True):
                speed = [sum(rate**i for i in range(d + 1)) / (1 + cost * d) for d in range(9)]
                np.testing.assert_allclose(speed[length], max(speed), rtol=1e-6)
            assert got == sorted(got)
            assert (got[0], got[-1]) == (0, 8)

    @chex.variants(with_jit=True, without_jit=True)
    def test_what_verification_did_not_reach_counts_for_nothing(self):
        got = self.variant(lambda *x: updated(*x, 0.5))(
            jnp.full(5, 0.5), jnp.array([0, 0, 1, 2, 1]), jnp.array([0, 3, 1, 2, 3])
        )
        np.testing.assert_allclose(got, [0.5, 0.25, 0.75, 0.875, 0.375])


@given(st.lists(STEPS, min_size=3, max_size=3), st.sampled_from([0.05, 0.3]))
def test_the_average_against_plain_python(slots, weight):
    got = np.ones(3, np.float32)
    for step in range(max(map(len, slots))):
        now = [steps[step] if step < len(steps) else (0, 0) for steps in slots]
        accepted, proposed = np.array(now, np.int32).T
        got = UPDATED(got, accepted, proposed, weight)
    expected = [plain_average(1.0, steps, weight) for steps in slots]
    np.testing.assert_allclose(got, expected, atol=1e-5)


@functools.cache
def proposing(adaptive):
    return quick_compile.jit(lambda *args: adaptive.propose(None, *args))


def test_the_inner_drafter_gets_the_length_as_its_limit():
    adaptive = Adaptive(NgramDrafter(3), draft_cost=0.2)
    _, state = adaptive.init(3, 12)
    state = state._replace(acceptance=jnp.array([1.0, 0.5, 0.0]))
    seen = context([[6] * 8] * 3)
    drafts, after = proposing(adaptive)(state, seen)
    expected = [3, int(best_length(jnp.array([0.5]), 3, 0.2)[0]), 1]
    assert expected == [3, 1, 1]
    np.testing.assert_array_equal(drafts.num, expected)
    np.testing.assert_array_equal(after.acceptance, state.acceptance)  # nothing was verified
    drafts, _ = proposing(adaptive)(state, seen._replace(limit=jnp.array([2, 0, 0])))
    np.testing.assert_array_equal(drafts.num, [2, 0, 0])


def test_a_prompt_resets_its_slot_wherever_it_starts():
    """Its first chunks may have been copied from another slot."""
    adaptive = Adaptive(NgramDrafter(3))
    _, state = adaptive.init(3, 12)
    state = state._replace(acceptance=jnp.array([0.25, 0.5, 0.75]))
    hidden, tokens = jnp.zeros((8, 4)), jnp.zeros(8, jnp.int32)
    for start in (0, 8):
        chunk = Chunk(hidden, tokens, tokens, jnp.int32(start), jnp.int32(4), jnp.int32(1))
        after = adaptive.prefill(None, state, chunk)
        np.testing.assert_array_equal(after.acceptance, [0.25, 1.0, 0.75])


def stubborn(params, context):
    """Proposes three drafts, whatever the limit."""
    drafts = jnp.zeros((context.limit.shape[0], 3), jnp.int32)
    return Drafts(drafts, jnp.full(context.limit.shape, 3), None)


def test_the_length_holds_for_a_drafter_that_ignores_it():
    adaptive = Adaptive(CallableDrafter(stubborn, 3, VOCAB))
    _, state = adaptive.init(2, 12)
    state = state._replace(acceptance=jnp.array([1.0, 0.0]))
    drafts, _ = proposing(adaptive)(state, context([[1]] * 2))
    np.testing.assert_array_equal(drafts.num, [3, 1])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"drafter": NoDrafter()}, "there is nothing to adapt"),
        ({"min_drafts": 0}, "from 1 to the 3 drafts"),
        ({"min_drafts": 4}, "from 1 to the 3 drafts"),
        ({"draft_cost": 1.0}, "never pays"),
        ({"draft_cost": -0.1}, "from 0"),
        ({"weight": 0.0}, "between 0 and 1"),
    ],
)
def test_what_cannot_work_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Adaptive(**{"drafter": NgramDrafter(3)} | fields)
