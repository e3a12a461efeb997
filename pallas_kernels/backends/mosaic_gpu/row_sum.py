"""A row's sum in pass 2, from those of its groups: the bits of `row_totals.joined`.

Each group's weight becomes digits, as `exact_sums` has them; digits are added up as integers, in a
thread, in a warp and over the warps, and carried. No order of threads or programs can change a bit.
A warpgroup takes `AT_A_TIME` groups at a time.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.backends import exact_sums, row_totals
from pallas_kernels.backends.mosaic_gpu import compat, thread
from pallas_kernels.backends.mosaic_gpu.changes.biased_groups import Replaced
from pallas_kernels.backends.mosaic_gpu.chosen_groups import load_groups, padded_size
from pallas_kernels.backends.mosaic_gpu.compat import GPU, Readable
from pallas_kernels.backends.mosaic_gpu.schedule import (
    AT_A_TIME,
    WARPGROUP,
    Index,
    Layout,
    Schedule,
)
from pallas_kernels.backends.mosaic_gpu.thread import Value, Vector, Word, word
from pallas_kernels.numbers.exponential import exponential

VECTOR = compat.vector_layout()
_WARPS = 4
_WHOLE = 2.0**23  # a float32 from it to twice it has no digit behind its point
_LARGE = 1.5 * _WHOLE  # nor have those up to 2**22 around it
MOST_BITS = 15  # of a digit, so that a group's first one is at most `_WHOLE`


class SummedGroups(NamedTuple):
    """Some groups of a row, [n] as they lie in memory."""

    maxima: jax.Array  # [n * parts] of their parts, in the logits' dtype
    sums: jax.Array  # [n] float32
    weighted: jax.Array | None  # [n] float32


class Sources(NamedTuple):
    """Where pass 1 has left the groups of R rows."""

    maxima_ref: Readable  # [R * padded_parts] in the logits' dtype
    sums_ref: Readable  # [R * padded_groups] f32
    weighted_ref: Readable | None  # [R * padded_groups] f32

    def load(self, schedule: Schedule, target: Index, turn: Index) -> SummedGroups:
        """The groups of a turn, loaded where the kernel says."""
        size = min(schedule.padded_groups, AT_A_TIME)
        start = target * schedule.padded_groups + turn * size

        def load(ref: Readable, count: int = 1) -> jax.Array:
            layout = compat.run_layout(size * count, jnp.dtype(ref.dtype).itemsize)
            return compat.asarray(thread.load_run_at_once(ref, start * count, size * count, layout))

        weighted = None if self.weighted_ref is None else load(self.weighted_ref)
        return SummedGroups(
            load(self.maxima_ref, schedule.parts_per_group), load(self.sums_ref), weighted
        )


class RowTotal(NamedTuple):
    """Of a row, float32."""

    total: jax.Array  # the sum of exp(s), s = (x - m) / T
    weighted: jax.Array | None  # the sum of s exp(s)


def num_turns(schedule: Schedule) -> int:
    """How often a warpgroup takes groups of a row."""
    return -(-schedule.padded_groups // AT_A_TIME)


def sum_scratch(schedule: Schedule, weighted: bool) -> list[Any]:
    """The type of the shared memory that `row_total` uses."""
    number = exact_sums.num_digits(schedule.vocabulary) * (2 if weighted else 1)
    return [GPU.SMEM((_WARPS * number,), jnp.int32)]


class Replacements(NamedTuple):
    """Those of a row, and what they replace, [padded D]."""

    numbers: jax.Array
    new: SummedGroups  # maxima float32
    old: SummedGroups

    @property
    def is_group(self) -> jax.Array:
        return self.numbers >= 0

    @property
    def maximum(self) -> jax.Array:
        """The largest logit of the new ones; NaN or +inf where one has such a logit."""
        return jnp.max(jnp.where(self.is_group, self.new.maxima, jnp.float32(-jnp.inf)))

    @property
    def evidence(self) -> jax.Array:
        """Above 0 where one has a logit above -inf, NaN where one has a NaN or +inf."""
        return jnp.sum(jnp.where(self.is_group, self.new.sums, jnp.float32(0)))


def load_replacements(
    schedule: Schedule, target: Index, sources: Sources, replaced: Replaced, num_targets: int
) -> Replacements:
    """The replaced groups of a row."""
    count = replaced.numbers.shape[0] // num_targets
    size = padded_size(count)
    numbers = _load_numbers(replaced.numbers, target, count)

    def load(ref: Readable) -> jax.Array:
        return load_groups(ref, target, count, 0.0)

    def at_numbers(ref: Readable, parts: int = 1) -> jax.Array:
        return _at_numbers(ref, target * schedule.padded_groups * parts, numbers, parts)

    new_weighted = old_weighted = None
    if replaced.weighted is not None:
        assert sources.weighted_ref is not None
        new_weighted, old_weighted = load(replaced.weighted), at_numbers(sources.weighted_ref)
    old_maxima = at_numbers(sources.maxima_ref, schedule.parts_per_group)
    assert size == numbers.shape[0]
    return Replacements(
        numbers,
        SummedGroups(load(replaced.maxima), load(replaced.sums), new_weighted),
        SummedGroups(old_maxima, at_numbers(sources.sums_ref), old_weighted),
    )


def _load_numbers(ref: Readable, target: Index, count: int) -> jax.Array:
    """A row of [R * D] int32 as a vector; -1 from there on."""
    size, layout = padded_size(count), compat.vector_layout()

    def body(numbers: Value, start: Vector) -> Vector:
        registers = []
        for i in range(0, size, WARPGROUP):
            place = thread.thread() + i
            number = word(thread.load(numbers, word(start) + thread.smaller(place, count - 1)))
            registers.append(thread.select(place < count, number, -1))
        return thread.vector_of(registers, layout, (size,))

    kind = thread.result((size,), jnp.int32, layout)
    return thread.inline(body, (ref, target * count), (None, "scalar"), kind)


def _at_numbers(ref: Readable, start: Index, numbers: jax.Array, parts: int) -> jax.Array:
    """The largest [n] float32 of so many parts of a row of groups, at each of these numbers."""
    layout = compat.vector_layout()

    def body(values: Value, start: Vector, numbers: Vector) -> Vector:
        registers = []
        for number in thread.words(numbers):
            at = word(start) + thread.larger(number, 0) * parts
            some = [thread.as_float32(thread.load(values, at + i)) for i in range(parts)]
            registers.append(functools.reduce(thread.larger_float, some))
        return thread.vector_of_floats(registers, layout, numbers.shape)

    kind = thread.result(numbers.shape, jnp.float32, layout)
    return thread.inline(body, (ref, start, numbers), (None, "scalar", layout), kind)


def row_total(
    schedule: Schedule,
    target: Index,
    sources: Sources,
    first: SummedGroups,
    maximum: jax.Array,
    inverse: jax.Array,
    scratch_ref: jax.Ref,
    replacements: Replacements | None = None,
) -> RowTotal:
    """A row's sums; of a row without an answer anything.

    Args:
      schedule: as pass 1 had it.
      target: which row.
      sources: its groups.
      first: those of the first turn.
      maximum: m, float32.
      inverse: 1 / T, float32.
      scratch_ref: of `sum_scratch`.
      replacements: of the row. What they replace is subtracted, which of integers is exact.
    """
    vocab_size = schedule.vocabulary
    run = compat.run_layout(first.sums.shape[0], 4)

    def of_turn(groups: SummedGroups, turn: Index) -> tuple[jax.Array, ...]:
        size = groups.sums.shape[0]
        of_groups = groups._replace(maxima=_maxima(schedule, groups))
        is_group = compat.iota((size,), 0, run) + turn * size < schedule.num_groups
        digits = _digits(of_groups, is_group, maximum, inverse, vocab_size, run)
        return tuple(_sum_of_thread(digit, run) for digit in digits)

    def more(turn: jax.Array, before: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        added = of_turn(sources.load(schedule, target, turn), turn)
        return tuple(a + b for a, b in zip(before, added, strict=True))

    sums = of_turn(first, jnp.int32(0))
    if num_turns(schedule) > 1:
        sums = lax.fori_loop(1, num_turns(schedule), more, sums)
    if replacements is not None:
        new, old = (
            _digits(groups, replacements.is_group, maximum, inverse, vocab_size, VECTOR)
            for groups in (replacements.new, replacements.old)
        )
        changes = [_sum_of_thread(a - b, VECTOR) for a, b in zip(new, old, strict=True)]
        sums = tuple(a + b for a, b in zip(sums, changes, strict=True))
    number = exact_sums.num_digits(vocab_size)

    def body(scratch: Value, *sums: Vector) -> tuple[Vector, ...]:
        totals = _over_warps(scratch, [thread.words(x)[0] for x in sums])
        rows = [totals[i : i + number] for i in range(0, len(totals), number)]
        return tuple(Vector.splat(_to_float(x, vocab_size).value, ()) for x in rows)

    kind = thread.result((), jnp.float32, GPU.Layout.WG_SPLAT)
    layouts = (None, *[VECTOR] * len(sums))
    kinds = (kind,) * (len(sums) // number)
    total, *weighted = thread.inline(body, (scratch_ref, *sums), layouts, kinds)
    return RowTotal(total, -weighted[0] if weighted else None)


def _digits(
    groups: SummedGroups,
    is_group: jax.Array,
    maximum: jax.Array,
    inverse: jax.Array,
    vocab_size: int,
    layout: Layout,
) -> list[jax.Array]:
    """The digits [n] int32 of groups with maxima [n] float32; then those for the entropy."""
    apart = row_totals.scaled(groups.maxima, maximum, inverse)
    factors = exponential(apart, thread.products(layout))
    weights = [groups.sums * factors]
    if groups.weighted is not None:
        by_exponent = row_totals.moved(groups.weighted, apart, groups.sums) * factors
        weights.append(jnp.maximum(by_exponent, jnp.float32(0)))
    digits = []
    for x in weights:
        digits += _digits_of(jnp.where(is_group, x, jnp.float32(0)), vocab_size)
    return digits


def _maxima(schedule: Schedule, groups: SummedGroups) -> jax.Array:
    """The groups' maxima [n] float32, of those of their parts."""
    size, parts = groups.sums.shape[0], schedule.parts_per_group
    layout = compat.run_layout(size, 4)
    of_parts = compat.run_layout(size * parts, jnp.dtype(groups.maxima.dtype).itemsize)

    def body(maxima: Vector, like: Vector) -> Vector:
        largest = [thread.as_float32(x) for x in thread.values(maxima)]
        while len(largest) > len(thread.words(like)):
            pairs = zip(largest[::2], largest[1::2], strict=True)
            largest = [thread.larger_float(*pair) for pair in pairs]
        return thread.elements_like(like, largest)

    kind = thread.result((size,), jnp.float32, layout)
    arguments = groups.maxima, groups.sums
    return thread.inline(body, arguments, (of_parts, layout), kind)


