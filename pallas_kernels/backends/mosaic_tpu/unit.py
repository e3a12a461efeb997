"""A unit of target rows in VMEM: its copies from HBM, its masks' bits, its logits as float32."""

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.backends.mosaic_tpu.schedule import LANES, SUBLANES, WORD_COLUMNS, Schedule
from pallas_kernels.lowering.row_pieces import in_pairs as tree

LOG2_E = 1.4426950408889634
SHAPE = (SUBLANES, LANES)
UPPER = -(1 << 16)  # the upper half of a word
CHAINS = 4  # dependent operations side by side

PERMUTED_AT_ONCE = 8  # vectors: their permutations run side by side
# Each step's distance, and the bits whose place has no 1 there.
STEPS = ((16, 0x0000FFFF), (8, 0x00FF00FF), (4, 0x0F0F0F0F), (2, 0x33333333), (1, 0x55555555))

Halves = tuple[jax.Array, ...]  # [8, 128] each: the even and the odd rows, or all
Index = int | jax.Array  # [] int32
Span = slice | pl.Slice
Interpret = pltpu.InterpretParams | bool
_Carry = TypeVar("_Carry")  # of a loop: a tree of vectors
Joined = TypeVar("Joined")
# (vectors of some columns, the first of these, carry) -> carry
Step = Callable[[list[Halves], Index, _Carry], _Carry]


def aligned(place: Index, size: int) -> jax.Array:
    """The place, which Mosaic may take for a multiple of a size."""
    return pl.multiple_of(place, size)  # type: ignore[arg-type]


class AsyncCopy(Protocol):
    """A copy that Pallas makes."""

    def start(self) -> None: ...
    def wait(self) -> None: ...


