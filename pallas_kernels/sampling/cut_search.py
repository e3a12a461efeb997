"""The cut of rows whose kept tokens are more than candidates can hold: a search over whole rows.

Dozens of reads of a row, so `distribution.truncation` takes it for such rows alone, one at a time.
The order is logit descending, equal logits by id, lowest first. Nothing is sorted: the last token
kept is searched for bit by bit, first among the values of the logits, then among the ids of the
equal ones. Each trip sums over the row: vocabulary shards exchange a few sums a row and trip, and
nothing of the vocabulary's size.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from pallas_kernels.backends import exact_sums
from pallas_kernels.backends.row_totals import scaled
from pallas_kernels.lowering.forms import vary_like
from pallas_kernels.meshes.placement import VocabShard
from pallas_kernels.numbers.exponential import exponential
from pallas_kernels.numbers.logarithm import logarithm
from pallas_kernels.numbers.ordered_keys import floats, key_of, ordered_keys
from pallas_kernels.sampling.parameters import Sampling, Truncation, lowest_gap
from pallas_kernels.sampling.row_read import RowScale

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
    return Order(ordered_keys(logits).astype(jnp.int32), ids)


def within(tokens: Order, last: LastKept) -> Bool[Array, "*rows V"]:
    """Which tokens do not come after `last`."""
    key, id = last.key[..., None], last.id[..., None]
    return (tokens.keys > key) | ((tokens.keys == key) & (tokens.ids <= id))


def last_within(
    tokens: Order,
    key_bits: int,
    vocab_size: int,
    reaches: Callable[[LastKept], jax.Array],
    shard: VocabShard,
) -> LastKept:
    """The last token with fewer than a limit before it.

    One loop searches its key, looks whether all tokens of that key are kept, as they usually are,
    and searches its id if they are not.

    Args:
      tokens: the order.
      key_bits: 8 * the logits' item size.
      vocab_size: V.
      reaches: `place [...] -> [...] bool`, whether the sum of the tokens up to a place has reached
        the limit; false where there is none.
      shard: the columns of each row that this device holds.

    Returns:
      A token of the row; or a place behind all of them, if they do not reach the limit together.
    """
    per_trip = 1 if shard.axis_name is None else BITS_PER_TRIP
    bits = key_bits, (vocab_size - 1).bit_length()
    key_trips, id_trips = (-(-number // per_trip) for number in bits)
    digits = jnp.arange(1, 2**per_trip, dtype=jnp.uint32)
    lowest, shape = jnp.int32(-(2 ** (key_bits - 1))), tokens.keys.shape[:-1]

    def last_of(key: jax.Array) -> jax.Array:
        return shard.maximum(jnp.where(tokens.keys == key[..., None], tokens.ids, -1))

    def trip(state: _Search) -> _Search:
        i, key, id, _ = state
        of_key, looks = i < key_trips, i == key_trips
        trips_left = jnp.where(of_key, key_trips - 1, key_trips + id_trips) - i
        place = jnp.uint32(per_trip) * jnp.maximum(trips_left, 0).astype(jnp.uint32)
        own = _signed(key) + lowest
        like = jax.eval_shape(last_of, own)
        last = lax.cond(looks, last_of, lambda _: vary_like(jnp.zeros(shape, jnp.int32), like), own)

        def is_larger(digit: jax.Array) -> jax.Array:
            """Whether the digit is this one or a larger one; of a look, if some are left out."""
            # The largest number with a smaller digit.
            tried = _signed(jnp.where(of_key, key, id) + (digit << place) - jnp.uint32(1))
            at = jnp.where(of_key, tried + lowest, own)
            last_id = jnp.where(of_key, -1, jnp.where(looks, last - 1, tried))
            return reaches(LastKept(at, last_id)) ^ (i > key_trips)

        larger = jax.vmap(is_larger)(digits)
        more = larger.sum(0, dtype=jnp.uint32) << place
        return _Search(
            i + 1,
            jnp.where(of_key, key + more, key),
            jnp.where(i > key_trips, id + more, id),
            ~looks | jnp.any(larger),
        )

    def goes_on(state: _Search) -> jax.Array:
        return state.goes_on & (state.trip <= key_trips + id_trips)

    zeros = jnp.zeros(shape, jnp.uint32)
    start = zeros, zeros, jnp.bool_(True)
    like = jax.eval_shape(reaches, LastKept(_signed(zeros), _signed(zeros)))
    with jax.named_scope("search"):  # dozens of reads of the row: a name to find in a profile
        found = lax.while_loop(goes_on, trip, _Search(jnp.int32(0), *vary_like(start, like)))
    id = jnp.where(found.goes_on, _signed(found.id), vocab_size - 1)
    return LastKept(_signed(found.key) + lowest, id)


class _Search(NamedTuple):
    """Where a search is."""

    trip: Int32[Array, ""]
    key: UInt32[Array, "..."]  # above the lowest
    id: UInt32[Array, "..."]
    goes_on: Bool[Array, ""]  # whether an id must be searched for, once the key is found


def _signed(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def searched(
    logits: jax.Array, sampling: Sampling, scale: RowScale, shard: VocabShard
) -> Truncation:
    """The cuts [B] of logits [B, V]: valid rows of requests that are not greedy.

    `shard` says which columns of the rows this device holds. Anything in other rows.
    """
    x, vocab_size = logits.astype(jnp.float32), shard.size(logits.shape[-1])
    tokens = order(logits, _ids(logits, shard))
    weights = exponential(scaled(x, scale.largest[..., None], scale.inverse[..., None]))
    k, p = sampling.top_k, sampling.top_p
    number = jnp.minimum(k, vocab_size).astype(jnp.float32)

    def mass(weights: jax.Array, where: jax.Array) -> exact_sums.Mass:
        return exact_sums.mass(jnp.where(where, weights, 0.0), vocab_size, shard)

    def share(where: jax.Array) -> jax.Array:
        return exact_sums.to_float(mass(weights, where), vocab_size)

    def filtered(step: jax.Array, kept: jax.Array) -> jax.Array:
        """What top-k, and in the second step top-p, leaves of the tokens that are `kept`."""
        by_p = step > 0
        counted = jnp.where(kept, jnp.where(by_p, weights, jnp.float32(1)), 0.0)
        limit = jnp.where(by_p, jnp.maximum(p * share(kept), 1e-30), number)  # never nothing
        least, filters = exact_sums.at_least(limit, vocab_size), jnp.where(by_p, p < 1, k > 0)

        def reaches(place: LastKept) -> jax.Array:
            return ~exact_sums.less(mass(counted, within(tokens, place)), least) & filters

        place = last_within(tokens, 8 * logits.dtype.itemsize, vocab_size, reaches, shard)
        return kept & within(tokens, place)

    first = jnp.where(jnp.any(sampling.top_k > 0), 0, 1)
    last = jnp.where(jnp.any(sampling.top_p < 1), 2, 1)
    kept = lax.fori_loop(first, last, filtered, x > -jnp.inf)
    kept &= x - scale.largest[..., None] >= lowest_gap(sampling)[..., None]
    # By keys: XLA takes a subnormal number for zero where it compares.
    keys = ordered_keys(x)
    least = shard.across_minimum(jnp.where(kept, keys, key_of(jnp.inf, x.dtype)).min(axis=-1))
    cut_logit, last = floats(least, x.dtype), kept & (keys == least[..., None])
    cut_id = shard.across_maximum(jnp.where(last, tokens.ids, -1).max(axis=-1))
    log_kept = logarithm(share(kept) / exact_sums.to_float(scale.total, vocab_size))
    return Truncation(cut_logit, cut_id, jnp.minimum(log_kept, 0.0))


def _ids(logits: jax.Array, shard: VocabShard) -> jax.Array:
    """The token ids of logits [..., V], broadcast."""
    ids = shard.ids(logits.shape[-1]).reshape((1,) * (logits.ndim - 1) + (-1,))
    return jnp.broadcast_to(ids, logits.shape)
