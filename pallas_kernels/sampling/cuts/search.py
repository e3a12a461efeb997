"""The cut of rows whose kept tokens are more than candidates can hold: a search over whole rows.

The order is logit descending, equal logits by id, lowest first; no row is sorted. A filter keeps
the shortest prefix of the order whose sum reaches a limit, and a prefix is a key (`ordered_keys`)
and how many of the tokens with that key belong to it: they have one weight, so their number follows
from the sum above them. The key is searched for by reads of the rows, each of which sums what is
above nine keys (`search_keys`). The first nine lie around a guess, from one token in 32: one
to three reads are enough nearly always. Of bfloat16 there is a read before these: it sums what is
above one key, and counts the tokens with each of a few keys below it, which costs half as much.

Sums are whole numbers (`exact_sums`): neither guesses nor shards of the vocabulary change a bit of
a cut. Shards exchange a few numbers a row and read, and nothing of the vocabulary's size.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.backends import exact_sums
from pallas_kernels.backends.exact_sums import Mass
from pallas_kernels.backends.xla.groups import largest
from pallas_kernels.backends.xla.selection import top_k_of_parts
from pallas_kernels.lowering import typed
from pallas_kernels.lowering.forms import pin_to_iteration, vary_like
from pallas_kernels.lowering.row_pieces import summed
from pallas_kernels.meshes.placement import VocabShard
from pallas_kernels.numbers.logarithm import logarithm
from pallas_kernels.numbers.ordered_keys import key_of, ordered_keys
from pallas_kernels.sampling.cuts.search_keys import (
    WINDOW,
    Bracket,
    around_window,
    guess_of,
    keys_to_try,
    narrowed,
    window_of,
)
from pallas_kernels.sampling.cuts.searched_rows import (
    SearchedRows,
    multiplied,
    nth_equal,
    sums_above,
    sums_above_run,
)
from pallas_kernels.sampling.parameters import Sampling, Truncation, lowest_gap
from pallas_kernels.sampling.row_read import RowScale

_BITS_PER_TRIP = 4  # of a search for a number, by as many loops as trips
_FEW_TOKENS = 64  # of a row, among which the last one is found by putting them in order


class Prefix(NamedTuple):
    """The first tokens of each row: all above a key, and the first ones with that key."""

    key: Int32[Array, " B"]
    number: Int32[Array, " B"]  # of tokens with the key; V: all of them
    above: Mass  # [B] each, the weights above the key
    is_weighed: Bool[Array, " B"]  # whether `above` is known
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
      is_searched: whose cuts are; None: all. For the others there is no further read.
    """
    rows = SearchedRows(logits, scale, shard)
    vocab_size = rows.vocab_size
    is_searched = jnp.ones(logits.shape[0], bool) if is_searched is None else is_searched
    by_k, by_p = (sampling.top_k > 0) & (sampling.top_k < vocab_size), sampling.top_p < 1
    by_k, by_p = by_k & is_searched, by_p & is_searched
    total = exact_sums.to_float(scale.total, vocab_size)

    def filtered(step: jax.Array, prefix: Prefix) -> Prefix:
        """What top-k, and in the second step top-p, leaves."""
        by_mass = step > 0
        needs_mass = by_k & by_p & by_mass
        number = _number_there(rows, prefix, needs_mass)
        mass = _mass(rows, prefix._replace(number=number), needs_mass)
        base = jnp.where(needs_mass, exact_sums.to_float(mass, vocab_size), total)
        count = sampling.top_k.astype(jnp.float32)
        limit = jnp.where(by_mass, jnp.maximum(sampling.top_p * base, 1e-30), count)  # never none
        filters = jnp.where(by_mass, by_p, by_k)
        shortest = _shortest(rows, by_mass, limit, filters)
        shortest = shortest._replace(is_weighed=jnp.broadcast_to(by_mass, filters.shape))
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
    return typed.tree_map(lambda x, y: jnp.where(which, x, y), a, b)


