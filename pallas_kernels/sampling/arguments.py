"""What an argument must be before anything is computed: its kind, its type, its values.

JAX's default settings join integer types without a word, so every argument gets its own type here,
and what has no meaning as that type is refused by its name. Values are looked at where this process
has them already; under `jax.jit` nobody can.
"""

import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from pallas_kernels.contract.rows import to_device
from pallas_kernels.contract.types import AnyArray

ARRAY = "a NumPy or JAX array, as `jnp.asarray(values)` makes it"


def known(values: jax.Array) -> np.ndarray | None:
    """The values, where this process has them already; None where they are traced."""
    if isinstance(values, jax.core.Tracer) or not values.is_fully_addressable:
        return None
    return np.asarray(values)


def floats(name: str, values: AnyArray) -> jax.Array:
    """The values as an array, if they are floating-point numbers."""
    check_type(name, values, (np.ndarray, jax.Array), ARRAY)
    if not jnp.issubdtype(values.dtype, jnp.floating):
        raise TypeError(f"{name} is of {values.dtype}: give an array of floats")
    return jnp.asarray(values)


def integers(name: str, values: AnyArray, dtype: DTypeLike) -> jax.Array:
    """The values as an array of `dtype`, modulo its size, if they are integers."""
    check_type(name, values, (np.ndarray, jax.Array), ARRAY)
    if not jnp.issubdtype(values.dtype, jnp.integer):
        if jnp.issubdtype(values.dtype, jax.dtypes.prng_key):
            raise TypeError(
                f"{name} is of a JAX key: give integers, as `Sampling.of(..., key=key)` makes them "
                "of it"
            )
        raise TypeError(f"{name} is of {values.dtype}: give an array of integers")
    if name == "sampling.seed" and values.ndim == 2 and values.dtype == jnp.uint32:
        raise TypeError(
            f"{name} {values.shape} looks like JAX keys: give one integer a slot, [B], as "
            "`Sampling.of(..., key=key)` makes them of a key"
        )
    return to_device(values, dtype)  # NumPy's before JAX, which may have no 64-bit integers


def numbers_of(name: str, x: ArrayLike, dtype: DTypeLike) -> jax.Array:
    """Numbers, or one, as an array of `dtype`, if they are of its kind."""
    values = x if isinstance(x, jax.Array) else np.asarray(x)
    if jnp.issubdtype(dtype, jnp.integer):
        return integers(name, values, dtype)
    if not jnp.issubdtype(values.dtype, jnp.number):
        raise TypeError(f"{name} is {x!r}: give a number, or {ARRAY}")
    return to_device(values, dtype)


def check_type(name: str, value: object, kinds: type | tuple[type, ...], what: str) -> None:
    """Refuse what is of another type."""
    if not isinstance(value, kinds):
        raise TypeError(f"{name} is a {type(value).__name__}: give {what}")


def check_int(name: str, value: object, least: int, most: int, way_out: str) -> int:
    """The value as a Python int from `least` to `most`."""
    try:
        number = None if isinstance(value, (bool, jax.Array)) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name} is {value!r}: give a Python int, {way_out}")
    if not least <= number <= most:
        raise ValueError(f"{name} = {number} is outside {least} .. {most}: give {way_out}")
    return number


def check_within(name: str, values: jax.Array, least: float, most: float, way_out: str) -> None:
    """Refuse numbers of slots [B] outside of a range, where they are known."""
    numbers = known(values)
    if numbers is None:
        return
    wrong = (numbers < least) | (numbers > most)
    if wrong.any():
        slot = int(wrong.argmax())
        raise ValueError(
            f"{name} has {numbers[slot]:g} in slot {slot}, outside {least:g} .. {most:g}: give "
            f"{way_out}"
        )


def check_no_nan(name: str, values: jax.Array) -> None:
    """Refuse NaN in numbers of slots, where they are known; elsewhere it makes rows invalid."""
    numbers = known(values)
    if numbers is not None and np.isnan(numbers).any():
        raise ValueError(
            f"{name} has a NaN in slot {int(np.isnan(numbers).argmax())}: give a number, or 0 for "
            "a greedy slot's temperature"
        )


def check_bool(name: str, value: object) -> bool:
    """The value, if it is a Python bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}: give True or False; it decides the program")
    return value
