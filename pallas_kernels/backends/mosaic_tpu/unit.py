"""A unit of target rows in VMEM: its logits as float32, column by column."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.backends.mosaic_tpu.bits import is_allowed
from pallas_kernels.backends.mosaic_tpu.copies import Copies
from pallas_kernels.backends.mosaic_tpu.plan import LANES, SUBLANES, WORD_COLUMNS, Plan

SHAPE = (SUBLANES, LANES)
UPPER = -(1 << 16)  # the upper half of a word
CHAINS = 4  # dependent operations side by side

Halves = tuple[jax.Array, ...]  # [8, 128] each: the even and the odd rows, or all
# (vectors of some columns, the first of these, carry) -> carry
Step = Callable[[list[Halves], Any, Any], Any]


class Given(NamedTuple):
    """What is given of 8 rows, [8, 128] each: columns of an int32 array."""

    limit: jax.Array  # float32: what larger logits are larger than
    scale: jax.Array  # float32: the factor of logit differences in exponents of 2
    shift: jax.Array  # int32: by how many bits the wanted half of a word is moved up


class Unit(NamedTuple):
    """A unit of target rows while it is worked on."""

    plan: Plan
    copies: Copies
    number: Any
    index: Any  # in its batch
    buffer: Any  # as `Copies.buffer`
    given_ref: Any  # [batch rows, 3] int32
    turned_ref: Any  # [unit, words] int32, of `bits.turn`; or None

    def rows(self, half: int) -> Any:
        """The place of these 8 rows in the batch."""
        start = self.index * self.plan.unit + half * SUBLANES
        return pl.ds(pl.multiple_of(start, SUBLANES), SUBLANES)

    def given(self) -> list[Given]:
        """Of each half."""
        return [self._given(half) for half in range(self.plan.halves)]

    def _given(self, half: int) -> Given:
        every = self.given_ref[self.rows(half), :]
        limit, scale, shift = (
            jnp.broadcast_to(every[:, i : i + 1], SHAPE) for i in range(len(Given._fields))
        )
        return Given(_floats(limit), _floats(scale), shift)

    def load(self, start: Any, number: int, given: list[Given]) -> list[Halves]:
        """The logits of `number` columns from `start` on."""
        token = pl.multiple_of(start * LANES, LANES)
        slot = 0 if self.plan.as_blocks else self.number & 1
        block = self.buffer[slot, :, pl.ds(token, number * LANES)]
        wide = [self._wide(block[:, i * LANES : (i + 1) * LANES], given) for i in range(number)]
        return wide if self.turned_ref is None else self._allowed(wide, start)

    def _allowed(self, x: list[Halves], start: Any) -> list[Halves]:
        """-inf where a token's bit is not set. A step is a part of `WORD_COLUMNS`, or several."""
        every: list[list[jax.Array]] = [[] for _ in x]
        for half in range(self.plan.halves):
            for i, one in enumerate(x):
                if i % WORD_COLUMNS == 0:
                    first = lax.div(jnp.int32(start + i), WORD_COLUMNS)
                    here = pl.ds(pl.multiple_of(first * LANES, LANES), LANES)
                    words = self.turned_ref[pl.ds(half * SUBLANES, SUBLANES), here]
                column: Any = i % WORD_COLUMNS  # where steps begin with a vector of words
                if self.plan.step % WORD_COLUMNS:
                    column = lax.rem(jnp.int32(start + i), WORD_COLUMNS)
                every[i].append(jnp.where(is_allowed(words, column), one[half], -jnp.inf))
        return [tuple(one) for one in every]

    def _wide(self, x: jax.Array, given: list[Given]) -> Halves:
        if not self.plan.is_packed:
            return (x,)
        words = pltpu.bitcast(x, jnp.int32)  # [8, 128]: an even row below, an odd one above
        if self.plan.gathered:
            return (_floats((words << given[0].shift) & UPPER),)
        return _floats(words << 16), _floats(words & UPPER)

    def over_chunks(self, do: Callable[[Any, int, Any], Any], carry: Any) -> Any:
        """carry = do(chunk, its tokens, carry) for all chunks, the last of which may be short."""
        plan = self.plan
        last, size = plan.num_chunks - 1, plan.chunk * LANES
        if last:
            carry = lax.fori_loop(0, last, lambda i, carry: do(i, size, carry), carry)
        return do(jnp.int32(last), plan.vocabulary - last * size, carry)

    def over_columns(
        self,
        chunk: Any,
        tokens: int,
        given: list[Given],
        step: Step,
        carry: Any,
        size: int | None = None,
    ) -> Any:
        """carry = step(...) for the columns of a chunk, `size` at a time: else `plan.step`."""
        first = chunk * self.plan.chunk
        size = size or self.plan.step
        steps, rest = divmod(tokens, size * LANES)

        def full(i: jax.Array, carry: Any) -> Any:
            start = first + i * size
            return step(self.load(start, size, given), start, carry)

        if steps:
            carry = lax.fori_loop(0, steps, full, carry)
        if rest:
            start = first + steps * size
            found = self.load(start, -(-rest // LANES), given)
            if rest % LANES:  # what follows the last token is not of the row
                found[-1] = tuple(masked(x, rest % LANES) for x in found[-1])
            carry = step(found, start, carry)
        return carry

    def section(self, chunk: Any) -> Any:
        """The section that a chunk belongs to."""
        return lax.div(chunk * self.plan.sections, self.plan.num_chunks)


def masked(x: jax.Array, tokens: int) -> jax.Array:
    """-inf in all lanes but the first ones."""
    return jnp.where(lax.broadcasted_iota(jnp.int32, SHAPE, 1) < tokens, x, -jnp.inf)


def _floats(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def chains(join: Callable[[Any, Any], Any], parts: list[Any], number: int = CHAINS) -> Any:
    """The parts joined in a few chains, and these in a tree: fewer are alive than in a tree."""
    heads = parts[:number]
    for i, part in enumerate(parts[number:]):
        heads[i % number] = join(heads[i % number], part)
    return tree(join, heads)


def tree(join: Callable[[Any, Any], Any], parts: list[Any]) -> Any:
    """The parts joined two at a time."""
    while len(parts) > 1:
        odd = parts[len(parts) // 2 * 2 :]
        parts = [join(a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)] + odd
    return parts[0]
