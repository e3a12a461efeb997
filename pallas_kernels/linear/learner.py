"""`kept_logprobs` without logits: from a learner's hidden states and head.

Axes: `*rows` of any number (often batch and position), H hidden size, V vocabulary, M ids of a set.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from jax_specdec.kept_sets import PaddedKept
from pallas_kernels import linear_kept_logprobs, linear_topk_logprobs
from pallas_kernels.linear.kept_logprobs import AnyArray, is_id, on_device


def learner_logprobs(
    hidden: Float[AnyArray, "*rows H"],
    head: Float[AnyArray, "V H"],
    token_ids: Int32[AnyArray, "*rows"],
    kept: PaddedKept,
    temperatures: Float[AnyArray, "..."] | float = 1.0,
    *,
    logits_dtype: str = "float32",
    soft_cap: float | None = None,
) -> Float32[Array, "*rows"]:
    """The `kept_logprobs` of logits that are never all there.

    Of the head, a row with ids reads its own tokens' rows alone. Rows with a mark (`KEPT_ALL`,
    `KEPT_MANY`) take the whole head, a block at a time, and only in a batch that has one.
    Differentiable in reverse by hidden, head and temperatures; nothing of [*rows, V] exists then
    either. The logits are those of `pallas_kernels.linear_topk_logprobs`.

    Args:
      hidden: bfloat16, float16 or float32.
      head: of the same dtype, a row a token.
      token_ids, kept, temperatures: as `kept_logprobs` has them; M is up to 4096.
      logits_dtype: what the product is rounded to, as the rollout's model does it.
      soft_cap: cap * tanh(x / cap) of the logits, or None.

    Raises:
      TypeError, ValueError: the kept sets are not of these rows, or as `linear_topk_logprobs`.
    """
    rows = np.shape(token_ids)
    kept = on_device(kept, rows)
    width = kept.token_ids.shape[-1]
    flat = PaddedKept(
        jnp.where(is_id(kept), kept.token_ids, -1).reshape(-1, width),
        kept.counts.reshape(-1),
        kept.log_kept.reshape(-1),
    )
    hidden = jnp.asarray(hidden)
    states, head = hidden.reshape(-1, hidden.shape[-1]), jnp.asarray(head)
    ids = jnp.asarray(token_ids, jnp.int32).reshape(-1)
    t = jnp.broadcast_to(jnp.asarray(temperatures, jnp.float32), rows).reshape(-1)
    t = jnp.where(t > 0, t, 1.0)
    of_set = linear_kept_logprobs(
        states, head, ids, flat.token_ids,
        temperatures=t, logits_dtype=logits_dtype, soft_cap=soft_cap,
    ).logprobs  # fmt: skip
    marked = flat.counts < 0

    def read_all() -> jax.Array:
        found = linear_topk_logprobs(
            states, head, ids, 0, temperatures=t, logits_dtype=logits_dtype, soft_cap=soft_cap
        )
        of_rows: jax.Array = found.logprobs[:, 0] - flat.log_kept
        return of_rows

    whole = lax.cond(jnp.any(marked), read_all, lambda: jnp.zeros_like(of_set))
    logprobs = jnp.where(marked, whole, of_set)
    return jnp.where(flat.counts == 0, 0.0, logprobs).reshape(rows)