def _shortest(
    rows: SearchedRows, by_mass: jax.Array, limit: jax.Array, filters: jax.Array
) -> Prefix:
    """The shortest prefix whose sum reaches a limit; all tokens where none does.

    Args:
      rows: the rows.
      by_mass: [] bool, whether weights are added up; else tokens are counted.
      limit: [B] float32, above 0.
      filters: [B] bool, the rows where it is wanted.
    """
    vocab_size, scale = rows.vocab_size, rows.scale
    least = exact_sums.at_least(limit, vocab_size)
    guess = guess_of(rows, by_mass, limit)

    def read(state: Bracket) -> Bracket:
        keys = keys_to_try(rows, state, guess, limit, by_mass)
        # Values of this read: else XLA would keep all weights, which costs more than to make them.
        pinned = rows._replace(logits=pin_to_iteration(rows.logits, state.reads))
        return narrowed(state, keys, sums_above(pinned, keys, by_mass), least)

    def goes_on(state: Bracket) -> jax.Array:
        return jnp.any((state.width > 1) & filters & ~_are_few(rows, state, by_mass))

    lowest = key_of(-jnp.inf, rows.logits.dtype).astype(jnp.int32)
    highest = ordered_keys(scale.largest.astype(rows.logits.dtype)).astype(jnp.int32)
    zeros = jnp.zeros_like(highest)
    start = Bracket(
        jnp.int32(0),
        zeros + lowest,
        jnp.where(highest > lowest, highest, lowest + 1),
        exact_sums.at_least(jnp.full(zeros.shape, vocab_size, jnp.float32), vocab_size),
        (zeros.astype(jnp.uint32),) * exact_sums.num_digits(vocab_size),
    )
    if guess is not None and rows.logits.dtype == jnp.bfloat16:
        # Its keys are far enough apart for the one that is searched for to be near the guess.
        top = window_of(start, guess)
        start = narrowed(start, *sums_above_run(rows, top, WINDOW, by_mass), least)
        start, guess = start._replace(reads=jnp.int32(0)), around_window(top)
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


def _are_few(rows: SearchedRows, state: Bracket, by_mass: jax.Array) -> jax.Array:
    """Whether there are at most `_FEW_TOKENS` between the two keys [B]: more would weigh more."""
    # Weights are rounded: a little larger logit may have a little smaller weight.
    least = rows.mass_of_key(state.low + 1, by_mass, 0.75)
    many = jnp.full(state.low.shape, min(_FEW_TOKENS, rows.vocab_size), jnp.int32)
    above = _added(state.above_high, many, least, rows.vocab_size)
    return exact_sums.less(state.above_low, above)


def _among_few(
    rows: SearchedRows, state: Bracket, by_mass: jax.Array, least: Mass, few: jax.Array
) -> tuple[jax.Array, Mass]:
    """The key [B] where sums reach `least`, and the sums above it; of rows with `few` tokens left.

    These tokens are put in order.
    """
    keys, vocab_size, batch = rows.keys, rows.vocab_size, state.low.shape[0]
    low, high = (key[:, None].astype(keys.dtype) for key in (state.low, state.high))
    inside = jnp.where((keys > low) & (keys <= high), rows.logits, -jnp.inf)
    ids, logits = largest(inside, None, min(_FEW_TOKENS, inside.shape[1]))
    if rows.shard.axis_name is not None:
        parts = rows.shard.gathered_together((ids, logits))
        _, logits = top_k_of_parts(*parts, min(_FEW_TOKENS, parts[0].shape[0] * ids.shape[1]))
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


