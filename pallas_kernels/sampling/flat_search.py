"""The cut of rows whose kept tokens are more than candidates can hold: a search over whole rows.

Dozens of reads of a row, so `distribution.truncation` takes it for such rows alone, one at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from pallas_kernels import VocabShard, inverse_temperature, vary_like
from pallas_kernels.numbers import exponential, logarithm
from pallas_kernels.sampling import exact_sums, threshold_search
from pallas_kernels.sampling.parameters import Sampling, Truncation, lowest_gap, per_row


def searched(logits: jax.Array, sampling: Sampling, shard: VocabShard) -> Truncation:
    """The cuts [B] of logits [B, V]: valid rows of requests that are not greedy.

    `shard` says which columns of the rows this device holds. Anything in other rows.
    """
    rows = _rows(logits, sampling, shard)
    kept = _top_k(rows, sampling)
    kept &= _top_p(rows, kept, sampling)
    kept &= rows.x - rows.largest[..., None] >= lowest_gap(sampling)[..., None]
    kept &= rows.x > -jnp.inf
    return _cut_of(rows, kept, _ids(logits, shard))


@dataclass(frozen=True)
class _Rows:
    """Rows of logits as the filters look at them; V is of all shards, arrays have its columns."""

    x: Float32[Array, "B ... V"]
    largest: Float32[Array, "B ..."]  # m
    order: threshold_search.Order
    key_bits: int
    weights: tuple[jax.Array, ...]  # the digits of exp((x - m) / T)
    vocab_size: int
    shard: VocabShard

    def mass(self, where: jax.Array) -> exact_sums.Mass:
        """The summed weights of the tokens `where` [..., V] bool."""
        return exact_sums.mass(self.weights, where, self.shard, self.vocab_size)

    def share(self, where: jax.Array) -> jax.Array:
        """The same as float32 [...]."""
        return exact_sums.to_float(self.mass(where), self.vocab_size)

    def last_within(self, reaches: Callable[[jax.Array], jax.Array]) -> threshold_search.LastKept:
        """The last token with fewer than a limit before it: see `threshold_search`."""
        return threshold_search.last_within(
            self.order, self.key_bits, self.vocab_size, reaches, self.shard
        )

    def down_to(self, asked: jax.Array, last: Callable[[], threshold_search.LastKept]) -> jax.Array:
        """The tokens [..., V] bool up to `last()`; all tokens, for nothing, if no slot asked."""
        lowest = -(2 ** (self.key_bits - 1))
        everything = threshold_search.LastKept(
            jnp.full(self.largest.shape, lowest, jnp.int32),
            jnp.full(self.largest.shape, self.vocab_size, jnp.int32),
        )
        everything = vary_like(everything, self.largest)
        return threshold_search.within(self.order, lax.cond(asked, last, lambda: everything))


def _rows(logits: jax.Array, sampling: Sampling, shard: VocabShard) -> _Rows:
    x = logits.astype(jnp.float32)
    largest = shard.maximum(x)
    vocab_size = shard.size(logits.shape[-1])
    return _Rows(
        x=x,
        largest=largest,
        order=threshold_search.order(logits, _ids(logits, shard)),
        key_bits=8 * logits.dtype.itemsize,
        weights=exact_sums.digits(_weights(x, largest, sampling), vocab_size),
        vocab_size=vocab_size,
        shard=shard,
    )


def _top_k(rows: _Rows, sampling: Sampling) -> jax.Array:
    """The tokens [B, ..., V] bool that top-k keeps."""
    k = per_row(sampling.top_k, rows.largest)

    def last() -> threshold_search.LastKept:
        return rows.last_within(
            lambda where: (rows.shard.sum(where.astype(jnp.int32)) >= k) & (k > 0)
        )

    return rows.down_to(jnp.any(sampling.top_k > 0), last)


def _top_p(rows: _Rows, kept: jax.Array, sampling: Sampling) -> jax.Array:
    """The tokens that top-p keeps of those that are `kept`; [B, ..., V] bool both."""
    p = per_row(sampling.top_p, rows.largest)

    def last() -> threshold_search.LastKept:
        wanted = jnp.maximum(p * rows.share(kept), 1e-30)  # never nothing
        limit = exact_sums.at_least(wanted, rows.vocab_size)
        return rows.last_within(
            lambda where: ~exact_sums.less(rows.mass(where & kept), limit) & (p < 1)
        )

    return rows.down_to(jnp.any(sampling.top_p < 1), last)


def _cut_of(rows: _Rows, kept: jax.Array, ids: jax.Array) -> Truncation:
    """The last of the `kept` tokens [B, ..., V] bool, and log of their share."""
    cut_logit = rows.shard.minimum(jnp.where(kept, rows.x, jnp.inf))
    is_last = kept & (rows.x == cut_logit[..., None])
    log_kept = logarithm(rows.share(kept) / rows.share(rows.x > -jnp.inf))
    return Truncation(
        cut_logit, rows.shard.maximum(jnp.where(is_last, ids, -1)), jnp.minimum(log_kept, 0.0)
    )


def _weights(x: jax.Array, largest: jax.Array, sampling: Sampling) -> jax.Array:
    """exp((x - m) / T) [B, V] float32."""
    inverse = inverse_temperature(sampling.temperature)[..., None]
    return exponential((x - largest[..., None]) * inverse)


def _ids(logits: jax.Array, shard: VocabShard) -> jax.Array:
    """The token ids of logits [..., V], broadcast."""
    ids = shard.ids(logits.shape[-1]).reshape((1,) * (logits.ndim - 1) + (-1,))
    return jnp.broadcast_to(ids, logits.shape)
