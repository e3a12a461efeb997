"""The random words are those of `jax.random`, jitted and not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_specdec.device.sampling import threefry
from jax_specdec.device.sampling.random_draws import ACCEPT, DRAFT, keys, uniform

pytestmark = pytest.mark.fast

SEEDS = jnp.array([0, 1, 7, 2**31, 2**32 - 1], jnp.uint32)
NUMBERS = jnp.array([0, 1, -1, 2**31 - 1, -(2**31)], jnp.int32)


def of_jax(seed, *numbers):
    key = jax.random.key(seed)
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return key


@pytest.mark.parametrize("transform", [jax.jit, lambda call: call])
def test_words_are_those_of_jax_random(transform):
    found = transform(lambda s, n: threefry.fold_in(threefry.key_of(s), n))(SEEDS, NUMBERS)
    expected = jax.vmap(lambda s, n: jax.random.key_data(of_jax(s, n)))(SEEDS, NUMBERS)
    np.testing.assert_array_equal(np.stack(found, axis=1), expected)


@pytest.mark.parametrize("purpose", [ACCEPT, DRAFT])
def test_keys_and_uniform_numbers_are_those_of_jax_random(purpose):
    def expected(seed, position):
        key = of_jax(seed, position, purpose)
        return jax.random.key_data(key), jax.random.uniform(key, (), jnp.float32)

    made = keys(SEEDS, NUMBERS, purpose)
    words, numbers = jax.vmap(expected)(SEEDS, NUMBERS)
    np.testing.assert_array_equal(np.stack(made, axis=1), words)
    np.testing.assert_array_equal(uniform(made), numbers)
