"""How kernels read a row: which one and at which temperature (`RowTargets`), its blocks in vectors,
the block at its end, and forbidden tokens (`Mask`).
"""

from typing import Generic, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from pallas_kernels.backends.groups import LARGEST, bounded
from pallas_kernels.backends.mosaic_gpu import compat, thread
from pallas_kernels.backends.mosaic_gpu.compat import Readable
from pallas_kernels.backends.mosaic_gpu.schedule import (
    GROUP,
    GROUPS_PER_BLOCK,
    RUN,
    Index,
    Schedule,
)
from pallas_kernels.backends.mosaic_gpu.thread import Value, Vector, Word, load_at_once, word
from pallas_kernels.contract.changes import WORD
from pallas_kernels.numbers.quotient import quotient

LOG2_E = 1.4426950408889634


class RowTargets(NamedTuple):
    """R target rows: arrays outside a kernel, references to them inside.

    None takes its default in the kernel: XLA would have to fill an array first, in a kernel of its
    own.
    """

    row_ids: jax.Array | None  # [R] int32, rows of logits; outside [0, N): skipped
    num_rows: jax.Array | None  # [1] int32; target rows from there on are skipped
    temperatures: jax.Array | None  # [R] float32, as `pallas_kernels.topk_logprobs` has them

    def row(self, target: Index) -> tuple[Index, Index | None]:
        """The row of logits, and how many target rows are not skipped, in a kernel."""
        number = None if self.num_rows is None else load_at_once(self.num_rows, 0)
        if self.row_ids is None:
            return target, number
        return load_at_once(self.row_ids, target), number

    def temperature(self, target: Index) -> jax.Array | None:
        """The temperature as it was given, in a kernel; None without temperatures."""
        if self.temperatures is None:
            return None
        return compat.asarray(load_at_once(self.temperatures, target))


def scaled_temperature(temperature: jax.Array | None) -> jax.Array | None:
    """The temperature of scaled logprobs, in a kernel: NaN if they are NaN; of any."""
    if temperature is None:
        return None
    t = jnp.where(temperature == 0, jnp.float32(1), temperature)  # greedy
    return compat.asarray(jnp.where((t > 0) & (t < jnp.inf), t, jnp.float32(jnp.nan)))


def is_active_target(
    target: Index, row: Index, number: Index | None, num_logits_rows: int
) -> jax.Array:
    """Whether a target row is not skipped, in a kernel; of `RowTargets.row`."""
    inside = compat.asarray((row >= 0) & (row < num_logits_rows))
    return inside if number is None else inside & (target < number)


def inverse_in_kernel(temperature: jax.Array | None) -> jax.Array:
    """1 / T in a kernel, as `row_totals.inverse_of` has it; of any temperature."""
    if temperature is None:
        return compat.asarray(jnp.float32(1))
    is_usable = (temperature > 0) & (temperature < jnp.inf)
    usable = jnp.where(is_usable, temperature, jnp.float32(1))
    return bounded(thread.of_numbers(quotient, jnp.float32(1), usable))


def exponents_scale(inverse: jax.Array) -> jax.Array:
    """The factor of logit differences in exponents of 2, in a kernel; finite in any case."""
    return jnp.minimum(inverse * jnp.float32(LOG2_E), jnp.float32(LARGEST))


def make_targets(
    row_ids: jax.Array | None, num_rows: jax.Array | None, temperatures: jax.Array | None
) -> RowTargets:
    """The targets of a call of `pallas_kernels.topk_logprobs`, whose arguments were checked."""
    return RowTargets(row_ids, None if num_rows is None else num_rows.reshape(1), temperatures)


def selected_logit(
    schedule: Schedule, logits_ref: Readable, first: Index, chosen: jax.Array | None
) -> jax.Array | None:
    """The given token's logit in the row that starts at `first`; None without a token."""
    if chosen is None:
        return None
    if chosen.dtype != jnp.int32:
        return chosen
    token = jnp.clip(chosen, 0, schedule.vocabulary - 1)
    return compat.asarray(logits_ref[first + token])


def read_block(
    logits_ref: Readable, start: Index, schedule: Schedule, vector: int
) -> list[jax.Array]:
    """Pieces (`Schedule.piece`) of the block at `start`, a multiple of `vector`: whole vectors."""
    return compat.load_block(
        logits_ref,
        start,
        (GROUPS_PER_BLOCK, GROUP),
        schedule.piece[1],
        schedule.layout(vector),
    )


def read_edge_block(
    logits_ref: Readable, first: Index, block: int, schedule: Schedule, vector: int
) -> list[jax.Array]:
    """`read_block` of groups that may go beyond the row: -inf there, where nothing is read.

    The row starts at `first`, and its length is a multiple of `vector`.
    """
    begin = block * schedule.block
    if begin + schedule.block <= schedule.vocabulary:
        return read_block(logits_ref, first + begin, schedule, vector)
    shape, layout = schedule.piece, schedule.layout(vector)
    number = GROUP // shape[1]

    def body(logits: Value, first: Vector) -> tuple[Vector, ...]:
        lanes = shape[1] // RUN
        me = thread.thread()
        group, column = me >> (lanes.bit_length() - 1), (me & (lanes - 1)) * RUN
        mine = group * GROUP + column + begin
        start, there = word(first), word(1) == 1
        runs = [
            thread.load_run_within(
                logits, start, mine + i * shape[1], there, schedule.vocabulary, vector, RUN
            )
            for i in range(number)
        ]
        return tuple(thread.vector_of(run, layout, shape) for run in runs)

    kind = thread.result(shape, logits_ref.dtype, layout)
    arguments, layouts = (logits_ref, first), (None, "scalar")
    return list(thread.inline(body, arguments, layouts, (kind,) * number))


Reference = TypeVar("Reference", Readable, Value)  # in a kernel; in a function of threads
RowPlace = TypeVar("RowPlace", Index, Word)


class Mask(NamedTuple, Generic[Reference, RowPlace]):
    """Forbidden tokens, whose logits are read as -inf: a row's words of a bit a token, in a kernel.

    A thread holds vectors of consecutive logits. Where rows start at vectors, their bits lie in one
    word, else in two. The words of a row start at a multiple of the words of a row, not of a
    vector: they are loaded one by one, and the threads of a warp find them in the same few sectors.
    """

    words_ref: Reference  # [R * words] i32
    start: RowPlace  # where the row's words start


RowMask: TypeAlias = Mask[Readable, Index]


def mask_of_row(words_ref: Readable | None, target: Index, schedule: Schedule) -> RowMask | None:
    """The forbidden tokens of a target row; None without a mask."""
    return None if words_ref is None else Mask(words_ref, target * mask_words(schedule))


def mask_words(schedule: Schedule) -> int:
    """The number of words of a row."""
    return -(-schedule.vocabulary // WORD)


def mask_bits(mask: Mask[Value, Word], token: Word, vector: int, schedule: Schedule) -> Word:
    """The bits of `vector` consecutive ids of a thread, the first one lowest; others above them."""
    at = token >> 5
    low = word(thread.load(mask.words_ref, mask.start + at))
    by = token & (WORD - 1)
    if schedule.aligned or vector == 1:
        return low >> by
    after = thread.smaller(at + 1, mask_words(schedule) - 1)
    high = word(thread.load(mask.words_ref, mask.start + after))
    return (low >> by) | ((high << 1) << (word(WORD - 1) - by))
