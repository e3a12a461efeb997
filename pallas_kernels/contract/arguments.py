"""Checks of arguments before anything is computed: their kinds, types and values.

JAX's default settings join integer types without a word, so every argument gets its own type here,
and what has no meaning as that type is refused by its name. Values are looked at where this process
has them already; under `jax.jit` nobody can.
"""

import operator
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import ArrayLike, DTypeLike

from pallas_kernels.contract.types import AnyArray

AxisSizes = tuple[int | str, ...]  # a letter stands for any size
ArrayKind = Literal["floats", "integers", "bools"]
_KINDS = {"floats": jnp.floating, "integers": jnp.integer, "bools": np.bool_}
_Fields = TypeVar("_Fields", bound=NamedTuple)

ARRAY = "a NumPy or JAX array, as `jnp.asarray(values)` makes it"


def to_device(values: ArrayLike, dtype: DTypeLike) -> jax.Array:
    """The values as an array of `dtype`.

    What the host has is sent explicitly: `jax.transfer_guard("disallow")` lets it pass.
    """
    if isinstance(values, jax.Array):
        return values.astype(dtype)
    array: jax.Array = jax.device_put(np.asarray(values, dtype))
    return array


def known_values(values: AnyArray) -> np.ndarray | None:
    """The values, where this process has them already; None where they are traced."""
    if isinstance(values, np.ndarray):
        return values
    if isinstance(values, jax.core.Tracer) or not values.is_fully_addressable:
        return None
    return np.asarray(values)


def float_array(name: str, values: AnyArray) -> jax.Array:
    """The values as an array, if they are floating-point numbers."""
    check_type(name, values, (np.ndarray, jax.Array), ARRAY)
    if not jnp.issubdtype(values.dtype, jnp.floating):
        raise TypeError(f"{name} is of {values.dtype}: give an array of floats")
    return jnp.asarray(values)


def integers(name: str, values: AnyArray, dtype: DTypeLike) -> jax.Array:
    """The values as an array of `dtype`, if they are integers: seeds modulo 2**32.

    Of others what is too large is refused where it is NumPy's; of JAX's it counts as the largest.
    """
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
    if dtype == jnp.int32 and not jnp.can_cast(values.dtype, dtype):
        values = in_32_bits(name, values)
    return to_device(values, dtype)  # NumPy's before JAX, which may have no 64-bit integers


def in_32_bits(name: str, values: AnyArray) -> AnyArray:
    """Integers that int32 has; NumPy's that it has not are refused."""
    least, most = -(2**31), 2**31 - 1
    if isinstance(values, np.ndarray):
        for extreme in (values.min(initial=0), values.max(initial=0)):
            if not least <= extreme <= most:
                raise ValueError(f"{name} has {extreme}: give integers from {least} to {most}")
        return values
    is_signed = jnp.issubdtype(values.dtype, jnp.signedinteger)
    return jnp.clip(values, *np.array([least if is_signed else 0, most], values.dtype))


def array_of(name: str, value: object, kind: ArrayKind, shape: AxisSizes, axes: str) -> jax.Array:
    """The value as an array, if it is one of this kind and shape; axes: these in words."""
    check_type(name, value, (np.ndarray, jax.Array), ARRAY)
    assert isinstance(value, (np.ndarray, jax.Array))
    if not jnp.issubdtype(value.dtype, _KINDS[kind]):
        raise TypeError(f"{name} is of {value.dtype}: give an array of {kind}")
    sizes = zip(value.shape, shape, strict=False)
    if value.ndim != len(shape) or any(isinstance(b, int) and a != b for a, b in sizes):
        expected = "(" + ", ".join(map(str, shape)) + (",)" if len(shape) == 1 else ")")
        raise ValueError(f"{name} {value.shape}: give {axes} = {expected}")
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


def fields_of(
    name: str,
    value: Any,
    kind: type[_Fields],
    what: str,
    fields: dict[str, tuple[ArrayKind, AxisSizes, str]],
) -> _Fields:
    """A named tuple whose fields are arrays of these kinds, shapes and axes, where not None."""
    check_type(name, value, kind, what)
    checked = {
        field: array_of(f"{name}.{field}", getattr(value, field), *like)
        for field, like in fields.items()
        if getattr(value, field) is not None
    }
    fields_checked: _Fields = value._replace(**checked)
    return fields_checked


def numbers_of(name: str, x: ArrayLike, dtype: DTypeLike) -> jax.Array:
    """Numbers, or one, as an array of `dtype`, if they are of its kind."""
    try:
        values = x if isinstance(x, jax.Array) else np.asarray(x)
    except ValueError:  # lists of several lengths
        raise TypeError(f"{name} is a {type(x).__name__}: give a number, or {ARRAY}") from None
    if jnp.issubdtype(dtype, jnp.integer):
        if isinstance(values, np.ndarray) and values.dtype == object and dtype == jnp.uint32:
            # Seeds of more than 64 bits.
            is_whole = all(isinstance(number, int) for number in values.flat)
            values = np.asarray(values % 2**32, np.uint32) if is_whole else values
        return integers(name, values, dtype)
    is_real = jnp.issubdtype(values.dtype, jnp.floating) or jnp.issubdtype(
        values.dtype, jnp.integer
    )
    if not is_real:
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
    numbers = known_values(values)
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
    numbers = known_values(values)
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


def check_split(mesh: object, axis_name: object, vocab_size: object) -> None:
    """Refuse what can't say how a vocabulary is split: of another kind, or an axis of no mesh."""
    check_mesh(mesh, vocab_size, axis_name=axis_name)
    if isinstance(mesh, Mesh) and not axis_name:
        raise ValueError(f"mesh {mesh.shape} without axis_name; name the vocabulary's axis")


def check_mesh(mesh: object, vocab_size: object, **axis_names: object) -> None:
    """Refuse what is no mesh, a name that is none or no axis of it, and what is no size."""
    if mesh is not None:
        check_type("mesh", mesh, Mesh, "a `jax.sharding.Mesh`, as `jax.make_mesh` makes it")
    for argument, axis_name in axis_names.items():
        if axis_name is None:
            continue
        names = (axis_name,) if isinstance(axis_name, str) else axis_name
        if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
            raise TypeError(
                f"{argument} is {axis_name!r}: give the name of a mesh axis, a tuple of names, or "
                "() where all is here"
            )
        if isinstance(mesh, Mesh) and not {*names} <= {*mesh.shape}:
            raise ValueError(f"{argument} = {axis_name!r} is not an axis of the mesh {mesh.shape}")
    if vocab_size is not None:
        what = "the number of tokens before the columns of padding"
        check_int("vocab_size", vocab_size, 1, 2**31 - 1, what)
