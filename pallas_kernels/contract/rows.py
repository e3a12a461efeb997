"""A call's arguments once they are checked, and what one read of its rows leaves.

Checks are made when a call is traced: errors name the value, the limit and the way out.
"""

import operator
from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.contract.arguments import check_bool, to_device
from pallas_kernels.contract.changes import WORD, Changes
from pallas_kernels.contract.types import AnyArray, RankTies, TopkLogprobs


class Outputs(NamedTuple):
    """The static part of a call: it decides the program, and the shapes that come out of it."""

    k: int
    log_sum_exp: bool = False
    entropy: bool = False
    top_logits: bool = False
    inclusive: bool = False  # ranks count equal logits too


def outputs_of(
    k: int,
    *,
    log_sum_exp: bool = False,
    entropy: bool = False,
    top_logits: bool = False,
    inclusive: bool = False,
) -> Outputs:
    """The outputs that a caller wants; a TypeError where a flag is no bool."""
    flags = {"log_sum_exp": log_sum_exp, "entropy": entropy, "top_logits": top_logits}
    return Outputs(
        k, **{name: check_bool(name, x) for name, x in flags.items()}, inclusive=inclusive
    )


class Rows(NamedTuple):
    """The arrays of a call, checked: R target rows of logits [N, V], or of a part of their columns.

    token_ids: None where no token is asked about.
    changes: of the R rows.
    """

    logits: Float[Array, "N V"]
    token_ids: Int32[Array, " R"] | None = None
    row_ids: Int32[Array, " R"] | None = None
    num_rows: Int32[Array, ""] | None = None
    temperatures: Float32[Array, " R"] | None = None
    extra_token_ids: Int32[Array, "R C"] | None = None
    changes: Changes | None = None

    @property
    def num_targets(self) -> int:
        """R."""
        first = next(x for x in (self.token_ids, self.row_ids, self.logits) if x is not None)
        return first.shape[0]

    @property
    def extra_ids(self) -> jax.Array:
        """The extra ids [R, C]; C = 0 where none were named."""
        if self.extra_token_ids is None:
            return jnp.zeros((self.num_targets, 0), jnp.int32)
        return self.extra_token_ids

    @property
    def places(self) -> jax.Array:
        """The row of the logits [R] that each target row reads, clamped to those that there are."""
        if self.row_ids is None:
            return jnp.arange(self.num_targets, dtype=jnp.int32)
        return jnp.clip(self.row_ids, 0, self.logits.shape[0] - 1)


class RowSums(NamedTuple):
    """The sums of one read of R rows, or of a part of their columns.

    maximum: [R] float32; unspecified where the row has a NaN: not every backend's maximum keeps it.
    sum_exp: [R] float32, sum of exp((x - maximum) / temperature); NaN where the row has a NaN, 0
        or NaN where it has -inf alone.
    num_larger: [R] int32, the number of logits strictly larger than the given token's; with
        inclusive ranks, those equal to it count too.
    top_ids: [R, K] int32, columns of this part; unspecified where the logit is -inf.
    top_logits: [R, K] float32, descending, ties lowest id first.
    weighted: [R] float32, sum of s exp(s), s = (x - maximum) / temperature; None without entropy.
    """

    maximum: jax.Array
    sum_exp: jax.Array
    num_larger: jax.Array
    top_ids: jax.Array
    top_logits: jax.Array
    weighted: jax.Array | None = None


def no_sums(num_targets: int, outputs: Outputs) -> RowSums:
    """The sums of no column."""
    zeros = jnp.zeros(num_targets, jnp.float32)
    return RowSums(
        maximum=jnp.full(num_targets, -jnp.inf, jnp.float32),
        sum_exp=zeros,
        num_larger=jnp.zeros(num_targets, jnp.int32),
        top_ids=jnp.zeros((num_targets, outputs.k), jnp.int32),
        top_logits=jnp.full((num_targets, outputs.k), -jnp.inf, jnp.float32),
        weighted=zeros if outputs.entropy else None,
    )


def is_inclusive(rank_ties: str) -> bool:
    """Whether ranks count equal logits too.

    Raises:
      ValueError: there is no such way to count.
    """
    if rank_ties not in get_args(RankTies):
        raise ValueError(
            f"rank_ties = {rank_ties!r} is not known; choose one of "
            f"{', '.join(map(repr, get_args(RankTies)))}"
        )
    return rank_ties == "inclusive"


def skipped_rows(num_targets: int, outputs: Outputs, num_extra: int) -> TopkLogprobs:
    """The results of rows that were not worked on."""

    # Under `debug_nans` a NaN that no row has would stop the call.
    missing = 0.0 if isinstance(num_targets, int) and num_targets == 0 else jnp.nan

    def nan(*shape: int) -> jax.Array:
        return jnp.full((num_targets, *shape), missing, jnp.float32)

    return TopkLogprobs(
        token_ids=jnp.full((num_targets, outputs.k + 1), -1, jnp.int32),
        logprobs=nan(outputs.k + 1),
        token_ranks=jnp.zeros(num_targets, jnp.int32),
        extra_logprobs=nan(num_extra),
        log_sum_exp=nan() if outputs.log_sum_exp else None,
        entropy=nan() if outputs.entropy else None,
        top_logits=nan(outputs.k) if outputs.top_logits else None,
    )


MAX_K = 512

MAX_EXTRA = 512

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
        reason = f" (the vocabulary has {vocabulary} tokens)" if vocabulary < MAX_K else ""
        raise ValueError(f"k = {number} is outside 0 .. {limit}{reason}")
    return number


def check_ids(name: str, ids: AnyArray, shape: tuple[int | str, ...]) -> jax.Array:
    """ids as an int32 array of `shape`; a letter in it stands for any size."""
    return _check(name, ids, "int32", shape)


def check_targets(
    token_ids: AnyArray, row_ids: AnyArray | None, name: str, rows: int
) -> tuple[jax.Array, jax.Array | None]:
    """token_ids and row_ids [R]; without the latter, `name` has R rows."""
    token_ids = check_ids("token_ids", token_ids, ("R",))
    if row_ids is not None:
        return token_ids, check_ids("row_ids", row_ids, token_ids.shape)
    if token_ids.shape[0] != rows:
        raise ValueError(
            f"token_ids has {token_ids.shape[0]} entries but {name} has {rows} rows; pass row_ids "
            "to say which row each token belongs to"
        )
    return token_ids, None


def check_num_rows(num_rows: AnyArray | np.int32 | int) -> jax.Array:
    """The dynamic number of rows as an int32 scalar."""
    if isinstance(num_rows, int) and not isinstance(num_rows, bool):
        if not 0 <= num_rows < 2**31:
            raise ValueError(
                f"num_rows = {num_rows} is outside 0 .. {2**31 - 1}; 0 skips every row"
            )
        return to_device(num_rows, np.int32)
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
        temperatures = _check("temperatures", temperatures, "float32", (num_targets,))
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


def _check(
    name: str, value: AnyArray | np.int32 | int, dtype: str, shape: tuple[int | str, ...]
) -> jax.Array:
    array = as_array(name, value)
    if array.dtype == bool and dtype == "uint32":
        raise TypeError(
            f"{name} has dtype bool; it must be {dtype}, 32 tokens a word: pad the tokens to a "
            "multiple of 32, then np.packbits(mask, axis=-1, bitorder='little').view('uint32')"
        )
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
