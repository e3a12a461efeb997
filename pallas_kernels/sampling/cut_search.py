"""The cut of rows whose kept tokens are more than candidates can hold: a search over whole rows.

The order is logit descending, equal logits by id, lowest first. Nothing is sorted. A filter keeps
the shortest prefix of the order whose sum reaches a limit, and a prefix is a key (`ordered_keys`)
and how many of the tokens with that key belong to it: they have one weight, so their number follows
from the sum above them. The key is searched for by reads of the rows, each of which sums what is
above a dozen keys. The first dozen lies around a guess, from one token in sixteen: for logits of
16 bits one read is enough nearly always.

Sums are whole numbers (`exact_sums`): neither guesses nor shards of the vocabulary change a bit of
a cut. Shards exchange a few numbers a row and read, and nothing of the vocabulary's size.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from pallas_kernels.backends import exact_sums
from pallas_kernels.backends.exact_sums import Mass
from pallas_kernels.backends.row_totals import scaled
from pallas_kernels.backends.xla.groups import largest
from pallas_kernels.backends.xla.selection import top_k_of_parts
from pallas_kernels.lowering.forms import barrier, pin_to_iteration, vary_like
from pallas_kernels.lowering.row_pieces import summed
from pallas_kernels.meshes.placement import VocabShard
from pallas_kernels.numbers.exponential import exponential
from pallas_kernels.numbers.logarithm import logarithm
from pallas_kernels.numbers.ordered_keys import floats, key_of, ordered_keys
from pallas_kernels.sampling.parameters import Sampling, Truncation, lowest_gap
from pallas_kernels.sampling.row_read import RowScale

NUM_KEYS = 9  # of a read: a dozen more cost as much as another read
DOUBT = 0.05  # of what lies below the guess: three standard errors of a few thousand tokens
# Of the second read of float32, which is where the sums say: so many of the errors that n tokens
# without an order let expect, which is MISPLACED / sqrt(n) of what is left.
FARTHEST, MISPLACED = 6.0, 0.5
NARROW = 1 << 19  # float32 keys, of which sums are nearly a straight line
SAMPLED, RUN = 16, 256  # the first so many tokens of each run are a sample
SMALLEST_SAMPLED = 4096  # columns
GUESSED_BITS, GUESSED_PER_TRIP = 20, 4  # of a guess's key
FEW_TOKENS = 64  # of a row, among which the last one is found by putting them in order
PIECES, FEW_COLUMNS = 16, 32  # of a row, in which the last token is looked for


class Rows(NamedTuple):
    """B rows of logits, of which this device holds the columns of `shard`."""

    logits: Float[Array, "B C"]
    scale: RowScale
    shard: VocabShard

    @property
    def vocab_size(self) -> int:
        return self.shard.size(self.logits.shape[1])

    @property
    def keys(self) -> Array:
        """[B, C] integers of the logits' size."""
        return ordered_keys(self.logits)

    def weights(self, logits: jax.Array) -> jax.Array:
        """exp((x - m) / T) float32 of logits [B, ...] of the rows."""
        shape = -1, *[1] * (logits.ndim - 1)
        largest, inverse = (x.reshape(shape) for x in self.scale[:2])
        return exponential(scaled(logits.astype(jnp.float32), largest, inverse))

    def values(self, keys: jax.Array) -> jax.Array:
        """The logits of keys, int32, in their dtype."""
        return floats(keys.astype(self.keys.dtype), self.logits.dtype)

    def mass_of_key(self, key: jax.Array, by_mass: jax.Array, share: float = 1.0) -> Mass:
        """What one token with this key [B] adds to a sum: its weight, or 1; or a share of that."""
        weight = jnp.where(by_mass, self.weights(self.values(key)), jnp.float32(1))
        digits = exact_sums.digits(weight * jnp.float32(share), self.vocab_size)
        return tuple(lax.bitcast_convert_type(digit, jnp.uint32) for digit in digits)


