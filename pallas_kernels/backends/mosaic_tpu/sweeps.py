"""Sweeps over a unit's rows in VMEM: statistics, candidates, and what rare rows need besides."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.backends.mosaic_tpu.plan import LANES, SUBLANES
from pallas_kernels.backends.mosaic_tpu.stacks import Stacks, push_each, push_groups
from pallas_kernels.backends.mosaic_tpu.unit import SHAPE, Halves, Unit, chains, tree
from pallas_kernels.backends.xla.row_entropy import LEAST

LOG2_E = 1.4426950408889634
LEAST_INT = -(1 << 31)
# Columns whose operations stand together in the first sweep: the compiler keeps to that order, and
# then few registers are alive. All at once, it loads dozens of them first and stores most again.
PART = 4
# By so many powers of 2 a row's largest term may exceed 1: sums stay far below float32's largest.
MOST = 64.0


class Found(NamedTuple):
    """What the first sweep found of 8 rows, [8, 1] float32 each."""

    maximum: jax.Array
    larger: jax.Array  # how many are larger than the given token's logit
    sum_exp: jax.Array  # where `excess` is at most `MOST`
    excess: jax.Array  # of the maximum over the first guess of it, in powers of 2


def first_sweep(unit: Unit, maxima: Any) -> list[Found]:
    """Statistics of the unit's rows; waits for its chunks one by one.

    The maximum is subtracted before the exponentials, but is not known yet: the largest of the
    first columns is taken for it. Where that is far from it, `sums_again` adds once more.

    Leaves the largest logit of every lane of every section in maxima [sections, unit, 128].
    """
    plan, given = unit.plan, unit.given()
    least = jnp.full(SHAPE, -jnp.inf, jnp.float32)
    zero = jnp.zeros(SHAPE, jnp.float32)
    for section in range(plan.sections):
        for half in range(plan.halves):
            maxima[section, _half(half), :] = least
    first = min(plan.vocabulary, plan.chunk * LANES)
    unit.copies.wait(unit.number, jnp.int32(0), first)

    def largest(loaded: list[Halves], _: Any, carry: Any) -> Any:
        every = [[one[half] for one in loaded] for half in range(plan.halves)]
        found = (chains(jnp.maximum, x) for x in every)
        return tuple(jnp.maximum(a, b) for a, b in zip(carry, found, strict=True))

    begin = (least,) * plan.halves
    guesses = unit.over_columns(jnp.int32(0), min(first, plan.step * LANES), given, largest, begin)
    guesses = [jnp.max(one, axis=1, keepdims=True) for one in guesses]
    reference = [jnp.broadcast_to(one, SHAPE) for one in guesses]

    def step(loaded: list[Halves], _: Any, carry: Any) -> Any:
        out = [list(one) for one in carry]
        for begin in range(0, len(loaded), PART):
            for half, (maximum, larger, total) in enumerate(out):
                x = [one[half] for one in loaded[begin : begin + PART]]
                terms = [jnp.exp2((one - reference[half]) * given[half].scale) for one in x]
                for one in x:
                    maximum = jnp.maximum(maximum, one)
                for one in x:
                    larger = larger + jnp.where(one > given[half].limit, 1.0, 0.0)
                out[half] = [maximum, larger, total + tree(jnp.add, terms)]
        return tuple(tuple(one) for one in out)

    def chunk(index: Any, tokens: int, totals: Any) -> Any:
        pl.when(index > 0)(lambda: unit.copies.wait(unit.number, index, tokens))
        begin = ((least, zero, zero),) * plan.halves
        ended = unit.over_columns(index, tokens, given, step, begin, plan.first_step)
        section = unit.section(index)
        for half, (maximum, *_) in enumerate(ended):
            rows = _half(half)
            maxima[section, rows, :] = jnp.maximum(maxima[section, rows, :], maximum)
        return tuple(
            (larger + a, total + b)
            for (larger, total), (_, a, b) in zip(totals, ended, strict=True)
        )

    totals = unit.over_chunks(chunk, ((zero, zero),) * plan.halves)
    found = []
    for half, (larger, total) in enumerate(totals):
        lanes = tree(jnp.maximum, groups(unit, maxima, half))
        maximum = jnp.max(lanes, axis=1, keepdims=True)
        excess = (maximum - guesses[half]) * given[half].scale[:, :1]
        sum_exp = jnp.sum(total, axis=1, keepdims=True) * jnp.exp2(-excess)
        found.append(Found(maximum, jnp.sum(larger, axis=1, keepdims=True), sum_exp, excess))
    return found


def groups(unit: Unit, maxima: Any, half: int) -> list[jax.Array]:
    """The sections' maxima [8, 128] of half the unit."""
    return [maxima[section, _half(half), :] for section in range(unit.plan.sections)]