def _digits_of(weights: jax.Array, vocab_size: int) -> list[jax.Array]:
    """`exact_sums.digits` int32, but that each is the nearest one: some are below 0.

    So what is behind a digit is between -1/2 and 1/2, and no number is converted. Carried, they
    are the same: a digit that is one larger has a whole unit less behind it, an even number of
    last digits, so that ties of the last one are rounded alike.
    """
    bits = exact_sums.digit_bits(vocab_size)
    scale, number = jnp.float32(2**bits), exact_sums.num_digits(vocab_size)
    digits, x = [], weights
    if bits > MOST_BITS:
        x = x * scale
        digits.append(x.astype(jnp.int32))  # downwards: none is below 0
        x = x - digits[0].astype(jnp.float32)
    for place in range(len(digits), number):
        # Added to a number that has no digit behind its point, it is rounded, of two digits to the
        # even one, and is the low bits of the sum. A product with a power of two is exact.
        large = _LARGE if place else _WHOLE
        shifted = x * scale + jnp.float32(large)
        bits_of_large = jnp.int32(np.float32(large).view(np.int32))
        digits.append(lax.bitcast_convert_type(shifted, jnp.int32) - bits_of_large)
        if place < number - 1:
            x = x * scale - (shifted - jnp.float32(large))
    return digits


