"""The cut of rows whose kept tokens are more than candidates can hold: a search over whole rows.

Dozens of reads of a row, so `distribution.truncation` takes it for such rows alone, one at a time.
The order is logit descending, equal logits by id, lowest first. Nothing is sorted: the last token
kept is searched for bit by bit, first among the values of the logits, then among the ids of the
equal ones. Each trip sums over the row: vocabulary shards exchange a few sums a row and trip, and
nothing of the vocabulary's size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.backends.groups import inverse_temperature
from pallas_kernels.lowering.blocks import vary_like
from pallas_kernels.meshes.vocab_shard import VocabShard
from pallas_kernels.numbers.exponential import exponential
from pallas_kernels.numbers.logarithm import logarithm
from pallas_kernels.sampling import exact_sums
from pallas_kernels.sampling.parameters import Sampling, Truncation, lowest_gap, per_row

# Among shards each trip waits for an exchange: fewer trips, of 15 sums each. On one device
# bisection sums least.
BITS_PER_TRIP = 4


class Order(NamedTuple):
    """The order of a row's tokens as integers: larger keys come first, then smaller ids."""

    keys: Int32[Array, "... V"]
    ids: Int32[Array, "... V"]


class LastKept(NamedTuple):
    """The last token that is kept, by its place in the order."""

    key: Int32[Array, "..."]
    id: Int32[Array, "..."]


def order(logits: Float[Array, "*rows V"], ids: Int32[Array, "*rows V"]) -> Order:
    """The order of the tokens `ids` by their logits: bfloat16, float16 or float32."""
    # -0.0 equals 0.0. A select: the compiler may drop an addition of zero.
    x = jnp.where(logits == 0, jnp.zeros_like(logits), logits)
    bits = lax.bitcast_convert_type(x, jnp.int16 if x.dtype.itemsize == 2 else jnp.int32)
    # Negative floats grow towards zero as their bits shrink.
    keys = jnp.where(bits < 0, bits ^ (2 ** (8 * bits.dtype.itemsize - 1) - 1), bits)
    return Order(keys.astype(jnp.int32), ids)


def within(tokens: Order, last: LastKept) -> Bool[Array, "*rows V"]:
    """Which tokens do not come after `last`."""
    key, id = last.key[..., None], last.id[..., None]
    return (tokens.keys > key) | ((tokens.keys == key) & (tokens.ids <= id))


def last_within(
    tokens: Order,
    key_bits: int,
    vocab_size: int,
    reaches: Callable[[jax.Array], jax.Array],
    shard: VocabShard,
) -> LastKept:
    """The last token with fewer than a limit before it.

    Args:
      tokens: the order.
      key_bits: 8 * the logits' item size.
      vocab_size: V.
      reaches: `tokens [..., V] bool -> [...] bool`, whether the sum of these tokens has reached
        the limit; false for no token at all.
      shard: the columns of each row that this device holds.

    Returns:
      A token of the row; or a place behind all of them, if they do not reach the limit together.
    """
    per_trip = 1 if shard.axis_name is None else BITS_PER_TRIP
    key = _last_key(tokens, key_bits, reaches, per_trip)
    above = tokens.keys > key[..., None]
    equal = tokens.keys == key[..., None]

    def up_to_reaches(id: jax.Array) -> jax.Array:
        return reaches(above | (equal & (tokens.ids <= _signed(id)[..., None])))

    id_bits = (vocab_size - 1).bit_length()
    last = shard.maximum(jnp.where(equal, tokens.ids, -1))[..., None]
    some_left_out = reaches(above | (equal & (tokens.ids < last)))
    # The usual case, at least in float32: all equal ones are kept, and no id is searched for.
    id = lax.cond(
        jnp.any(some_left_out),
        lambda: _signed(_least(up_to_reaches, id_bits, key.shape, per_trip)),
        lambda: vary_like(jnp.full(key.shape, vocab_size - 1, jnp.int32), some_left_out),
    )
    return LastKept(key, id)


