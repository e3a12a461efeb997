"""What several operations use: the same numbers, and on a CPU computed once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.lowering.prevent_recompute import prevent_recompute
from pallas_kernels.numbers.random_draws import gumbel_noise, gumbel_of_bits, threefry_word

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


def test_random_bits_are_made_once():
    once, found = shifts(gumbel_of_bits)
    again, expected = shifts(gumbel_noise)
    np.testing.assert_array_equal(found, expected)
    assert again >= 2 * once  # without it, for each part of the noise
