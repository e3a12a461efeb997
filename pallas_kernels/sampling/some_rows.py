"""Some rows of a batch: which they are, and their results put back among all."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from pallas_kernels.sampling.parameters import Truncation


def compacted(which: Bool[Array, " N"]) -> tuple[Int32[Array, " N"], Int32[Array, ""]]:
    """The rows that are chosen, in their order, then others; and how many are."""
    index = jnp.argsort(~which, stable=True).astype(jnp.int32)
    return index, which.sum(dtype=jnp.int32)


def scattered(
    whole: Truncation, part: Truncation, index: Int32[Array, " N"], number: Int32[Array, ""]
) -> Truncation:
    """The cuts with the first `number` of `part`, at the rows `index`; from N on: nowhere."""
    counts = jnp.arange(len(index), dtype=jnp.int32) < number
    place = jnp.where(counts, index, len(index))
    put: Truncation = jax.tree.map(lambda x, new: x.at[place].set(new, mode="drop"), whole, part)
    return put
