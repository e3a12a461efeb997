"""Checks of a call's arguments when it is traced: errors name the value and the way out."""

import operator

import jax
import numpy as np

from pallas_kernels.contract.changes import WORD, Changes
from pallas_kernels.contract.types import AnyArray

MAX_K = 512
MAX_EXTRA = 128
MAX_BIAS = 4096
MAX_VOCABULARY = 2**24  # token ranks are counted in float32, exact up to here
LOGITS_DTYPES = ("bfloat16", "float16", "float32")


def check_logits(logits: AnyArray) -> jax.Array:
    """logits as an array, if it is [N, V] in a supported dtype."""
    array = check_matrix("logits", logits, "[N, V]")
    if array.shape[1] == 0:
        raise ValueError("logits has an empty vocabulary axis: V must be at least 1")
    if array.shape[1] > MAX_VOCABULARY:
        raise ValueError(
            f"logits has {array.shape[1]} columns; the limit is {MAX_VOCABULARY} on a device: "
            "split the vocabulary over several devices"
        )
    return array


def check_matrix(name: str, value: AnyArray, axes: str) -> jax.Array:
    """The value as an array, if it has two axes and a supported dtype."""
    array = check_floats(name, value)
    if array.ndim != 2:
        raise ValueError(f"{name} has shape {list(array.shape)}; it must be {axes}, two axes")
    return array


def check_floats(name: str, value: AnyArray) -> jax.Array:
    """The value as an array, if it has a supported dtype."""
    array = as_array(name, value)
    if array.dtype.name not in LOGITS_DTYPES:
        raise TypeError(
            f"{name} has dtype {array.dtype.name}; it must be one of {', '.join(LOGITS_DTYPES)}"
        )
    return array


def check_k(k: int, vocabulary: int) -> int:
    """The static k as an int, 0 <= k <= min(MAX_K, V)."""
    try:
        number = None if isinstance(k, (bool, jax.Array)) else operator.index(k)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"k is {k!r}; it must be a Python int: it decides the outputs' shapes")
    limit = min(MAX_K, vocabulary)
    if not 0 <= number <= limit:
        raise ValueError(
            f"k = {number} is outside 0 .. {limit} (the smaller of {MAX_K} and the {vocabulary} "
            "tokens of the vocabulary)"
        )
    return number


def check_ids(name: str, ids: AnyArray, shape: tuple[int | str, ...]) -> jax.Array:
    """ids as an int32 array of `shape`; a letter in it stands for any size."""
    return _check(name, ids, "int32", shape)


def check_temperatures(temperatures: AnyArray, num_targets: int) -> jax.Array:
    """temperatures as a [R] float32 array."""
    return _check("temperatures", temperatures, "float32", (num_targets,))


def check_num_rows(num_rows: AnyArray | np.int32 | int) -> jax.Array:
    """The dynamic number of rows as an int32 scalar."""
    if isinstance(num_rows, int) and not isinstance(num_rows, bool):
        if not 0 <= num_rows < 2**31:
            raise ValueError(
                f"num_rows = {num_rows} is outside 0 .. {2**31 - 1}; 0 skips every row"
            )
        count: jax.Array = jax.device_put(np.int32(num_rows))
        return count
    return _check("num_rows", num_rows, "int32", ())


def check_extra_token_ids(ids: AnyArray, num_targets: int, most: int = MAX_EXTRA) -> jax.Array:
    """ids as a [R, C] int32 array, C up to `most`."""
    array = check_ids("extra_token_ids", ids, (num_targets, "C"))
    if array.shape[1] > most:
        raise ValueError(
            f"extra_token_ids names {array.shape[1]} ids for each row; the limit is {most}: "
            "call once for each part"
        )
    return array


def check_options(
    num_rows: AnyArray | np.int32 | int | None,
    temperatures: AnyArray | None,
    extra_token_ids: AnyArray | None,
    num_targets: int,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """The optional arguments of R target rows, checked."""
    if num_rows is not None:
        num_rows = check_num_rows(num_rows)
    if temperatures is not None:
        temperatures = check_temperatures(temperatures, num_targets)
    if extra_token_ids is not None:
        extra_token_ids = check_extra_token_ids(extra_token_ids, num_targets)
    return num_rows, temperatures, extra_token_ids


def check_changes(
    allowed: AnyArray | None,
    bias_token_ids: AnyArray | None,
    bias: AnyArray | None,
    num_targets: int,
    vocab_size: int,
) -> Changes | None:
    """The changes of R target rows; None where nothing is changed."""
    changes = Changes()
    if allowed is not None:
        shape = (num_targets, -(-vocab_size // WORD))
        signed = str(getattr(allowed, "dtype", None)) == "int32"  # as xgrammar has it
        dtype = "int32" if signed else "uint32"
        changes = changes._replace(allowed=_check("allowed", allowed, dtype, shape))
    if bias is not None and bias_token_ids is not None:
        ids = check_ids("bias_token_ids", bias_token_ids, (num_targets, "D"))
        count = ids.shape[1]
        if count > MAX_BIAS:
            raise ValueError(
                f"bias_token_ids names {count} ids for each row; the limit is {MAX_BIAS}: add a "
                "denser bias to the logits"
            )
        values = _check("bias", bias, "float32", (num_targets, count))
        if count:
            changes = changes._replace(bias_token_ids=ids, bias=values)
    elif bias is not None or bias_token_ids is not None:
        missing = "bias" if bias is None else "bias_token_ids"
        raise TypeError(f"{missing} is None; pass both bias_token_ids and bias, or none of them")
    return None if changes == Changes() else changes


def check_num_targets(num_targets: int, num_logits_rows: int) -> None:
    """Raise unless R = N: without row_ids, target row i reads logits row i."""
    if num_targets != num_logits_rows:
        raise ValueError(
            f"token_ids has {num_targets} entries but logits has {num_logits_rows} rows; pass "
            "row_ids to say which row each token belongs to"
        )


def _check(
    name: str, value: AnyArray | np.int32 | int, dtype: str, shape: tuple[int | str, ...]
) -> jax.Array:
    array = as_array(name, value)
    if array.dtype.name != dtype:
        raise TypeError(
            f"{name} has dtype {array.dtype.name}; it must be {dtype}: convert it with "
            f".astype({dtype!r})"
        )
    sizes = zip(array.shape, shape, strict=False)
    if array.ndim != len(shape) or any(isinstance(b, int) and a != b for a, b in sizes):
        letters = ", ".join(str(size) for size in shape)
        raise ValueError(f"{name} has shape {list(array.shape)}; it must be [{letters}]")
    return array


def as_array(name: str, value: AnyArray | np.int32 | int) -> jax.Array:
    """The value as an array, if it is one of 32 bits or fewer."""
    # Checked before jnp.asarray, which silently turns 64-bit values into 32-bit ones.
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        raise TypeError(f"{name} is a {type(value).__name__}; it must be a jax or NumPy array")
    if str(value.dtype) in ("int64", "uint64", "float64"):
        raise TypeError(f"{name} has the 64-bit dtype {value.dtype}; convert it to 32 bits first")
    # An explicit transfer: `jax.transfer_guard("disallow")` lets it pass.
    return value if isinstance(value, jax.Array) else jax.device_put(np.asarray(value))
