"""The plain way to logprobs, as frameworks do it today: what the kernels are measured against."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import TopkLogprobs


def topk_logprobs(logits: jax.Array, token_ids: jax.Array, k: int) -> TopkLogprobs:
    """log_softmax + lax.top_k + gather + count: logits [R, V], token_ids [R] -> K + 1 columns."""
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32))
    top_logprobs, top_ids = lax.top_k(logprobs, k)
    selected = jnp.take_along_axis(logprobs, token_ids[:, None], axis=1)
    return TopkLogprobs(
        token_ids=jnp.concatenate([token_ids[:, None], top_ids], axis=1),
        logprobs=jnp.concatenate([selected, top_logprobs], axis=1),
        token_ranks=1 + jnp.sum(logprobs > selected, axis=1, dtype=jnp.int32),
        extra_logprobs=jnp.zeros((logits.shape[0], 0), jnp.float32),
    )
