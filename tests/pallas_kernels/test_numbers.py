"""Numbers: threefry's words, logarithms and noise, their bits and their values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32

from pallas_kernels.lowering import row_pieces
from pallas_kernels.lowering.prevent_recompute import prevent_recompute
from pallas_kernels.numbers import ordered_keys, random_draws
from pallas_kernels.numbers.exponential import EXP2, exponential
from pallas_kernels.numbers.logarithm import log_of_total, logarithm
from pallas_kernels.numbers.quotient import quotient
from pallas_kernels.numbers.random_draws import ACCEPT, GROUP, Source, threefry_word
from tests.support.quick_compile import as_users

SEEDS = np.array([0, 1, 7, 2**31, 2**32 - 1], np.uint32)
POSITIONS = np.array([0, 1, -1, 2**31 - 1, -(2**31)], np.int32)
ALL = [np.ravel(x) for x in np.meshgrid(SEEDS, POSITIONS, POSITIONS)]


def of_jax(purpose, seeds, positions, ids):
    """The first words of key (purpose, seed) and counter (position, id), one call each."""
    return [
        threefry_2x32(np.array([purpose, seed], np.uint32), np.array(counter).astype(np.uint32))[0]
        for seed, *counter in zip(seeds, positions, ids, strict=True)
    ]


@pytest.mark.fast
@pytest.mark.parametrize("purpose", [ACCEPT, GROUP])
@pytest.mark.parametrize("transform", [jax.jit, lambda call: call])
def test_words_are_those_of_jaxs_threefry(transform, purpose):
    found = transform(lambda *numbers: threefry_word(numbers[0], purpose, *numbers[1:]))
    np.testing.assert_array_equal(found(*map(jnp.asarray, ALL)), of_jax(purpose, *ALL))


@pytest.mark.fast
def test_uniform_numbers_are_the_leading_bits_of_words():
    seeds, positions = ALL[:2]
    words = np.array(of_jax(ACCEPT, seeds, positions, np.zeros_like(positions)))
    found = random_draws.uniform(Source(jnp.asarray(seeds), jnp.asarray(positions)), ACCEPT)
    np.testing.assert_array_equal(found, (words >> 9) * 2.0**-23)


VALUES = np.concatenate(
    [np.geomspace(1, 3e38, 3000), 1 + np.geomspace(1e-7, 1, 999), [1.0]]
).astype(np.float32)


@pytest.mark.parametrize("function", [logarithm, log_of_total])
def test_near_float64(function):
    exact = np.log(VALUES.astype(np.float64))
    error = np.abs(np.asarray(function(VALUES)) - exact)
    assert (error <= np.spacing(exact.astype(np.float32)).clip(1e-45)).all()


def test_quotients_are_rounded_once():
    """What is exact on a CPU stays, and so do infinities and NaN."""
    rng = np.random.default_rng(0)
    a = -rng.exponential(size=100_000).astype(np.float32) * 100
    b = np.exp(rng.normal(size=a.size)).astype(np.float32)
    np.testing.assert_array_equal(as_users(quotient)(a, b), a / b)
    edges = np.float32([0, -np.inf, -1, np.nan, 1, -1]), np.float32([2, 2, np.nan, 1, 3e38, 1e-38])
    expected = np.float32([0, -np.inf, np.nan, np.nan, 0, -np.inf])
    np.testing.assert_allclose(as_users(quotient)(*edges), expected, atol=1e-38)


def test_an_exponential_is_as_near_as_it_says():
    x = np.linspace(-104, 0, 200_001).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    values = np.asarray(as_users(exponential)(x), np.float64)
    normal = exact >= 2.0**-126
    error = np.abs(values / exact - 1)
    assert (error <= 2e-7 * (1 + np.abs(x)))[normal].all()
    assert (values[~normal] == 0)[1:].all()  # the last one may round up to 2**-126
    assert values.max() <= 1
    few = np.asarray(as_users(exponential)(np.float32([0, -0.0, -1e-30, -200, -np.inf, np.nan])))
    np.testing.assert_array_equal(few, [1, 1, 1, 0, 0, np.nan])
    f = np.linspace(-0.5, 0.5, 100_001)
    polynomial = np.polyval([*map(float, np.float32(EXP2[::-1])), 1.0], f)
    assert 1.5e-8 < np.abs(polynomial / 2**f - 1).max() < 1.6e-8


def test_no_product_of_an_exponential_is_contracted_with_a_sum():
    """Its operations one by one have the bits of one program of all of them."""
    x = np.linspace(-0.7, 0, 1_000_001).astype(np.float32)
    with jax.disable_jit():
        one_by_one = np.asarray(exponential(jnp.asarray(x)))
    np.testing.assert_array_equal(as_users(exponential)(x), one_by_one)


def test_noise_has_both_ends():
    """Of random bits next to 0, which decide for rare tokens, and next to 2**32, to float32."""
    powers = 2 ** np.arange(8, 31)
    low = np.array([0, 1, 2, 100, *powers[:15]])
    bits = np.concatenate([low, 2**32 - powers, [2**32 - 1]]).astype(np.uint32)
    exact = -np.log1p(-(low + 0.5) / 2**32)
    # Of the highest bits float32 has no half, and no more than 24 in a row.
    exact = np.concatenate([exact, -np.log(powers / 2**32), [24 * np.log(2)]])
    np.testing.assert_allclose(
        as_users(random_draws.gumbel_noise)(bits), -np.log(exact), rtol=2e-7, atol=2e-7
    )


def test_logarithms_of_weights():
    """Of the smallest ones too; -inf where there is none, or nothing that counts."""
    weights = np.array([0, 1e-45, 9e-38, 2e-37, 1e-30, 1e-7, 1, 256], np.float32)
    exact = np.concatenate([np.full(3, -np.inf), np.log(weights[3:].astype(np.float64))])
    np.testing.assert_allclose(as_users(random_draws.log_of)(weights), exact, rtol=2e-7)


@pytest.mark.parametrize("of_users", [logarithm, log_of_total])
def test_the_bits_do_not_depend_on_the_company(of_users):
    function = as_users(of_users)
    whole = np.asarray(function(VALUES))
    for i, j in ((i, i + n) for n in (1, 3, 6) for i in range(0, 600, n)):
        np.testing.assert_array_equal(function(VALUES[i:j]), whole[i:j])


NUMBERS = np.array([0, 2**-126, 1 / 3, 1, 2**32, 3e38, np.inf, np.nan], np.float32)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.vmap])
def test_numbers_stay_as_they_are(transform):
    found = np.asarray(transform(prevent_recompute)(jnp.asarray(NUMBERS)))
    np.testing.assert_array_equal(found.view(np.int32), NUMBERS.view(np.int32))


def shifts(noise):
    """How often a program for a CPU computes threefry's last rotation; and the program's noise."""
    seed, ids = jnp.zeros((4, 1), jnp.uint32), jnp.arange(512, dtype=jnp.int32).reshape(4, 128)
    drawn = jax.jit(lambda seed, ids: noise(threefry_word(seed, 1, ids, ids)))
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        text = drawn.lower(seed, ids).compile().as_text()
        return text.count(" shift-right-logical("), np.asarray(drawn(seed, ids))


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
@pytest.mark.parametrize("number", [1, 2, 3, 6, 594])  # of a row, cut into four pieces
@pytest.mark.parametrize("way", ["_in_two_loops", "_in_one_loop"])  # a CPU's, and all others'
def test_the_largest_number_has_its_first_id(way, number, transform, monkeypatch):
    monkeypatch.setattr(row_pieces, "_in_two_loops", getattr(row_pieces, way))
    values = np.array([-np.inf, -3.0, -0.0, 0.0, 1e-40, 2.0], np.float32)
    rng = np.random.default_rng(number)
    x = np.stack([rng.choice(values[: 1 + i % 6], number) for i in range(60)])
    ids = np.stack([rng.permutation(number) * np.int32(10**6) - 1 for _ in x]).astype(np.int32)
    largest, first = transform(ordered_keys.largest_and_first)(x, ids)
    np.testing.assert_array_equal(largest, x.max(axis=1))
    np.testing.assert_array_equal(
        first, np.where(x == x.max(axis=1)[:, None], ids, 2**31 - 1).min(1)
    )


def test_random_bits_are_made_once():
    once, found = shifts(random_draws.gumbel_of_bits)
    again, expected = shifts(random_draws.gumbel_noise)
    np.testing.assert_array_equal(found, expected)
    assert again >= 2 * once  # without it, for each part of the noise
