"""The logarithm: near float64's, and the same bits whatever stands beside a number."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.logarithm import logarithm

VALUES = np.concatenate(
    [
        np.geomspace(1, 3e38, 3000),
        1 + np.geomspace(1e-7, 1, 999),
        [1.0],
    ]
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


def test_the_bits_do_not_depend_on_the_company():
    assert differing(jax.jit(logarithm)) == 0


def test_jaxs_own_bits_do():
    """The control, on a CPU."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        assert differing(jax.jit(jnp.log)) > 0