def _sum_of_thread(digits: jax.Array, layout: Layout) -> jax.Array:
    """Each thread's sum [threads] int32 of what it holds of a vector in this layout."""
    kind = thread.result((WARPGROUP,), jnp.int32, VECTOR)

    def body(digits: Vector) -> Vector:
        total, *others = thread.words(digits)
        for other in others:
            total = total + other
        return thread.one_each(total, VECTOR, (WARPGROUP,), signed=True)

    return thread.inline(body, (digits,), (layout,), kind)


def _over_warps(scratch: Value, sums: list[Word]) -> list[Word]:
    """Sums of integers over all threads, which each of them gets."""
    lane, warp = thread.thread() & 31, thread.thread() >> 5
    of_warp = [thread.sum_of_warp(x) for x in sums]

    def write() -> None:
        for i, x in enumerate(of_warp):
            thread.store(scratch, warp + i * _WARPS, x)

    thread.when(lane == 0, write)
    thread.sync_threads()
    totals = []
    for i in range(len(sums)):
        a, b, c, d = (word(x) for x in thread.load_aligned(scratch, i * _WARPS, _WARPS))
        totals.append((a + b) + (c + d))
    return totals


def _to_float(digits: list[Word], vocab_size: int) -> Word:
    """`exact_sums.to_float` of digits that are added up and not yet carried."""
    bits = exact_sums.digit_bits(vocab_size)
    highest, *rest = digits
    carried: list[Word] = []
    carry = word(0)
    for digit in reversed(rest):
        total = digit + carry
        carried.insert(0, total & ((1 << bits) - 1))
        carry = thread.shifted(total, bits)
    carried.insert(0, highest + carry)
    result = word(0.0)
    for place, digit in reversed(list(enumerate(carried, start=1))):
        part = thread.product(thread.float_of_digit(digit), word(2.0 ** (-bits * place)))
        result = thread.sum_in_pairs([result, part])
    return result