class Prefix(NamedTuple):
    """The first tokens of each row: all above a key, and the first ones with that key."""

    key: Int32[Array, " B"]
    number: Int32[Array, " B"]  # of tokens with the key; V: all of them
    above: Mass  # [B] each, the weights above the key
    known: Bool[Array, " B"]  # whether `above` is known
    met: Bool[Array, " B"]  # whether a token has the key


def searched(
    logits: Float[Array, "B C"],
    sampling: Sampling,
    scale: RowScale,
    shard: VocabShard,
    is_searched: Bool[Array, " B"] | None = None,
) -> Truncation:
    """The cuts [B] of rows: valid ones of requests that are not greedy. Anything in other rows.

    Args:
      logits: the columns of `shard`.
      sampling: of each row.
      scale: of each row.
      shard: which columns of the rows this device holds.
      is_searched: whose cuts are; None: all. The others cost nothing.
    """
    rows = Rows(logits, scale, shard)
    vocab_size = rows.vocab_size
    is_searched = jnp.ones(logits.shape[0], bool) if is_searched is None else is_searched
    by_k, by_p = (sampling.top_k > 0) & (sampling.top_k < vocab_size), sampling.top_p < 1
    by_k, by_p = by_k & is_searched, by_p & is_searched
    total = exact_sums.to_float(scale.total, vocab_size)

    def filtered(step: jax.Array, prefix: Prefix) -> Prefix:
        """What top-k, and in the second step top-p, leaves."""
        by_mass = step > 0
        needs_mass = by_k & by_p & by_mass
        base = jnp.where(
            needs_mass, exact_sums.to_float(_mass(rows, prefix, needs_mass), vocab_size), total
        )
        count = sampling.top_k.astype(jnp.float32)
        limit = jnp.where(by_mass, jnp.maximum(sampling.top_p * base, 1e-30), count)  # never none
        filters = jnp.where(by_mass, by_p, by_k)
        shortest = _shortest(rows, by_mass, limit, filters)
        shortest = shortest._replace(known=jnp.broadcast_to(by_mass, filters.shape))
        return _where(filters & _is_shorter(shortest, prefix), shortest, prefix)

    finite = jnp.full(is_searched.shape, key_of(-jnp.inf, logits.dtype).astype(jnp.int32) + 1)
    all_tokens = jnp.full(is_searched.shape, vocab_size, jnp.int32)
    no_mass = (jnp.zeros(is_searched.shape, jnp.uint32),) * exact_sums.num_digits(vocab_size)
    unknown = jnp.zeros(is_searched.shape, bool)
    first, last = jnp.where(jnp.any(by_k), 0, 1), jnp.where(jnp.any(by_p), 2, 1)
    prefix = Prefix(finite, all_tokens, no_mass, unknown, unknown)
    prefix = lax.fori_loop(first, last, filtered, vary_like(prefix, (scale, sampling)))
    within = Prefix(_lowest_within(rows, sampling), all_tokens, no_mass, unknown, unknown)
    prefix = _where(_is_shorter(within, prefix), within, prefix)
    return _cut_at(rows, prefix, is_searched)


def _is_shorter(a: Prefix, b: Prefix) -> jax.Array:
    return (a.key > b.key) | ((a.key == b.key) & (a.number < b.number))


def _where(which: jax.Array, a: Prefix, b: Prefix) -> Prefix:
    return jax.tree.map(lambda x, y: jnp.where(which, x, y), a, b)  # type: ignore[no-any-return]


def _sums_above(rows: Rows, keys: jax.Array, by_mass: jax.Array) -> Mass:
    """The sums [B, T] of the weights, or the numbers, of tokens above each of T keys [B, T]."""
    row_keys, vocab_size = rows.keys, rows.vocab_size
    values = jnp.where(by_mass, rows.weights(rows.logits), jnp.float32(1))
    digits = exact_sums.digits(values, vocab_size)
    # All in one loop: else the weights are computed for each.
    terms = []
    for i in range(keys.shape[1]):
        above = row_keys > keys[:, i, None].astype(row_keys.dtype)
        terms += [jnp.where(above, digit, 0) for digit in digits]
    sums = rows.shard.across_sum(jnp.stack(summed(*terms)))
    sums = sums.reshape(keys.shape[1], len(digits), -1)
    return exact_sums.of_sums(tuple(sums[:, i].T for i in range(len(digits))), vocab_size)


