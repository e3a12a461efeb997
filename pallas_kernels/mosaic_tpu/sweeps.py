"""Two sweeps over a unit's rows in VMEM: maxima and counts, then sums and candidates."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mosaic_tpu.plan import SUBLANES
from pallas_kernels.mosaic_tpu.stacks import Stacks, push
from pallas_kernels.mosaic_tpu.unit import SHAPE, Halves, Unit, tree
from pallas_kernels.row_entropy import LEAST

LOG2_E = 1.4426950408889634


class Found(NamedTuple):
    """What the first sweep found of 8 rows, [8, 1] float32 each."""

    maximum: jax.Array
    larger: jax.Array


def first_sweep(unit: Unit, maxima: Any) -> list[Found]:
    """Waits for the unit's chunks one by one.

    Leaves the largest logit of every lane of every section in maxima [sections, unit, 128].
    """
    plan, given = unit.plan, unit.given()
    least = jnp.full(SHAPE, -jnp.inf, jnp.float32)
    zero = jnp.zeros(SHAPE, jnp.float32)
    for section in range(plan.sections):
        for half in range(plan.halves):
            maxima[section, _half(half), :] = least

    def step(loaded: list[Halves], _: Any, carry: Any) -> Any:
        out = []
        for half, (maximum, larger) in enumerate(carry):
            x = [one[half] for one in loaded]
            bits = [lax.bitcast_convert_type(one, jnp.int32) ^ given[half].turned for one in x]
            more = [jnp.where(one > given[half].limit, 1.0, 0.0) for one in bits]
            largest = jnp.maximum(maximum, tree(jnp.maximum, x))
            out.append((largest, larger + tree(jnp.add, more)))
        return tuple(out)

    def chunk(index: Any, tokens: int, larger: Any) -> Any:
        unit.copies.wait(unit.number, index, tokens)
        begin = tuple((least, zero) for _ in given)
        ended = unit.over_columns(index, tokens, given, step, begin)
        section = unit.section(index)
        for half, (maximum, _) in enumerate(ended):
            rows = _half(half)
            maxima[section, rows, :] = jnp.maximum(maxima[section, rows, :], maximum)
        return tuple(a + more for a, (_, more) in zip(larger, ended, strict=True))

    larger = unit.over_chunks(chunk, tuple(zero for _ in given))
    return [
        Found(
            jnp.max(tree(jnp.maximum, groups(unit, maxima, half)), axis=1, keepdims=True),
            jnp.sum(larger[half], axis=1, keepdims=True),
        )
        for half in range(plan.halves)
    ]


def groups(unit: Unit, maxima: Any, half: int) -> list[jax.Array]:
    """The sections' maxima [8, 128] of half the unit."""
    return [maxima[section, _half(half), :] for section in range(unit.plan.sections)]


def second_sweep(
    unit: Unit, found: list[Found], bounds: list[jax.Array], stacks: Stacks
) -> list[list[jax.Array]]:
    """The sums [8, 1] of each half: of exponentials and, if it is wanted, for the entropy.

    bounds [8, 1]: what reaches them is pushed on the stacks, for K > 0.
    """
    plan, given = unit.plan, unit.given()
    count = 1 + plan.entropy
    zero = jnp.zeros(SHAPE, jnp.float32)
    finite = [jnp.where(one.maximum == -jnp.inf, 0.0, one.maximum) for one in found]
    reference = [jnp.broadcast_to(one, SHAPE) for one in finite]
    bound = [jnp.broadcast_to(one, SHAPE) for one in bounds]

    def step(loaded: list[Halves], start: Any, carry: Any) -> Any:
        out = []
        column = jnp.full(SHAPE, start, jnp.int32).astype(jnp.float32) if plan.k else zero
        for half, (sums, stack) in enumerate(carry):
            x = [one[half] for one in loaded]
            exponents = [(one - reference[half]) * given[half].scale for one in x]
            terms = [jnp.exp2(one) for one in exponents]
            more = [tree(jnp.add, terms)]
            if plan.entropy:
                least = jnp.float32(LEAST * LOG2_E)
                raised = [jnp.maximum(one, least) for one in exponents]
                more.append(
                    tree(jnp.add, [a * b for a, b in zip(terms, raised, strict=True)])
                )
            if plan.k:
                for i, one in enumerate(x):
                    stack = push(stack, one, column + float(i), one >= bound[half])
            out.append((tuple(a + b for a, b in zip(sums, more, strict=True)), stack))
        return tuple(out)

    def chunk(index: Any, tokens: int, totals: Any) -> Any:
        section = unit.section(index)
        halves = range(plan.halves)
        begin = tuple(
            ((zero,) * count, stacks.load(section, unit.rows(half)) if plan.k else ())
            for half in halves
        )
        ended = unit.over_columns(index, tokens, given, step, begin)
        for half in halves if plan.k else ():
            stacks.store(section, unit.rows(half), ended[half][1])
        return tuple(
            tuple(a + b for a, b in zip(total, sums, strict=True))
            for total, (sums, _) in zip(totals, ended, strict=True)
        )

    if plan.k:
        for half in range(plan.halves):
            stacks.clear(unit.rows(half))
    totals = unit.over_chunks(chunk, ((zero,) * count,) * plan.halves)
    return [[jnp.sum(one, axis=1, keepdims=True) for one in sums] for sums in totals]


def _half(half: int) -> Any:
    return pl.ds(half * SUBLANES, SUBLANES)