def candidates(unit: Unit, bounds: list[jax.Array], stacks: Stacks) -> None:
    """Pushes what reaches the bounds [8, 1] of each half on the stacks."""
    plan, given = unit.plan, unit.given()
    halves = range(plan.halves)
    bound = [jnp.broadcast_to(one, SHAPE) for one in bounds]
    least = jnp.full(SHAPE, -jnp.inf, jnp.float32)
    for half in halves:
        stacks.clear(unit.rows(half))

    def step(loaded: list[Halves], start: Any, carry: Any) -> Any:
        return tuple(
            push_groups(selection, [one[half] for one in loaded], start, bound[half])
            for half, selection in enumerate(carry)
        )

    def step_again(loaded: list[Halves], start: Any, carry: Any) -> Any:
        return tuple(
            push_each(stack, [one[half] for one in loaded], start, bound[half])
            for half, stack in enumerate(carry)
        )

    def chunk(index: Any, tokens: int, _: None) -> None:
        section = unit.section(index)
        first = tuple(stacks.load(section, unit.rows(half)) for half in halves)
        begin = tuple((stack, least) for stack in first)
        ended = unit.over_columns(index, tokens, given, step, begin)
        for half in halves:
            stacks.store(section, unit.rows(half), ended[half][0])
        if not plan.rare:
            return
        lost = [jnp.where(ended[half][1] >= bound[half], 1.0, 0.0) for half in halves]

        @pl.when(jnp.max(tree(jnp.maximum, lost)) > 0.0)
        def _again() -> None:
            pushed = unit.over_columns(index, tokens, given, step_again, first)
            for half in halves:
                stacks.store(section, unit.rows(half), pushed[half])

    unit.over_chunks(chunk, None)


def sums_again(unit: Unit, half: int, maximum: jax.Array) -> list[jax.Array]:
    """The sums [8, 1] of half a unit, whose maximum [8, 1] is known.

    They are those of exponentials and, if it is wanted, for the entropy: in exponents of 2.
    """
    given = unit.given()
    scale = given[half].scale
    finite = jnp.where(maximum == -jnp.inf, 0.0, maximum)
    reference = jnp.broadcast_to(finite, SHAPE)
    entropy = unit.plan.entropy
    zero = jnp.zeros(SHAPE, jnp.float32)

    def step(loaded: list[Halves], _: Any, sums: Any) -> Any:
        exponents = [(one[half] - reference) * scale for one in loaded]
        terms = [jnp.exp2(one) for one in exponents]
        more = [chains(jnp.add, terms)]
        if entropy:
            raised = [jnp.maximum(one, jnp.float32(LEAST * LOG2_E)) for one in exponents]
            products = [a * b for a, b in zip(terms, raised, strict=True)]
            more.append(chains(jnp.add, products))
        return tuple(a + b for a, b in zip(sums, more, strict=True))

    def chunk(index: Any, tokens: int, totals: Any) -> Any:
        begin = (zero,) * len(totals)
        sums = unit.over_columns(index, tokens, given, step, begin)
        return tuple(a + b for a, b in zip(totals, sums, strict=True))

    totals = unit.over_chunks(chunk, (zero,) * (1 + entropy))
    return [jnp.sum(one, axis=1, keepdims=True) for one in totals]


def count_again(unit: Unit, half: int) -> jax.Array:
    """The number [8, 1] of larger logits of half a unit, compared as integers.

    Floats compare subnormal numbers as if they were zeros.
    """
    given = unit.given()
    bits = lax.bitcast_convert_type(given[half].limit, jnp.int32)
    bits = jnp.where(bits == LEAST_INT, 0, bits)  # -0.0 equals 0.0
    # The order of the bits of negative numbers is the reverse.
    turned = jnp.where(bits < 0, -1 - LEAST_INT, 0)
    limit = bits ^ turned

    def step(loaded: list[Halves], _: Any, larger: jax.Array) -> jax.Array:
        x = [lax.bitcast_convert_type(one[half], jnp.int32) ^ turned for one in loaded]
        more: jax.Array = chains(jnp.add, [jnp.where(one > limit, 1.0, 0.0) for one in x])
        return larger + more

    def chunk(index: Any, tokens: int, larger: jax.Array) -> jax.Array:
        found: jax.Array = unit.over_columns(index, tokens, given, step, larger)
        return found

    larger = unit.over_chunks(chunk, jnp.zeros(SHAPE, jnp.float32))
    counted: jax.Array = jnp.sum(larger, axis=1, keepdims=True)
    return counted


def _half(half: int) -> Any:
    return pl.ds(half * SUBLANES, SUBLANES)