class _Bracket(NamedTuple):
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


def _shortest(rows: Rows, by_mass: jax.Array, limit: jax.Array, filters: jax.Array) -> Prefix:
    """The shortest prefix whose sum reaches a limit; all tokens where none does.

    Args:
      rows: the rows.
      by_mass: [] bool, whether weights are added up; else tokens are counted.
      limit: [B] float32, above 0.
      filters: [B] bool, the rows where it is wanted.
    """
    vocab_size, scale = rows.vocab_size, rows.scale
    least = exact_sums.at_least(limit, vocab_size)
    guess = _guess(rows, by_mass, limit)

    def read(state: _Bracket) -> _Bracket:
        keys = _keys_to_try(rows, state, guess, limit, by_mass)
        # Values of this read: else XLA would keep all weights, which costs more than to make them.
        pinned = rows._replace(logits=pin_to_iteration(rows.logits, state.reads))
        sums = _sums_above(pinned, keys, by_mass)
        reached = ~exact_sums.less(sums, tuple(digit[:, None] for digit in least))
        low = jnp.where(reached, keys, state.low[:, None]).max(1)
        high = jnp.where(reached, state.high[:, None], keys).min(1)

        def at(key: jax.Array, x: jax.Array, otherwise: jax.Array) -> jax.Array:
            is_key = keys == key[:, None]
            return jnp.where(
                is_key.any(1), jnp.where(is_key, x, jnp.zeros_like(x)).max(1), otherwise
            )

        def all_at(key: jax.Array, otherwise: Mass) -> Mass:
            return tuple(at(key, x, y) for x, y in zip(sums, otherwise, strict=True))

        above = all_at(low, state.above_low), all_at(high, state.above_high)
        return _Bracket(state.reads + 1, low, high, *above)

    def goes_on(state: _Bracket) -> jax.Array:
        return jnp.any((state.width > 1) & filters & ~_are_few(rows, state, by_mass))

    lowest = key_of(-jnp.inf, rows.logits.dtype).astype(jnp.int32)
    highest = ordered_keys(scale.largest.astype(rows.logits.dtype)).astype(jnp.int32)
    zeros = jnp.zeros_like(highest)
    start = _Bracket(
        jnp.int32(0),
        zeros + lowest,
        jnp.where(highest > lowest, highest, lowest + 1),
        exact_sums.at_least(jnp.full(zeros.shape, vocab_size, jnp.float32), vocab_size),
        (zeros.astype(jnp.uint32),) * exact_sums.num_digits(vocab_size),
    )
    # What is known of a row is the same on every shard of the vocabulary.
    inputs = (scale, limit, filters)
    with jax.named_scope("search"):  # reads of the rows: a name to find in a profile
        bracket = lax.while_loop(goes_on, read, vary_like(start, inputs))

    few = (bracket.width > 1) & filters
    key, above = lax.cond(
        jnp.any(few),
        lambda: _among_few(rows, bracket, by_mass, least, few),
        lambda: (bracket.high, bracket.above_high),
    )
    mass = rows.mass_of_key(key, by_mass)
    number = _number_of_equal(above, mass, least, vocab_size)
    return Prefix(key, number, above, filters, bracket.low > lowest)


def _are_few(rows: Rows, state: _Bracket, by_mass: jax.Array) -> jax.Array:
    """Whether there are at most `FEW_TOKENS` between the two keys [B]: more would weigh more."""
    # Weights are rounded: a little larger logit may have a little smaller weight.
    least = rows.mass_of_key(state.low + 1, by_mass, 0.75)
    many = jnp.full(state.low.shape, min(FEW_TOKENS, rows.vocab_size), jnp.int32)
    above = _added(state.above_high, many, least, rows.vocab_size)
    return exact_sums.less(state.above_low, above)