class Copies(NamedTuple):
    """The copies of all units from HBM to VMEM, a chunk of columns each; unit u to buffer u % 2.

    What HBM holds is padded to tiles, and a copy of compiled code takes whole tiles. The
    interpreter knows the logits alone, without padding: there a copy ends where they do.
    """

    schedule: Schedule
    logits_ref: jax.Ref  # [N, V] in HBM
    rows_ref: jax.Ref | None  # [R] int32 in SMEM, where rows are gathered
    buffer: jax.Ref  # [2, or 1 of blocks, rows or words of two, V rounded up] in VMEM
    semaphores: jax.Ref | None  # [2, chunks]; None for blocks

    def start(self, unit: Index) -> None:
        """Start the copies of all chunks of a unit."""
        self._chunks(
            lambda index, tokens: self._for_each_copy(unit, index, tokens, lambda c: c.start())
        )

    def wait(self, unit: Index, index: Index, tokens: int) -> None:
        """Wait for a chunk of a unit. Pallas has waited for a block."""
        if self.schedule.as_blocks:
            return
        self._for_each_copy(unit, index, tokens, lambda c: c.wait())

    def _chunks(self, do: Callable[[Index, int], None]) -> None:
        schedule = self.schedule
        last = schedule.num_chunks - 1

        def full(index: jax.Array, _: None) -> None:
            do(index, schedule.chunk * LANES)

        if last:
            lax.fori_loop(0, last, full, None)
        do(jnp.int32(last), schedule.vocabulary - last * schedule.chunk * LANES)

    def _for_each_copy(
        self, unit: Index, index: Index, tokens: int, do: Callable[[AsyncCopy], None]
    ) -> None:
        """do(copy) for every copy of a chunk."""
        schedule = self.schedule
        width = tokens if schedule.interpreted else -(-tokens // LANES) * LANES
        start = aligned(index * (schedule.chunk * LANES), LANES)
        columns = pl.ds(start, width)
        slot = unit & 1
        assert self.semaphores is not None
        semaphore = self.semaphores.at[slot, index]
        buffer = self.buffer
        if schedule.as_words:  # a copy has the dtype of what it copies
            buffer = buffer.bitcast(self.logits_ref.dtype)  # type: ignore[attr-defined]

        def copy_rows(row: Index, count: int, place: int | jax.Array) -> None:
            source = self.logits_ref.at[pl.ds(row, count), columns]
            target = buffer.at[slot, pl.ds(place, count), columns]
            do(pltpu.make_async_copy(source, target, semaphore))

        if schedule.gathered:
            self._gathered(unit, copy_rows)
            return
        full, rest = divmod(schedule.num_logits_rows, schedule.unit)
        first = aligned(unit * schedule.unit, schedule.unit)
        if not rest:
            copy_rows(first, schedule.unit, 0)
        elif not full:
            copy_rows(first, self._rounded(rest), 0)
        else:
            pl.when(unit < full)(lambda: copy_rows(first, schedule.unit, 0))
            pl.when(unit >= full)(lambda: copy_rows(first, self._rounded(rest), 0))

    def _gathered(self, unit: Index, copy_rows: Callable[[Index, int, Index], None]) -> None:
        schedule = self.schedule
        size = 2 if schedule.is_packed else 1  # a word is the least that can be copied

        def target(j: jax.Array, _: None) -> None:
            assert self.rows_ref is not None
            row = self.rows_ref[unit * SUBLANES + j]
            if size == 1:
                copy_rows(row, 1, j)
            elif not schedule.interpreted:
                copy_rows(aligned(row, 2), 2, aligned(2 * j, 2))
            else:
                copy_rows(row, min(2, schedule.num_logits_rows), 2 * j)

        lax.fori_loop(0, SUBLANES, target, None)

    def _rounded(self, rows: int) -> int:
        """Rows of the last unit to copy: with the padding, where there is any."""
        schedule = self.schedule
        if schedule.interpreted:
            return rows
        total = schedule.num_logits_rows
        tile = 8 if total > 4 else 4 if total > 2 else 2 if total > 1 or schedule.is_packed else 1
        return -(-rows // tile) * tile


def turn_bits(
    schedule: Schedule, allowed_ref: jax.Ref, rows: list[Span], turned_ref: jax.Ref
) -> None:
    """Turns the words of a unit's rows: of each half, 8 rows of allowed_ref [batch rows, words].

    A row's words come as in `changes.Changes`: bit b of word w is that of token 32 w + b. So a
    vector of 128 words has the bits of 32 columns of 128 tokens, and those of a column are in four
    of its lanes. Turned, bit j of lane l is that of token l of column j: a shift brings it to the
    lane's sign. Writes them to turned_ref [unit, words].
    """
    count = schedule.words // LANES
    for half, of_half in enumerate(rows):

        def some(first: Index, number: int, half: int = half, of_half: Span = of_half) -> None:
            start = aligned(first * LANES, LANES)
            words = allowed_ref[of_half, pl.ds(start, number * LANES)]
            vectors = [turned_words(words[:, i * LANES : (i + 1) * LANES]) for i in range(number)]
            target = pl.ds(half * SUBLANES, SUBLANES)
            turned_ref[target, pl.ds(start, number * LANES)] = jnp.concatenate(vectors, axis=1)

        def full(i: jax.Array, _: None) -> None:
            some(i * PERMUTED_AT_ONCE, PERMUTED_AT_ONCE)

        turns, rest = divmod(count, PERMUTED_AT_ONCE)
        if turns:
            lax.fori_loop(0, turns, full, None)
        if rest:
            some(turns * PERMUTED_AT_ONCE, rest)


def turned_words(words: jax.Array) -> jax.Array:
    """Words [8, 128] int32 of 32 columns: four 32 x 32 matrices of bits, each transposed."""
    lanes = lax.broadcasted_iota(jnp.int32, SHAPE, 1)
    # Lane 32 q + j: word q of column j.
    x = _permuted(words, 4 * (lanes & (WORD_COLUMNS - 1)) + lax.div(lanes, WORD_COLUMNS))
    for distance, mask in STEPS:
        other = _permuted(x, lanes ^ distance)
        is_low = (lanes & distance) == 0
        stay_bits = jnp.where(is_low, jnp.int32(mask), jnp.int32(~mask))
        shifts = jnp.full(SHAPE, distance, jnp.int32)
        up, down = other << distance, lax.shift_right_logical(other, shifts)
        x = (x & stay_bits) | (jnp.where(is_low, up, down) & ~stay_bits)
    return x


def is_allowed(words: jax.Array, column: Index) -> jax.Array:
    """Whether the tokens of a column of a vector of turned words are allowed: [8, 128] bool."""
    return (words << (WORD_COLUMNS - 1 - column)) < 0


def _permuted(x: jax.Array, lanes: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, lanes, axis=1, mode="promise_in_bounds")


class RowConstants(NamedTuple):
    """Numbers of 8 rows for the kernel, [8, 128] each: columns of an int32 array."""

    limit: jax.Array  # float32: what larger logits are larger than
    scale: jax.Array  # float32: the factor of logit differences in exponents of 2
    shift: jax.Array  # int32: by how many bits the wanted half of a word is moved up


class Unit(NamedTuple):
    """A unit of target rows while it is worked on."""

    schedule: Schedule
    copies: Copies
    number: Index
    index: Index  # type: ignore[assignment]  # in its batch
    buffer: jax.Ref  # as `Copies.buffer`
    constants_ref: jax.Ref  # [batch rows, 3] int32
    turned_ref: jax.Ref | None  # [unit, words] int32, of `turn_bits`; or None

    def rows(self, half: int) -> Span:
        """The place of these 8 rows in the batch."""
        start = self.index * self.schedule.unit + half * SUBLANES
        return pl.ds(aligned(start, SUBLANES), SUBLANES)

    def constants(self) -> list[RowConstants]:
        """Of each half."""
        return [self._constants(half) for half in range(self.schedule.halves)]

    def _constants(self, half: int) -> RowConstants:
        columns = self.constants_ref[self.rows(half), :]
        limit, scale, shift = (
            jnp.broadcast_to(columns[:, i : i + 1], SHAPE) for i in range(len(RowConstants._fields))
        )
        return RowConstants(_floats(limit), _floats(scale), shift)

    def load(self, start: Index, number: int, constants: list[RowConstants]) -> list[Halves]:
        """The logits of `number` columns from `start` on."""
        token = aligned(start * LANES, LANES)
        slot = 0 if self.schedule.as_blocks else self.number & 1
        block = self.buffer[slot, :, pl.ds(token, number * LANES)]
        wide = [self._wide(block[:, i * LANES : (i + 1) * LANES], constants) for i in range(number)]
        return wide if self.turned_ref is None else self._allowed(wide, start)

    def _allowed(self, x: list[Halves], start: Index) -> list[Halves]:
        """-inf where a token's bit is not set. A step is a part of `WORD_COLUMNS`, or several."""
        assert self.turned_ref is not None
        allowed: list[list[jax.Array]] = [[] for _ in x]
        for half in range(self.schedule.halves):
            for i, halves in enumerate(x):
                if i % WORD_COLUMNS == 0:
                    first = lax.div(jnp.int32(start + i), WORD_COLUMNS)
                    word_lanes = pl.ds(aligned(first * LANES, LANES), LANES)
                    words = self.turned_ref[pl.ds(half * SUBLANES, SUBLANES), word_lanes]
                column: Index = i % WORD_COLUMNS  # where steps begin with a vector of words
                if self.schedule.step % WORD_COLUMNS:
                    column = lax.rem(jnp.int32(start + i), WORD_COLUMNS)
                allowed[i].append(jnp.where(is_allowed(words, column), halves[half], -jnp.inf))
        return [tuple(halves) for halves in allowed]

    def _wide(self, x: jax.Array, constants: list[RowConstants]) -> Halves:
        if not self.schedule.is_packed:
            return (x,)
        # [8, 128]: an even row below, an odd one above.
        words = x if self.schedule.as_words else pltpu.bitcast(x, jnp.int32)
        if self.schedule.gathered:
            return (_floats((words << constants[0].shift) & UPPER),)
        return _floats(words << 16), _floats(words & UPPER)

    def over_chunks(self, do: Callable[[Index, int, _Carry], _Carry], carry: _Carry) -> _Carry:
        """carry = do(chunk, its tokens, carry) for all chunks, the last of which may be short."""
        schedule = self.schedule
        last, size = schedule.num_chunks - 1, schedule.chunk * LANES
        if last:
            carry = lax.fori_loop(0, last, lambda i, carry: do(i, size, carry), carry)
        return do(jnp.int32(last), schedule.vocabulary - last * size, carry)

    def over_columns(
        self,
        chunk: Index,
        tokens: int,
        constants: list[RowConstants],
        step: Step[_Carry],
        carry: _Carry,
        size: int | None = None,
    ) -> _Carry:
        """carry = step(...) for the columns of a chunk, `size` at a time: else `schedule.step`."""
        first = chunk * self.schedule.chunk
        size = size or self.schedule.step
        steps, rest = divmod(tokens, size * LANES)

        def full(i: jax.Array, carry: _Carry) -> _Carry:
            start = first + i * size
            return step(self.load(start, size, constants), start, carry)

        if steps:
            carry = lax.fori_loop(0, steps, full, carry)
        if rest:
            start = first + steps * size
            loaded = self.load(start, -(-rest // LANES), constants)
            if rest % LANES:  # what follows the last token is not of the row
                loaded[-1] = tuple(masked(x, rest % LANES) for x in loaded[-1])
            carry = step(loaded, start, carry)
        return carry

    def is_active(self, half: int, count: jax.Array) -> jax.Array:
        """[8, 128]: whether a row of half the unit is among the first `count` targets."""
        place = lax.broadcasted_iota(jnp.int32, SHAPE, 0) * self.schedule.halves + half
        return self.number * self.schedule.unit + place < count

    def section(self, chunk: Index) -> jax.Array:
        """The section that a chunk belongs to."""
        return lax.div(chunk * self.schedule.sections, self.schedule.num_chunks)


def masked(x: jax.Array, tokens: int) -> jax.Array:
    """-inf in all lanes but the first ones."""
    return jnp.where(lax.broadcasted_iota(jnp.int32, SHAPE, 1) < tokens, x, -jnp.inf)


def _floats(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def chains(
    join: Callable[[Joined, Joined], Joined], parts: list[Joined], number: int = CHAINS
) -> Joined:
    """The parts joined in a few chains, and these in a tree: fewer are alive than in a tree."""
    heads = parts[:number]
    for i, part in enumerate(parts[number:]):
        heads[i % number] = join(heads[i % number], part)
    return tree(join, heads)
