"""A stand-in for your own model and drafter: jitted functions that know nothing of this package.

The model predicts a character from the three before it, the drafter from the two before it. Yours
have weights, caches and a mesh; all that the examples ask of them is logits for chosen positions.
"""

import jax
import jax.numpy as jnp
import story


def load() -> dict[str, jax.Array]:
    """Make the weights: {"model": [V, V, V, V], "drafter": [V, V, V]} float32."""
    return {
        "model": jnp.asarray(story.log_probabilities(3)),
        "drafter": jnp.asarray(story.log_probabilities(2)),
    }


@jax.jit
def logits(table: jax.Array, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    """Compute logits [B, S, V] of what follows `positions` [B, S] in `tokens` [B, T]."""
    context = tuple(
        jnp.take_along_axis(tokens, jnp.maximum(positions - back, 0), axis=1)
        for back in reversed(range(table.ndim - 1))
    )
    return table[context]
