"""The random words are those of jax's own threefry, jitted and not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32

from pallas_kernels.numbers.random_draws import ACCEPT, GROUP, Source, threefry_word, uniform

pytestmark = pytest.mark.fast

SEEDS = np.array([0, 1, 7, 2**31, 2**32 - 1], np.uint32)
NUMBERS = np.array([0, 1, -1, 2**31 - 1, -(2**31)], np.int32)
ALL = [np.ravel(x) for x in np.meshgrid(SEEDS, NUMBERS, NUMBERS)]


def of_jax(purpose, seeds, positions, ids):
    """The first words of key (purpose, seed) and counter (position, id), one call each."""
    return [
        threefry_2x32(np.array([purpose, seed], np.uint32), np.array(counter).astype(np.uint32))[0]
        for seed, *counter in zip(seeds, positions, ids, strict=True)
    ]


@pytest.mark.parametrize("purpose", [ACCEPT, GROUP])
@pytest.mark.parametrize("transform", [jax.jit, lambda call: call])
def test_words_are_those_of_jaxs_threefry(transform, purpose):
    found = transform(lambda *numbers: threefry_word(numbers[0], purpose, *numbers[1:]))
    np.testing.assert_array_equal(found(*map(jnp.asarray, ALL)), of_jax(purpose, *ALL))


def test_uniform_numbers_are_the_leading_bits_of_words():
    seeds, positions = ALL[:2]
    words = np.array(of_jax(ACCEPT, seeds, positions, np.zeros_like(positions)))
    found = uniform(Source(jnp.asarray(seeds), jnp.asarray(positions)), ACCEPT)
    np.testing.assert_array_equal(found, (words >> 9) * 2.0**-23)
