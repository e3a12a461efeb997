"""What verification and drawing take of a caller, as the arrays that they compute with.

JAX's default settings join integer types without a word, so every argument gets its own type here,
and what has no meaning as that type is refused by its name.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.sampling.parameters import Sampling


def of_rows(
    logits: Any, sampling: Any, positions: Any, name: str = "logits"
) -> tuple[jax.Array, Sampling, jax.Array]:
    """Logits [B, S, V], and the parameters and positions [B] of their slots."""
    logits = _floats(name, logits)
    if logits.ndim != 3:
        raise ValueError(f"{name} {logits.shape}: give [B, S, V]; one row a slot is x[:, None]")
    if not isinstance(sampling, Sampling):
        raise TypeError(f"sampling is a {type(sampling).__name__}: give a `Sampling`")
    batch = logits.shape[0]
    given = Sampling(
        temperature=_floats("sampling.temperature", sampling.temperature).astype(jnp.float32),
        top_k=_integers("sampling.top_k", sampling.top_k, jnp.int32),
        top_p=_floats("sampling.top_p", sampling.top_p).astype(jnp.float32),
        min_p=_floats("sampling.min_p", sampling.min_p).astype(jnp.float32),
        seed=_integers("sampling.seed", sampling.seed, jnp.uint32),
    )
    positions = _integers("positions", positions, jnp.int32)
    named = {f"sampling.{field}": value for field, value in given._asdict().items()}
    for field, value in (*named.items(), ("positions", positions)):
        if value.shape != (batch,):
            raise ValueError(
                f"{field} {value.shape} does not go with {name} {logits.shape}: give one value a "
                f"slot, [B] = {(batch,)}"
            )
    return logits, given, positions


def drafts_of(drafts: Any) -> Any:
    """`Drafts` of int32 ids and numbers."""
    if not hasattr(drafts, "token_ids"):
        raise TypeError(
            f"drafts is a {type(drafts).__name__}: give `Drafts(token_ids, num)`, ids [B, D] and "
            "how many of them each slot has [B]"
        )
    token_ids = _integers("drafts.token_ids", drafts.token_ids, jnp.int32)
    num = _integers("drafts.num", drafts.num, jnp.int32)
    if num.shape != token_ids.shape[:1]:
        raise ValueError(
            f"drafts.num {num.shape} does not go with drafts.token_ids {token_ids.shape}: give one "
            f"number a slot, [B] = {token_ids.shape[:1]}"
        )
    return drafts._replace(token_ids=token_ids, num=num)


def _floats(name: str, values: Any) -> jax.Array:
    """The values as an array, if they are floating-point numbers."""
    _held(name, values)
    if not jnp.issubdtype(values.dtype, jnp.floating):
        raise TypeError(f"{name} is of {values.dtype}: give an array of floats")
    return jnp.asarray(values)


def _integers(name: str, values: Any, dtype: Any) -> jax.Array:
    """The values as an array of `dtype`, modulo its size, if they are integers."""
    _held(name, values)
    if not jnp.issubdtype(values.dtype, jnp.integer):
        what = "a JAX key" if jnp.issubdtype(values.dtype, jax.dtypes.prng_key) else values.dtype
        raise TypeError(f"{name} is of {what}: give an array of integers")
    if name == "sampling.seed" and values.ndim == 2 and values.dtype == jnp.uint32:
        raise TypeError(f"{name} {values.shape} looks like JAX keys: give one integer a slot")
    if isinstance(values, np.ndarray):  # before JAX, which may have no 64-bit integers
        values = values.astype(dtype)
    return jnp.asarray(values).astype(dtype)


def _held(name: str, values: Any) -> None:
    if not isinstance(values, np.ndarray | jax.Array):
        raise TypeError(
            f"{name} is a {type(values).__name__}: give a NumPy or JAX array, as "
            "`jnp.asarray(values)` makes it"
        )
