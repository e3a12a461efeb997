"""The processed distribution against a plain float64 statement of it, and the draws from it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_specdec.requests import MAX_TEMPERATURE, MIN_TEMPERATURE, RequestError, SamplingParams
from pallas_kernels.numbers.random_draws import ACCEPT, DRAFT, Source, uniform
from pallas_kernels.sampling.parameters import Sampling
from tests.support import quick_compile
from tests.support.expected_probs import expected_probs
from tests.support.processed_probs import processed_probs

pytestmark = pytest.mark.fast


def sampling_of(temperature, top_k=0, top_p=1.0, min_p=0.0, batch=1):
    return Sampling(
        temperature=jnp.full(batch, temperature, jnp.float32),
        top_k=jnp.full(batch, top_k, jnp.int32),
        top_p=jnp.full(batch, top_p, jnp.float32),
        min_p=jnp.full(batch, min_p, jnp.float32),
        seed=jnp.zeros(batch, jnp.uint32),
    )


logit = st.sampled_from([0.0, -0.0, 1.0, 2.0, -1.0, -np.inf]) | st.floats(-6, 6, width=32)
odd_logit = logit | st.sampled_from([np.nan, np.inf])


@given(
    row=st.lists(logit, min_size=1, max_size=9) | st.lists(odd_logit, min_size=1, max_size=4),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_k=st.integers(0, 5),
    # Few values, so that few boundaries are near.
    top_p=st.sampled_from([0.3, 0.61, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.07, 0.33]),
)
def test_every_filter_as_the_contract_says(row, temperature, top_k, top_p, min_p):
    row = widened(row)
    expected = expected_probs(row, temperature, top_k, top_p, min_p)
    got = PROBS(row[None, None], sampling_of(temperature, top_k, top_p, min_p))[0, 0]
    # Sums at a boundary may round to either side: one token more or less is right, too.
    near = near_boundary(row, temperature, top_k, top_p, min_p)
    if not near:
        np.testing.assert_allclose(got, expected, atol=2e-6)
    np.testing.assert_allclose(np.sum(got), 1.0, atol=1e-6)


PROBS = quick_compile.jit(processed_probs)


def widened(row):
    """A row of 9 tokens [9], so that one program serves all; -inf is a legal, masked token."""
    return np.array([*row, *[-np.inf] * (9 - len(row))], np.float32)


def near_boundary(row, temperature, top_k, top_p, min_p):
    if temperature == 0 or not np.isfinite(row).any() or np.isnan(row).any() or np.inf in row:
        return False
    for shift in (-1e-5, 1e-5):
        nudged = expected_probs(row, temperature, top_k, min(top_p + shift, 1.0), min_p + shift)
        plain = expected_probs(row, temperature, top_k, top_p, min_p)
        if ((nudged > 0) != (plain > 0)).any() and (top_p < 1 or min_p > 0):
            return True
    return False


def test_ties_at_a_boundary_keep_the_lowest_ids():
    row = [1.0, 3.0, 3.0, 3.0, -0.0, 0.0]
    for part, filters, kept in [
        (row, {"top_k": 2}, [1, 2]),
        (row[4:], {"top_k": 1}, [0]),  # -0.0 equals 0.0
        (row[1:4], {"top_p": 0.34}, [0, 1]),
    ]:
        probs = np.asarray(PROBS(widened(part)[None, None], sampling_of(1.0, **filters)))[0, 0]
        np.testing.assert_array_equal(np.flatnonzero(probs), kept)
        np.testing.assert_allclose(probs[kept], 1 / len(kept), rtol=1e-6)


def test_rows_do_not_disturb_each_other():
    rows = jnp.array([[[0.0, 1.0, 2.0], [jnp.nan, 5.0, jnp.inf]], [[2.0, 2.0, 1.0], [0, 0, 0.0]]])
    mixed = sampling_of(1.0, batch=2)._replace(temperature=jnp.array([1.0, 0.0]))
    probs = np.asarray(PROBS(rows, mixed))
    np.testing.assert_allclose(probs[0, 0], np.exp([0, 1, 2]) / np.exp([0, 1, 2]).sum(), rtol=1e-6)
    np.testing.assert_array_equal(probs[0, 1], [0, 0, 1])  # invalid: its greedy token
    np.testing.assert_array_equal(probs[1], [[1, 0, 0], [1, 0, 0]])


@pytest.mark.parametrize("temperature", [MIN_TEMPERATURE, 1.0, MAX_TEMPERATURE, 3e38])
def test_a_masked_token_has_no_probability_at_any_temperature(temperature):
    row = widened([1.0, 2.0, -np.inf, 0.0])
    for top_p in (1.0, 0.99):
        probs = np.asarray(PROBS(row[None, None], sampling_of(temperature, top_p=top_p)))[0, 0]
        expected = expected_probs(row, temperature, 0, top_p, 0.0)
        assert probs[2] == 0
        np.testing.assert_allclose(probs, expected, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, MIN_TEMPERATURE, 1.0, MAX_TEMPERATURE])
def test_temperatures_that_are_served(temperature):
    assert SamplingParams(temperature=temperature).temperature == temperature


@pytest.mark.parametrize("wrong", [-1.0, 9e-5, 1e-42, 1.1e4, 3e38, np.inf, np.nan])
def test_temperatures_that_are_refused(wrong):
    with pytest.raises(RequestError, match=re.escape(f"temperature = {wrong} must be 0")):
        SamplingParams(temperature=wrong)


def test_random_numbers_depend_on_seed_position_and_purpose_alone():
    @quick_compile.jit
    def draw(s, p):
        return uniform(Source(s, p), ACCEPT), uniform(Source(s, p), DRAFT)

    seeds = np.array([[3, 3, 4], [3, 3, 4]], np.uint32)
    positions = np.array([[7, 8, 7], [7, 8, 7]], np.int32)
    accept, draft = jax.device_get(draw(seeds, positions))
    np.testing.assert_array_equal(accept[0], accept[1])
    numbers = np.concatenate([accept[0], draft[0]])
    assert len(set(numbers.tolist())) == 6
    alone = uniform(Source(*map(jnp.asarray, (seeds[:1, 2:], positions[:1, 2:]))), ACCEPT)
    np.testing.assert_array_equal(alone, accept[:1, 2:])  # without jit, too
