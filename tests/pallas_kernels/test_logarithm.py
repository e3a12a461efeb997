"""The logarithm: near float64's, and the same bits whatever stands beside a number; its noise."""

import numpy as np

from pallas_kernels.lowering.forms import logarithm
from pallas_kernels.numbers.random_draws import gumbel_noise, log_of
from tests.support.quick_compile import as_users

VALUES = np.concatenate(
    [np.geomspace(1, 3e38, 3000), 1 + np.geomspace(1e-7, 1, 999), [1.0]]
).astype(np.float32)


def differing(function):
    """How many results depend on the number of values that are given at once."""
    whole = np.asarray(function(VALUES))
    return sum(
        (np.asarray(function(VALUES[i : i + n])) != whole[i : i + n]).sum()
        for n in (1, 3, 6)
        for i in range(0, 600, n)
    )


def test_near_float64():
    exact = np.log(VALUES.astype(np.float64))
    error = np.abs(np.asarray(logarithm(VALUES)) - exact)
    assert (error <= np.spacing(exact.astype(np.float32)).clip(1e-45)).all()


def test_noise_has_both_ends():
    """Of random bits next to 0, which decide for rare tokens, and next to 2**32, to float32."""
    powers = 2 ** np.arange(8, 31)
    low = np.array([0, 1, 2, 100, *powers[:15]])
    bits = np.concatenate([low, 2**32 - powers, [2**32 - 1]]).astype(np.uint32)
    exact = -np.log1p(-(low + 0.5) / 2**32)
    # Of the highest bits float32 has no half, and no more than 24 in a row.
    exact = np.concatenate([exact, -np.log(powers / 2**32), [24 * np.log(2)]])
    np.testing.assert_allclose(as_users(gumbel_noise)(bits), -np.log(exact), rtol=2e-7, atol=2e-7)


def test_logarithms_of_weights():
    """Of the smallest ones too; -inf where there is none, or nothing that counts."""
    weights = np.array([0, 1e-45, 9e-38, 2e-37, 1e-30, 1e-7, 1, 256], np.float32)
    exact = np.concatenate([np.full(3, -np.inf), np.log(weights[3:].astype(np.float64))])
    np.testing.assert_allclose(as_users(log_of)(weights), exact, rtol=2e-7)


def test_the_bits_do_not_depend_on_the_company():
    assert differing(as_users(logarithm)) == 0