def _among_few(
    rows: Rows, state: _Bracket, by_mass: jax.Array, least: Mass, few: jax.Array
) -> tuple[jax.Array, Mass]:
    """The key [B] where sums reach `least`, and the sums above it; of rows with `few` tokens left.

    These tokens are put in order.
    """
    keys, vocab_size, batch = rows.keys, rows.vocab_size, state.low.shape[0]
    low, high = (key[:, None].astype(keys.dtype) for key in (state.low, state.high))
    inside = jnp.where((keys > low) & (keys <= high), rows.logits, -jnp.inf)
    ids, logits = largest(inside, None, min(FEW_TOKENS, inside.shape[1]))
    if rows.shard.axis_name is not None:
        parts = rows.shard.gathered_together((ids, logits))
        _, logits = top_k_of_parts(*parts, min(FEW_TOKENS, parts[0].shape[0] * ids.shape[1]))
    there = logits > -jnp.inf
    values = jnp.where(by_mass, rows.weights(logits), jnp.float32(1))
    digits = exact_sums.digits(jnp.where(there, values, jnp.float32(0)), vocab_size)

    def beside(sums: Sequence[jax.Array]) -> Mass:
        more = exact_sums.of_sums(tuple(sums), vocab_size)
        above = [x.reshape(batch, *[1] * (sums[0].ndim - 1)) for x in state.above_high]
        return exact_sums.carried(tuple(map(jnp.add, above, more)), vocab_size)

    upto = beside([jnp.cumsum(x, axis=1, dtype=x.dtype) for x in digits])
    short = exact_sums.less(upto, tuple(digit[:, None] for digit in least)) & there
    place = jnp.minimum(short.sum(1, dtype=jnp.int32), there.sum(1, dtype=jnp.int32) - 1)
    order = ordered_keys(logits.astype(rows.logits.dtype)).astype(jnp.int32)
    key = jnp.take_along_axis(order, jnp.maximum(place, 0)[:, None], axis=1)
    above = beside(summed(*(jnp.where(order > key, x, 0) for x in digits)))
    return (
        jnp.where(few, key[:, 0], state.high),
        tuple(jnp.where(few, *pair) for pair in zip(above, state.above_high, strict=True)),
    )


