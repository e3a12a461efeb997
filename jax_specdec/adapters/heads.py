"""Heads on models' last hidden states, and logprobs without logits."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import linear_topk_logprobs


class ModelHead(NamedTuple):
    """A model's head on its last hidden states."""

    weight: jax.Array  # [V, H] or [H, V]
    axes: str
    dtype: Any  # of the product; None: the larger of the two
    soft_cap: float | None
    scale: float = 1.0  # of the product
    precision: str | None = None  # of its multiplications; None: that of the caller

    @property
    def num_tokens(self) -> int:
        """V."""
        return self.weight.shape[self.axes.index("V")]

    def products(self) -> AbstractContextManager[Any]:
        """A context in which products have the head's precision."""
        if self.precision is None:
            return nullcontext()
        context: AbstractContextManager[Any] = jax.default_matmul_precision(self.precision)
        return context


def linear_logprobs(
    hidden: jax.Array,
    head: ModelHead,
    input_ids: jax.Array,
    temperature: float,
    *,
    entropy: bool = False,
) -> tuple[jax.Array, ...]:
    """`selective_log_softmax` of the logits that the head would make of hidden [..., H].

    Returns:
      Logprobs [...] float32; with `entropy` the entropies too, [...] of the logits' dtype.
    """
    dtype = head.dtype or jnp.result_type(hidden, head.weight)
    rows = hidden.reshape(-1, hidden.shape[-1]).astype(dtype)
    scaled = temperature not in (0.0, 1.0)
    with head.products():
        read = linear_topk_logprobs(
            rows,
            head.weight.astype(dtype),
            wrapped(input_ids.reshape(-1), head.num_tokens),
            0,
            temperatures=jnp.full(rows.shape[0], temperature, jnp.float32) if scaled else None,
            scale=head.scale,
            soft_cap=head.soft_cap,
            logits_dtype=jnp.dtype(dtype).name,
            head_axes=head.axes,
            entropy=entropy,
        )
    logprobs = read.logprobs[:, 0].reshape(input_ids.shape)
    if read.entropy is None:
        return (logprobs,)
    return logprobs, read.entropy.reshape(input_ids.shape).astype(dtype)


def wrapped(ids: jax.Array, num_tokens: int) -> jax.Array:
    """The ids that `take_along_axis` would read, int32."""
    ids = ids.astype(jnp.int32)
    return jnp.where(ids < 0, ids + num_tokens, ids)
