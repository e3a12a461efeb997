"""A logarithm with the same bits in every program.

XLA computes whole vectors of logarithms in another way than the few that are left over, on a CPU 1
in 30 differently: a row's logprobs would depend on how many rows a batch has.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32

from pallas_kernels.numbers.exponential import Multiply, product_apart

# Of log((1 + s) / (1 - s)) / s - 2 by s**2, and log(2) in two parts, the first of which is exact in
# a product with an exponent. FreeBSD msun, e_logf.c, http://www.netlib.org/fdlibm/.
SERIES = (0.66666662693, 0.40000972152, 0.28498786688, 0.24279078841)

LOG2 = (0.69313812256, 9.0580006145e-06)

SQRT_HALF = 0x3F3504F3  # as bits


def logarithm(x: Float32[Array | np.ndarray, "*rows"]) -> Float32[Array, "*rows"]:
    """log(x) of normal float32 x > 0, within one unit in the last place; else anything."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    exponent = (bits - SQRT_HALF) >> 23
    f = lax.bitcast_convert_type(bits - (exponent << 23), jnp.float32) - 1
    s = f / (2 + f)
    z = s * s
    series = jnp.float32(SERIES[-1])
    for coefficient in SERIES[-2::-1]:
        series = jnp.float32(coefficient) + z * series
    # Of a sum of two products a compiler contracts either: one of them is hidden in a maximum.
    half = jnp.maximum(jnp.float32(0.5) * f * f, jnp.float32(0))
    power = exponent.astype(jnp.float32)
    first = jnp.maximum(s * (half + z * series), jnp.float32(-1))
    small = first + power * jnp.float32(LOG2[1])
    log: Array = power * jnp.float32(LOG2[0]) - ((half - small) - f)
    return log


# Of (log(1 + f) - f + f**2 / 2) / f**3 by f, the highest power first, and log(2) in two parts.
# Cephes, logf.c, https://netlib.org/cephes/.
OF_TOTAL = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
    -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip
LOG2_OF_TOTAL = (0.693359375, -2.12194440e-4)


def log_of_total(
    x: Float32[Array | np.ndarray, "*rows"], product: Multiply = product_apart
) -> Float32[Array, "*rows"]:
    """log(x) of float32 x >= 1, with the same bits in kernels too: no quotient, nothing contracted.

    Within 1e-7 of 1 + itself; of other x anything. product: as `exponential` has it.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    exponent = (bits - SQRT_HALF) >> 23
    f = lax.bitcast_convert_type(bits - (exponent << 23), jnp.float32) - 1
    square = f * f
    series = jnp.float32(OF_TOTAL[0])
    for coefficient in OF_TOTAL[1:]:
        series = jnp.float32(coefficient) + product(series, f)
    power = exponent.astype(jnp.float32)
    small = product(f * square, series) + product(power, jnp.float32(LOG2_OF_TOTAL[1]))
    # A half of a number, and this product, which has few digits, are exact.
    log: Array = ((small - jnp.float32(0.5) * square) + f) + power * jnp.float32(LOG2_OF_TOTAL[0])
    return log
