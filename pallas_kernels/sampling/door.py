"""What verification and drawing take of a caller, as the arrays that they compute with.

JAX's default settings join integer types without a word, so every argument gets its own type here,
and what has no meaning as that type is refused by its name.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels.contract.rows import LOGITS_DTYPES
from pallas_kernels.contract.types import AnyArray
from pallas_kernels.sampling.parameters import Sampling
from pallas_kernels.sampling.types import CompactQ, Drafts

Value = TypeVar("Value")


def of_rows(
    logits: AnyArray,
    sampling: Sampling,
    positions: AnyArray,
    name: str = "logits",
    row_ids: AnyArray | None = None,
    axes: str = "[B, S]",
) -> tuple[jax.Array, Sampling, jax.Array, jax.Array | None]:
    """Logits [B, S, V] or flat [N, V], the parameters and positions [B], and the row ids.

    axes: of the row ids.
    """
    logits = _logits(name, logits, is_flat=row_ids is not None)
    _check_type("sampling", sampling, Sampling, "a `Sampling`")
    if row_ids is not None:
        row_ids = _integers("row_ids", row_ids, jnp.int32)
        if row_ids.ndim != axes.count(",") + 1 or 0 in row_ids.shape:
            raise ValueError(f"row_ids {row_ids.shape}: give the rows of each slot, {axes}")
    batch = (logits if row_ids is None else row_ids).shape[0]
    given = Sampling(
        temperature=_floats("sampling.temperature", sampling.temperature).astype(jnp.float32),
        top_k=_integers("sampling.top_k", sampling.top_k, jnp.int32),
        top_p=_floats("sampling.top_p", sampling.top_p).astype(jnp.float32),
        min_p=_floats("sampling.min_p", sampling.min_p).astype(jnp.float32),
        seed=_integers("sampling.seed", sampling.seed, jnp.uint32),
    )
    for field in ("temperature", "top_p", "min_p"):
        _no_nan(f"sampling.{field}", getattr(given, field))
    positions = _integers("positions", positions, jnp.int32)
    named = {f"sampling.{field}": value for field, value in given._asdict().items()}
    for field, value in (*named.items(), ("positions", positions)):
        if value.shape != (batch,):
            raise ValueError(
                f"{field} {value.shape} does not go with {name} {logits.shape}: give one value a "
                f"slot, [B] = {(batch,)}"
            )
    return logits, given, positions, row_ids


def drafts_of(drafts: Drafts) -> Drafts:
    """`Drafts` of int32 ids and numbers, with a q of their shape."""
    what = "`Drafts(token_ids, num)`, ids [B, D] and how many of them each slot has [B]"
    _check_type("drafts", drafts, Drafts, what)
    token_ids = _integers("drafts.token_ids", drafts.token_ids, jnp.int32)
    num = _integers("drafts.num", drafts.num, jnp.int32)
    if token_ids.ndim != 2 or num.shape != token_ids.shape[:1]:
        raise ValueError(
            f"drafts.num {num.shape} does not go with drafts.token_ids {token_ids.shape}: give ids "
            "[B, D], and one number a slot [B]"
        )
    most = token_ids.shape[1]
    known = _known(num)
    if known is not None and known.size and not 0 <= known.min() <= known.max() <= most:
        raise ValueError(
            f"drafts.num has {known.max() if known.max() > most else known.min()}: each slot has "
            f"0 to D = {most} drafts, as many as drafts.token_ids {token_ids.shape} has columns"
        )
    q = drafts.q
    if q is not None:
        _check_type("drafts.q", q, CompactQ, "`CompactQ(ids, logprobs)`, each [B, D, M]")
        q = _compact(q, token_ids)
    return drafts._replace(token_ids=token_ids, num=num, q=q)


def _compact(q: CompactQ, token_ids: jax.Array) -> CompactQ:
    ids = _integers("drafts.q.ids", q.ids, jnp.int32)
    logprobs = _floats("drafts.q.logprobs", q.logprobs).astype(jnp.float32)
    if ids.shape != logprobs.shape or ids.ndim != 3 or ids.shape[:2] != token_ids.shape:
        raise ValueError(
            f"drafts.q has ids {ids.shape} and logprobs {logprobs.shape}, and "
            f"drafts.token_ids are {token_ids.shape}: give both as [B, D, M]"
        )
    return CompactQ(ids, logprobs)


def _no_nan(name: str, values: jax.Array) -> None:
    """Refuse NaN where the values are known; where they are traced, it makes the row invalid."""
    known = _known(values)
    if known is not None and np.isnan(known).any():
        raise ValueError(
            f"{name} has a NaN in slot {int(np.isnan(known).argmax())}: give a number, or 0 for a "
            "greedy slot's temperature"
        )


def _known(values: jax.Array) -> np.ndarray | None:
    """The values, where this process has them already; None where they are traced."""
    if isinstance(values, jax.core.Tracer) or not values.is_fully_addressable:
        return None
    return np.asarray(values)


def _logits(name: str, values: AnyArray, is_flat: bool) -> jax.Array:
    """Logits as an array, if their shape and dtype are supported, and they have a number."""
    _check_type(name, values, (np.ndarray, jax.Array), _ARRAY)
    if is_flat and values.ndim != 2:
        raise ValueError(f"{name} {values.shape}: give [N, V] with row_ids, or [B, S, V] without")
    if not is_flat and values.ndim != 3:
        raise ValueError(
            f"{name} {values.shape}: give [B, S, V]; one row a slot is x[:, None], and flat rows "
            "[N, V] need row_ids"
        )
    if values.dtype.name not in LOGITS_DTYPES:
        raise TypeError(
            f"{name} is of {values.dtype}: give {', '.join(LOGITS_DTYPES)}, by "
            "`.astype('float32')` for example"
        )
    if 0 in values.shape:
        raise ValueError(f"{name} {values.shape} has no number: give 1 and more of each axis")
    return jnp.asarray(values)


def _floats(name: str, values: AnyArray) -> jax.Array:
    """The values as an array, if they are floating-point numbers."""
    _check_type(name, values, (np.ndarray, jax.Array), _ARRAY)
    if not jnp.issubdtype(values.dtype, jnp.floating):
        raise TypeError(f"{name} is of {values.dtype}: give an array of floats")
    return jnp.asarray(values)


def _integers(name: str, values: AnyArray, dtype: DTypeLike) -> jax.Array:
    """The values as an array of `dtype`, modulo its size, if they are integers."""
    _check_type(name, values, (np.ndarray, jax.Array), _ARRAY)
    if not jnp.issubdtype(values.dtype, jnp.integer):
        if jnp.issubdtype(values.dtype, jax.dtypes.prng_key):
            raise TypeError(
                f"{name} is of a JAX key: give integers, as jax.random.bits makes them of it"
            )
        raise TypeError(f"{name} is of {values.dtype}: give an array of integers")
    if name == "sampling.seed" and values.ndim == 2 and values.dtype == jnp.uint32:
        raise TypeError(
            f"{name} {values.shape} looks like JAX keys: give one integer a slot, [B], as "
            "jax.random.bits makes them of a key"
        )
    if isinstance(values, np.ndarray):  # before JAX, which may have no 64-bit integers
        values = values.astype(dtype)
    return jnp.asarray(values).astype(dtype)


_ARRAY = "a NumPy or JAX array, as `jnp.asarray(values)` makes it"


def _check_type(name: str, value: Value, kinds: type | tuple[type, ...], what: str) -> None:
    if not isinstance(value, kinds):
        raise TypeError(f"{name} is a {type(value).__name__}: give {what}")
