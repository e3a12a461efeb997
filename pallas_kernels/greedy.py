"""The greedy choice of each row, by the same rules for ties and NaN as `topk_logprobs`."""

import jax
import jax.numpy as jnp

from pallas_kernels.checks import check_logits
from pallas_kernels.types import Greedy


def greedy(logits: jax.Array) -> Greedy:
    """The greedy choice of every row and whether the row is valid.

    Args:
      logits: [N, V] bfloat16, float16 or float32.

    Returns:
      `Greedy(token_ids [N] int32, valid [N] bool)`. The token is the lowest id among the row's
      largest non-NaN logits, with -0.0 equal to 0.0; 0 if all are NaN. A row is valid when it has
      no NaN, no +inf and at least one finite logit.
    """
    logits = check_logits(logits)
    if logits.shape[0] == 0:
        return Greedy(jnp.zeros(0, jnp.int32), jnp.zeros(0, bool))
    vocabulary = logits.shape[1]
    # Not argmax: a NaN must lose against -inf, and max and min vectorize where argmax does not.
    numbers = jnp.where(jnp.isnan(logits), -jnp.inf, logits)
    largest = jnp.max(numbers, axis=1)
    ids = jnp.arange(vocabulary, dtype=jnp.int32)[None]
    first = jnp.min(jnp.where(logits == largest[:, None], ids, vocabulary), axis=1)
    return Greedy(
        token_ids=jnp.where(first < vocabulary, first, 0),  # none is equal where all are NaN
        # Looked for one by one: not every backend's maximum keeps a NaN.
        valid=jnp.isfinite(largest) & ~jnp.any(jnp.isnan(logits), axis=1),
    )


def greedy_token_ids(logits: jax.Array) -> jax.Array:
    """`greedy(logits).token_ids`: [N] int32."""
    return greedy(logits).token_ids