def _last_key(
    tokens: Order, key_bits: int, reaches: Callable[[jax.Array], jax.Array], per_trip: int
) -> jax.Array:
    """The least key [...] int32 above which the limit is not reached.

    It belongs to a token of the row; it is the lowest that there is if the limit is not reached.
    """
    lowest = jnp.int32(-(2 ** (key_bits - 1)))

    def below_limit(offset: jax.Array) -> jax.Array:
        return ~reaches(tokens.keys > (_signed(offset) + lowest)[..., None])

    offset = _least(below_limit, key_bits, tokens.keys.shape[:-1], per_trip)
    key: jax.Array = _signed(offset) + lowest
    return key


def _least(
    holds: Callable[[jax.Array], jax.Array], bits: int, rows: tuple[int, ...], bits_per_trip: int
) -> jax.Array:
    """The least number [...] uint32 of so many bits that `holds` accepts; a larger one if none.

    `holds` rejects the numbers up to some point and accepts those from there on.
    """
    trips = -(-bits // bits_per_trip)
    digits = jnp.arange(1, 2**bits_per_trip, dtype=jnp.uint32)

    def trip(i: jax.Array, found: jax.Array) -> jax.Array:
        place = jnp.uint32(bits_per_trip) * (jnp.uint32(trips - 1) - i.astype(jnp.uint32))

        def too_small(digit: jax.Array) -> jax.Array:
            # The largest number with a smaller digit here; whether the digit must be this large.
            return ~holds(found + (digit << place) - jnp.uint32(1))

        count: jax.Array = jax.vmap(too_small)(digits).sum(0, dtype=jnp.uint32)
        longer: jax.Array = found + (count << place)
        return longer

    zeros = jnp.zeros(rows, jnp.uint32)
    with jax.named_scope("search"):  # dozens of reads of the row: a name to find in a profile
        least: jax.Array = lax.fori_loop(
            0, trips, trip, vary_like(zeros, jax.eval_shape(holds, zeros))
        )
    return least


def _signed(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


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
    order: Order
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

    def last_within(self, reaches: Callable[[jax.Array], jax.Array]) -> LastKept:
        """The last token with fewer than a limit before it: see `threshold_search`."""
        return last_within(self.order, self.key_bits, self.vocab_size, reaches, self.shard)

    def down_to(self, asked: jax.Array, last: Callable[[], LastKept]) -> jax.Array:
        """The tokens [..., V] bool up to `last()`; all tokens, for nothing, if no slot asked."""
        lowest = -(2 ** (self.key_bits - 1))
        everything = LastKept(
            jnp.full(self.largest.shape, lowest, jnp.int32),
            jnp.full(self.largest.shape, self.vocab_size, jnp.int32),
        )
        everything = vary_like(everything, self.largest)
        return within(self.order, lax.cond(asked, last, lambda: everything))


def _rows(logits: jax.Array, sampling: Sampling, shard: VocabShard) -> _Rows:
    x = logits.astype(jnp.float32)
    largest = shard.maximum(x)
    vocab_size = shard.size(logits.shape[-1])
    return _Rows(
        x=x,
        largest=largest,
        order=order(logits, _ids(logits, shard)),
        key_bits=8 * logits.dtype.itemsize,
        weights=exact_sums.digits(_weights(x, largest, sampling), vocab_size),
        vocab_size=vocab_size,
        shard=shard,
    )


def _top_k(rows: _Rows, sampling: Sampling) -> jax.Array:
    """The tokens [B, ..., V] bool that top-k keeps."""
    k = per_row(sampling.top_k, rows.largest)

    def last() -> LastKept:
        return rows.last_within(
            lambda where: (rows.shard.sum(where.astype(jnp.int32)) >= k) & (k > 0)
        )

    return rows.down_to(jnp.any(sampling.top_k > 0), last)


def _top_p(rows: _Rows, kept: jax.Array, sampling: Sampling) -> jax.Array:
    """The tokens that top-p keeps of those that are `kept`; [B, ..., V] bool both."""
    p = per_row(sampling.top_p, rows.largest)

    def last() -> LastKept:
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
