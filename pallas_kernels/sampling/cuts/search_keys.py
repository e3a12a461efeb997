"""Which keys a search reads its rows at: around a guess, where the sums say, or evenly apart.

No guess changes what is found, only how many reads that takes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, UInt32

from pallas_kernels.backends import exact_sums
from pallas_kernels.backends.exact_sums import Mass
from pallas_kernels.lowering import typed
from pallas_kernels.lowering.forms import barrier, vary_like
from pallas_kernels.lowering.row_pieces import summed
from pallas_kernels.numbers.ordered_keys import ordered_keys
from pallas_kernels.sampling.cuts.searched_rows import SearchedRows

NUM_KEYS = 9  # of a read: a dozen more cost as much as another read
DOUBT = 0.07  # of what lies below the guess: three standard errors of a few thousand tokens
# Of the second read of float32, which is where the sums say: so many of the errors that n tokens
# without an order let expect, which is MISPLACED / sqrt(n) of what is left.
FARTHEST, MISPLACED = 6.0, 0.5
_NARROW = 1 << 19  # float32 keys, of which sums are nearly a straight line
WINDOW = 25  # keys of bfloat16, one beside the other, that are looked at first
SAMPLED, RUN = 8, 256  # the first so many tokens of each run are a sample
SMALLEST_SAMPLED = 4096  # columns
GUESSED_BITS, GUESSED_PER_TRIP = 20, 4  # of a guess's key
_LEAST = 1e-30  # that is divided by
_SPREAD = 79  # of 128: its multiples are apart from one another


class Bracket(NamedTuple):
    """Two keys around the one that is searched for."""

    reads: Int32[Array, ""]
    low: Int32[Array, " B"]  # what is above it reaches the limit
    high: Int32[Array, " B"]  # what is above it does not
    above_low: Mass
    above_high: Mass

    @property
    def width(self) -> UInt32[Array, " B"]:
        low, high = (lax.bitcast_convert_type(x, jnp.uint32) for x in (self.low, self.high))
        return high - low


def window_of(state: Bracket, guess: jax.Array) -> jax.Array:
    """The highest [B] of `WINDOW` keys around a guess [B, 1], between the bracket's two."""
    return jnp.minimum(jnp.maximum(guess[:, 0] + WINDOW // 2, state.low + WINDOW), state.high)


def around_window(top: jax.Array) -> jax.Array:
    """Another guess [B, 2], for rows whose key is not in the window below `top` [B]."""
    return jnp.stack([top - 2 * WINDOW, top + WINDOW], axis=1)


def narrowed(state: Bracket, keys: jax.Array, sums: Mass, least: Mass) -> Bracket:
    """The bracket after a read, which found what is above some keys [B, T]."""
    reached = ~exact_sums.less(sums, tuple(digit[:, None] for digit in least))
    low = jnp.maximum(jnp.where(reached, keys, state.low[:, None]).max(1), state.low)
    high = jnp.minimum(jnp.where(reached, state.high[:, None], keys).min(1), state.high)

    def at(key: jax.Array, x: jax.Array, otherwise: jax.Array) -> jax.Array:
        is_key = keys == key[:, None]
        return jnp.where(is_key.any(1), jnp.where(is_key, x, jnp.zeros_like(x)).max(1), otherwise)

    def all_at(key: jax.Array, otherwise: Mass) -> Mass:
        return tuple(at(key, x, y) for x, y in zip(sums, otherwise, strict=True))

    above = all_at(low, state.above_low), all_at(high, state.above_high)
    return Bracket(state.reads + 1, low, high, *above)


def keys_to_try(
    rows: SearchedRows,
    state: Bracket,
    guess: jax.Array | None,
    limit: jax.Array,
    by_mass: jax.Array,
) -> jax.Array:
    """[B, T] int32 keys between the two: around the guess, then evenly apart.

    Of float32 every other read is where the sums say, if what is left is narrow.
    """
    vocab_size, itemsize = rows.vocab_size, rows.logits.dtype.itemsize
    width, low = state.width[:, None], state.low[:, None]
    apart = jnp.maximum(width // jnp.uint32(NUM_KEYS + 1), 1)
    away = apart * (jnp.arange(NUM_KEYS, dtype=jnp.uint32)[None] + 1)
    few = width <= NUM_KEYS + 1
    if itemsize == 4:
        above = state.above_low, state.above_high, rows.mass_of_key(state.high, by_mass)
        most, least, mass = (exact_sums.to_float(x, vocab_size) for x in above)
        share = jnp.clip((most - limit) / (most - least), 0, 1)[:, None]
        error = MISPLACED / jnp.sqrt((most - least) / mass + 1)[:, None]
        place = jnp.clip(share + error * _around(), 0, 1)
        narrow = (width < _NARROW) & (state.reads % 2 == 1) & jnp.isfinite(place)
        by_sums = (jnp.where(narrow, place, 0) * width.astype(jnp.float32)).astype(jnp.uint32)
        away = jnp.where(narrow & ~few, by_sums, away)
    if guess is not None:
        # All keys around the guess if they are few, which they are of 16 bits; and two far off.
        inner = NUM_KEYS - 3  # steps
        between = guess[:, 1:] - guess[:, :1] + 2
        span = jnp.maximum(between, inner)
        begin = guess[:, :1] - 1 - (span - between) // 2
        index = jnp.arange(-1, NUM_KEYS - 1, dtype=jnp.int32)[None]
        around = begin + span // inner * index + span % inner * index // inner
        around += jnp.where(index < 0, -4 * span, jnp.where(index > inner, 4 * span, 0))
        around = jnp.clip(around, low + 1, jnp.maximum(state.high[:, None] - 1, low + 1))
        of_guess = lax.bitcast_convert_type(around - low, jnp.uint32)
        away = jnp.where((state.reads == 0) & ~few, of_guess, away)
    away = jnp.clip(away, 1, jnp.maximum(width - 1, 1))
    return low + lax.bitcast_convert_type(away, jnp.int32)


def _around() -> jax.Array:
    """[1, T] float32 from -FARTHEST to FARTHEST, denser in the middle."""
    even = 2 * jnp.arange(NUM_KEYS, dtype=jnp.float32)[None] / (NUM_KEYS - 1) - 1
    return FARTHEST * even * (0.1 + 0.9 * even * even)


def guess_of(rows: SearchedRows, by_mass: jax.Array, limit: jax.Array) -> jax.Array | None:
    """Two keys [B, 2] between which sums nearly always reach the limit; None of few columns.

    From a sample, by what lies below: of the tokens there none weighs much. Of bfloat16 it is the
    key [B, 1] at which they most likely do.
    """
    batch, width = rows.logits.shape
    if width < SMALLEST_SAMPLED:
        return None
    runs = width // RUN
    sample = rows.logits[:, : runs * RUN].reshape(batch, runs, RUN)[:, :, :SAMPLED]
    sample = sample.reshape(batch, -1)
    counts = jnp.where(sample > -jnp.inf, jnp.float32(1), jnp.float32(0))
    values = jnp.where(by_mass, rows.weights(sample), counts)
    share = jnp.float32(sample.shape[1] / width)
    total = exact_sums.to_float(rows.scale.total, rows.vocab_size)
    number = rows.shard.across_sum(counts.sum(1))
    below = jnp.where(by_mass, (total - limit) * share, number - limit * share)
    # In whole numbers, which a CPU adds up several times faster: a token is worth the largest if it
    # weighs as much as all that lies below, and all together are less than 2**31. A fraction counts
    # as one in as many of 128 tokens as it says.
    largest = jnp.float32(2 ** (30 - sample.shape[1].bit_length()))
    worth = jnp.minimum(values / jnp.maximum(below, _LEAST)[:, None], 1) * largest
    worth += (_SPREAD * jnp.arange(sample.shape[1], dtype=jnp.int32) % 128)[None] / 128
    worth, keys = barrier((worth.astype(jnp.int32), ordered_keys(sample).astype(jnp.int32)))
    # Keys of bfloat16 are farther apart than a guess may be wrong.
    guesses = 1 if rows.logits.dtype == jnp.bfloat16 else 2
    doubt = 1 + DOUBT * (2 * jnp.arange(guesses, dtype=jnp.float32) - (guesses - 1))
    most = jnp.where(below[:, None] > 0, largest * doubt[None], jnp.float32(0))
    bits = min(8 * rows.logits.dtype.itemsize, GUESSED_BITS)
    unit = 8 * rows.logits.dtype.itemsize - bits
    # A CPU reads the sample in each trip, and among shards each waits for an exchange.
    steps = jnp.arange(1, 2**GUESSED_PER_TRIP, dtype=jnp.int32)

    def step(i: jax.Array, guesses: jax.Array) -> jax.Array:
        place = unit + bits - GUESSED_PER_TRIP * (i + 1)
        higher = (guesses[..., None] + (steps << place)[None, None]).reshape(batch, -1)
        terms = (jnp.where(keys <= key[:, None], worth, 0) for key in higher.T)
        sums = jnp.stack(summed(*terms), 1).astype(jnp.float32)
        sums = rows.shard.across_sum(sums).reshape(*most.shape, -1)
        return guesses + ((sums <= most[..., None]).sum(2, dtype=jnp.int32) << place)

    start = vary_like(jnp.full(most.shape, -(2 ** (bits + unit - 1)), jnp.int32), most)
    return typed.fori_loop(0, bits // GUESSED_PER_TRIP, step, start)