def _number_of_equal(above: Mass, mass: Mass, least: Mass, vocab_size: int) -> jax.Array:
    """How many tokens [B] of this mass reach `least` together with `above`; beyond V if none."""
    trips = -(-vocab_size.bit_length() // _BITS_PER_TRIP)
    steps = jnp.arange(1, 2**_BITS_PER_TRIP, dtype=jnp.uint32)[None]
    above, mass, least = (tuple(x[:, None] for x in digits) for digits in (above, mass, least))

    def step(i: jax.Array, number: jax.Array) -> jax.Array:
        place = jnp.asarray(_BITS_PER_TRIP * (trips - 1 - i), jnp.uint32)
        more = number[:, None] + (steps << place)
        short = exact_sums.less(_added(above, more, mass, vocab_size), least) & (more <= vocab_size)
        return number + (short.sum(1, dtype=jnp.uint32) << place)

    start = vary_like(jnp.zeros(above[0].shape[:1], jnp.uint32), (above, mass, least))
    return typed.fori_loop(0, trips, step, start).astype(jnp.int32) + 1


def _added(above: Mass, number: jax.Array, mass: Mass, vocab_size: int) -> Mass:
    """`above` and so many times `mass`; the number is at most V."""
    masses = multiplied(mass, number, vocab_size)
    return exact_sums.carried(tuple(map(jnp.add, above, masses)), vocab_size)


def _mass(rows: SearchedRows, prefix: Prefix, is_searched: jax.Array) -> Mass:
    """The weights [B] of prefixes that are searched for, each with the equal tokens it counts."""
    by_mass = jnp.bool_(True)

    def above() -> Mass:
        return tuple(x[:, 0] for x in sums_above(rows, prefix.key[:, None], by_mass))

    mass_above = lax.cond(jnp.any(is_searched & ~prefix.is_weighed), above, lambda: prefix.above)
    mass = rows.mass_of_key(prefix.key, by_mass)
    return _added(mass_above, prefix.number, mass, rows.vocab_size)


def _number_there(rows: SearchedRows, prefix: Prefix, is_searched: jax.Array) -> jax.Array:
    """How many tokens [B] with its key a prefix has.

    Where there are fewer numbers than top-k wants, it has the key of the lowest, which may be that
    of no token; and of float16 at a high temperature that one has a weight.
    """

    def counted() -> jax.Array:
        count = (rows.keys == prefix.key[:, None].astype(rows.keys.dtype)).sum(1, dtype=jnp.int32)
        return jnp.minimum(prefix.number, rows.shard.across_sum(count))

    return typed.cond(jnp.any(is_searched & ~prefix.met), counted, lambda: prefix.number)


def _lowest_within(rows: SearchedRows, sampling: Sampling) -> jax.Array:
    """The lowest key [B] that min-p keeps; without it that of -inf. No row is read."""
    gap, maximum = lowest_gap(sampling), rows.scale.largest
    bits = 8 * rows.logits.dtype.itemsize

    def step(_: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = state
        middle = (low & high) + ((low ^ high) >> 1)
        within = rows.values(middle).astype(jnp.float32) - maximum >= gap
        return jnp.where(within, low, middle), jnp.where(within, middle, high)

    lowest = key_of(-jnp.inf, rows.logits.dtype).astype(jnp.int32)
    highest = ordered_keys(maximum.astype(rows.logits.dtype)).astype(jnp.int32)
    start = vary_like((jnp.zeros_like(highest) + lowest, highest), (gap, maximum))
    has_floor = sampling.min_p > 0
    key = lax.cond(
        jnp.any(has_floor), lambda: lax.fori_loop(0, bits, step, start)[1], lambda: start[0]
    )
    return jnp.where(has_floor, key, lowest)


def _cut_at(rows: SearchedRows, prefix: Prefix, is_searched: jax.Array) -> Truncation:
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
    column, count = nth_equal(rows, key, number)
    # All tokens above a key are those above any other one that no token is between.
    mass = _mass(rows, prefix._replace(number=count), is_searched)
    share, total = (exact_sums.to_float(x, vocab_size) for x in (mass, rows.scale.total))
    cut_logit = rows.values(key).astype(jnp.float32)
    return Truncation(cut_logit, column, jnp.minimum(logarithm(share / total), 0.0))
