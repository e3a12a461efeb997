"""The plain way to logprobs, as frameworks do it today: the kernels are measured against it."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import TopkLogprobs


def topk_logprobs(logits: jax.Array, token_ids: jax.Array, k: int) -> TopkLogprobs:
    """Logprobs by log_softmax, lax.top_k, a gather and a count.

    Args:
      logits: [R, V]. token_ids: [R] int32. k: columns beside the token's own.
    """
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32))
    selected = jnp.take_along_axis(logprobs, token_ids[:, None], axis=1)
    ids, columns = token_ids[:, None], selected
    if k > 0:
        top_logprobs, top_ids = lax.top_k(logprobs, k)
        ids = jnp.concatenate([ids, top_ids], axis=1)
        columns = jnp.concatenate([columns, top_logprobs], axis=1)
    return TopkLogprobs(
        token_ids=ids,
        logprobs=columns,
        token_ranks=1 + jnp.sum(logprobs > selected, axis=1, dtype=jnp.int32),
        extra_logprobs=jnp.zeros((logits.shape[0], 0), jnp.float32),
    )