def _keys_to_try(
    rows: Rows, state: _Bracket, guess: jax.Array | None, limit: jax.Array, by_mass: jax.Array
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
        narrow = (width < NARROW) & (state.reads % 2 == 1) & jnp.isfinite(place)
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


def _guess(rows: Rows, by_mass: jax.Array, limit: jax.Array) -> jax.Array | None:
    """Two keys [B, 2] between which sums nearly always reach the limit; None of few columns.

    From a sample, by what lies below: of the tokens there none weighs much.
    """
    batch, width = rows.logits.shape
    if width < SMALLEST_SAMPLED:
        return None
    runs = width // RUN
    sample = rows.logits[:, : runs * RUN].reshape(batch, runs, RUN)[:, :, :SAMPLED]
    sample = sample.reshape(batch, -1)
    counts = jnp.where(sample > -jnp.inf, jnp.float32(1), jnp.float32(0))
    values = jnp.where(by_mass, rows.weights(sample), counts)
    keys = ordered_keys(sample).astype(jnp.int32)
    values, keys = barrier((values, keys))
    share = jnp.float32(sample.shape[1] / width)
    total = exact_sums.to_float(rows.scale.total, rows.vocab_size)
    number = rows.shard.across_sum(counts.sum(1))
    below = jnp.where(by_mass, (total - limit) * share, number - limit * share)
    doubt = 1 + DOUBT * (2 * jnp.arange(2, dtype=jnp.float32) - 1)
    below = below[:, None] * doubt[None]
    bits = min(8 * rows.logits.dtype.itemsize, GUESSED_BITS)
    unit = 8 * rows.logits.dtype.itemsize - bits

    # Among shards each trip waits for an exchange: fewer of them, of more sums.
    per_trip = 1 if rows.shard.axis_name is None else GUESSED_PER_TRIP
    steps = jnp.arange(1, 2**per_trip, dtype=jnp.int32)

    def step(i: jax.Array, guesses: jax.Array) -> jax.Array:
        place = unit + bits - per_trip * (i + 1)
        higher = (guesses[..., None] + (steps << place)[None, None]).reshape(batch, -1)
        masses = [
            jnp.where(keys <= higher[:, i, None], values, jnp.float32(0)).sum(1)
            for i in range(higher.shape[1])
        ]
        mass = rows.shard.across_sum(jnp.stack(masses, 1)).reshape(batch, 2, -1)
        return guesses + ((mass <= below[..., None]).sum(2, dtype=jnp.int32) << place)

    start = jnp.full((batch, 2), -(2 ** (bits + unit - 1)), jnp.int32)
    start = vary_like(start, below)
    return lax.fori_loop(0, bits // per_trip, step, start)  # type: ignore[no-any-return]


def _number_of_equal(above: Mass, mass: Mass, least: Mass, vocab_size: int) -> jax.Array:
    """How many tokens [B] of mass `each` reach `least` together with `above`; beyond V if none."""
    bits = vocab_size.bit_length()

    def step(i: jax.Array, number: jax.Array) -> jax.Array:
        more = number + (jnp.int32(1) << (bits - 1 - i))
        short = exact_sums.less(_added(above, more, mass, vocab_size), least) & (more <= vocab_size)
        return jnp.where(short, more, number)

    start = vary_like(jnp.zeros(above[0].shape, jnp.int32), (above, mass, least))
    return lax.fori_loop(0, bits, step, start) + 1  # type: ignore[no-any-return]


def _added(above: Mass, number: jax.Array, mass: Mass, vocab_size: int) -> Mass:
    """`above` and so many times `each`; the number is at most V."""
    count = jnp.minimum(number, vocab_size).astype(jnp.uint32)
    masses = exact_sums.carried(tuple(count * digit for digit in mass), vocab_size)
    return exact_sums.carried(tuple(map(jnp.add, above, masses)), vocab_size)


def _mass(rows: Rows, prefix: Prefix, is_searched: jax.Array) -> Mass:
    """The weights [B] of prefixes that are searched for, each with the equal tokens it counts."""
    by_mass = jnp.bool_(True)

    def above() -> Mass:
        return tuple(x[:, 0] for x in _sums_above(rows, prefix.key[:, None], by_mass))

    sums_above = lax.cond(jnp.any(is_searched & ~prefix.known), above, lambda: prefix.above)
    mass = rows.mass_of_key(prefix.key, by_mass)
    return _added(sums_above, prefix.number, mass, rows.vocab_size)


def _lowest_within(rows: Rows, sampling: Sampling) -> jax.Array:
    """The lowest key [B] that min-p keeps; without it that of -inf. No row is read."""
    gap, largest = lowest_gap(sampling), rows.scale.largest
    bits = 8 * rows.logits.dtype.itemsize

    def step(_: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = state
        middle = (low & high) + ((low ^ high) >> 1)
        within = rows.values(middle).astype(jnp.float32) - largest >= gap
        return jnp.where(within, low, middle), jnp.where(within, middle, high)

    lowest = key_of(-jnp.inf, rows.logits.dtype).astype(jnp.int32)
    highest = ordered_keys(largest.astype(rows.logits.dtype)).astype(jnp.int32)
    start = vary_like((jnp.zeros_like(highest) + lowest, highest), (gap, largest))
    _, key = lax.fori_loop(0, bits, step, start)
    return jnp.where(sampling.min_p > 0, key, lowest)


def _cut_at(rows: Rows, prefix: Prefix, is_searched: jax.Array) -> Truncation:
    """The cut at a prefix's last token: of its key or, if none has that, of the lowest above it."""
    vocab_size = rows.vocab_size

    def lowest() -> jax.Array:
        keys = rows.keys
        not_below = keys >= prefix.key[:, None].astype(keys.dtype)
        lowest = jnp.where(not_below, keys, np.iinfo(keys.dtype).max).min(1)
        return rows.shard.across_minimum(lowest.astype(jnp.int32))

    key = lax.cond(jnp.any(is_searched & ~prefix.met), lowest, lambda: prefix.key)
    number = jnp.where(key == prefix.key, prefix.number, vocab_size)
    prefix = prefix._replace(key=key, number=number)
    column, count = _nth_equal(rows, key, number)
    # All tokens above a key are those above any other one that no token is between.
    mass = _mass(rows, prefix._replace(number=count), is_searched)
    share, total = (exact_sums.to_float(x, vocab_size) for x in (mass, rows.scale.total))
    cut_logit = rows.values(key).astype(jnp.float32)
    return Truncation(cut_logit, column, jnp.minimum(logarithm(share / total), 0.0))


def _nth_equal(rows: Rows, key: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The id [B] of the n-th token with a key, or of the last one, and its number n."""
    keys, shard = rows.keys, rows.shard
    column, count = _nth_column(keys, key, number)
    if shard.axis_name is None:
        return column, jnp.minimum(number, count)
    counts = shard.gathered(count)  # [shards, B]
    number = jnp.minimum(number, counts.sum(0, dtype=jnp.int32))
    before = jnp.cumsum(counts, axis=0, dtype=jnp.int32) - counts
    rank = number - jnp.take(before, lax.axis_index(shard.axis_name), axis=0)
    is_on_shard = (rank > 0) & (rank <= count)
    column, _ = _nth_column(keys, key, jnp.maximum(rank, 1))
    first = shard.ids(keys.shape[1])[0]
    return shard.across_sum(jnp.where(is_on_shard, column + first, 0)), number


def _nth_column(keys: jax.Array, key: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The column [B] of the n-th of keys [B, C] that equals `key`, or of the last; how many do.

    It is in one of a few pieces, whose counts tell in which; and there again.
    """
    same, first, total = key.astype(keys.dtype)[:, None], jnp.zeros_like(key), None
    while keys.shape[1] > FEW_COLUMNS:
        width = keys.shape[1]
        size = -(-width // PIECES)
        begins = [min(i, width - size) for i in range(0, width, size)]  # the last may begin early
        column = jnp.arange(size, dtype=jnp.int32)[None]
        marks = [
            ((keys[:, begin : begin + size] == same) & (column >= i * size - begin)).astype(
                jnp.int32
            )
            for i, begin in enumerate(begins)
        ]
        counts = jnp.stack(summed(*marks), axis=1)
        if total is None:
            total = counts.sum(1, dtype=jnp.int32)
            number = jnp.minimum(number, total)
        upto = jnp.cumsum(counts, axis=1, dtype=jnp.int32)
        piece = jnp.minimum((upto < number[:, None]).sum(1, dtype=jnp.int32), len(begins) - 1)
        before = jnp.take_along_axis(upto - counts, piece[:, None], axis=1)[:, 0]
        begin = jnp.minimum(piece * size, width - size)
        keys = jax.vmap(functools.partial(_columns, size))(keys, begin)
        keys = jnp.where(column < (piece * size - begin)[:, None], same - 1, keys)
        first, number = first + begin, number - before
    upto = jnp.cumsum(keys == same, axis=1, dtype=jnp.int32)
    if total is None:
        total = upto[:, -1]
        number = jnp.minimum(number, total)
    return first + (upto < number[:, None]).sum(1, dtype=jnp.int32), total


def _columns(size: int, row: jax.Array, begin: jax.Array) -> jax.Array:
    return lax.dynamic_slice(row, (begin,), (size,))
