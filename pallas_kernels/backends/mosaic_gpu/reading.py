"""How kernels read a row: which one and at which temperature (`RowTargets`), its blocks in vectors,
the block at its end, forbidden tokens (`Mask`), and changes of logits (`FlatChanges`).
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
    WARPGROUP,
    Index,
    Layout,
    Schedule,
)
from pallas_kernels.backends.mosaic_gpu.thread import Value, Vector, Word, load_at_once, word
from pallas_kernels.contract.changes import WORD, Changes, unbiased
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
    return None if words_ref is None else Mask(words_ref, target * words_of(schedule))


def words_of(schedule: Schedule) -> int:
    """The number of words of a row."""
    return -(-schedule.vocabulary // WORD)


def mask_bits(mask: Mask[Value, Word], token: Word, vector: int, schedule: Schedule) -> Word:
    """The bits of `vector` consecutive ids of a thread, the first one lowest; others above them."""
    at = token >> 5
    low = word(thread.load(mask.words_ref, mask.start + at))
    by = token & (WORD - 1)
    if schedule.aligned or vector == 1:
        return low >> by
    after = thread.smaller(at + 1, words_of(schedule) - 1)
    high = word(thread.load(mask.words_ref, mask.start + after))
    return (low >> by) | ((high << 1) << (word(WORD - 1) - by))


class FlatChanges(NamedTuple, Generic[Reference]):
    """What is changed of N rows: arrays outside a kernel, references inside.

    A run of a row begins at a multiple of its length, so its bits lie in one word.
    """

    allowed: Reference | None  # [N * words] i32: what it forbids is read as -inf
    unbiased: Reference | None  # [N * words] i32: the allowed tokens that no bias names
    ids: Reference | None  # [N * C] i32: `contract.changes.prepared`
    bias: Reference | None  # [N * C] f32


RowChanges: TypeAlias = FlatChanges[Readable] | None


def flat_changes(changes: Changes | None, width: int) -> RowChanges:
    """The changes of rows of so many logits, as kernels take them."""
    if changes is None:
        return None
    plain = None if changes.bias is None else unbiased(changes, width)
    arrays: FlatChanges[Readable] = FlatChanges(changes.allowed, plain, *changes[1:])
    return jax.tree.map(lambda x: x.reshape(-1), arrays)  # type: ignore[no-any-return]


def holds_pairs(pieces: list[jax.Array], layout: Layout) -> bool:
    """Whether a thread has pairs of 16-bit logits, of a block's pieces, in a word each."""
    vector = layout.to_mgpu().vector_length
    return pieces[0].ndim == 2 and pieces[0].dtype.itemsize == 2 and vector % 2 == 0


def changed(
    pieces: list[jax.Array],
    ids: jax.Array,
    changes: RowChanges,
    row: Index,
    schedule: Schedule,
    layout: Layout,
) -> list[jax.Array]:
    """The changed logits of a row's pieces, in a kernel: float32 where there are biases.

    Args:
      pieces: runs of groups, each piece as many tokens after the one before as it is wide; or
        one flat vector.
      ids: of the first piece.
      changes: None: none.
      row: which of the N.
      schedule: of the rows.
      layout: of pieces and ids.
    """
    if changes is None:
        return pieces
    if changes.bias is not None:
        pieces = [piece.astype(jnp.float32) for piece in pieces]
    references, tree = jax.tree.flatten(changes)
    number, shape = len(references), pieces[0].shape
    run, apart = (RUN, shape[1]) if len(shape) == 2 else (1, WARPGROUP)
    in_pairs = holds_pairs(pieces, layout) and changes.bias is None

    def body(row: Vector, ids: Vector, *given: Vector) -> tuple[Vector, ...]:
        here, mine = jax.tree.unflatten(tree, given[:number]), list(given[number:])
        each = len(thread.words(mine[0]))
        first = thread.words(ids)[0]
        tokens = [first + i * apart for i in range(len(mine) * each // run)]
        of_row = ChangesOfRow(here, word(row), words_of(schedule), tokens, run)
        bits = of_row.bits(of_row.load(here.allowed))
        if in_pairs:
            mine = [*thread.pairs_kept(mine, bits)]
        elif here.allowed is not None:
            mine = [thread.kept(x, bits >> i * each) for i, x in enumerate(mine)]
        if here.bias is None:
            return tuple(mine)
        held = [x for piece in mine for x in thread.words(piece)]
        held = of_row.with_biases(held, bits & ~of_row.bits(of_row.load(here.unbiased)))
        parts = (held[i * each : (i + 1) * each] for i in range(len(mine)))
        return tuple(map(thread.elements_like, mine, parts))

    kinds = tuple(thread.result(shape, piece.dtype, layout) for piece in pieces)
    layouts = "scalar", layout, *[None] * number, *[layout] * len(pieces)
    return list(thread.inline(body, (row, ids, *references, *pieces), layouts, kinds))


NEAR = 4  # places of biases of a group that are loaded before it is known whether they are


class Near(NamedTuple):
    """The last biases of a thread's group."""

    pairs: list[tuple[Word, Word]]  # id and bias, the last place first
    before: Word  # the place before them


class ChangesOfRow(NamedTuple):
    """The changes of the tokens that a thread holds: a run of them from each of `tokens` on."""

    changes: FlatChanges[Value]
    row: Word
    words: int  # of a row
    tokens: list[Word]
    run: int
    near: Near | None = None

    @property
    def count(self) -> int:
        """The number of places of a row."""
        ids, unbiased = self.changes.ids, self.changes.unbiased
        assert ids is not None
        assert unbiased is not None
        return ids.type.shape[0] * self.words // unbiased.type.shape[0]  # type: ignore[no-any-return]

    def places_before(self, last: Word) -> Near:
        """What is at the last places of a group: all are loaded at once, with the logits."""
        first = self.row * self.count
        at = first + thread.smaller(last, self.count - 1)
        pairs = [self._at(thread.larger(at - i, first)) for i in range(NEAR)]
        return Near(pairs, at - NEAR)

    def _at(self, place: Word) -> tuple[Word, Word]:
        """The id and the bias at a place of all rows."""
        ids, bias = self.changes.ids, self.changes.bias
        assert ids is not None
        assert bias is not None
        found = (thread.vector_at_once(ref, place, 1) for ref in (ids, bias))
        identity, value = (thread.element(vector, 0) for vector in found)
        return identity, value

    def near_bias_of(self, token: Word, near: Near) -> Word:
        """The bias of a token that has one in the thread's group; mostly it is loaded already."""
        bias, missing = word(0.0), word(1)
        for other, value in near.pairs:
            same = other == token
            bias, missing = thread.select(same, value, bias), thread.select(same, 0, missing)

        def further(state: list[Word]) -> list[Word]:
            _, place, _ = state
            other, value = self._at(place)
            return [thread.select(other == token, 0, 1), place - 1, value]

        state = [missing, near.before, bias]
        return thread.repeat_while(state, lambda state: state[0] != 0, further)[2]

    def load(self, ref: Value | None) -> list[Word]:
        """The words of all rows that hold the bits of the first tokens of runs; none without."""
        if ref is None:
            return []
        at = (thread.smaller(thread.larger(x, 0) >> 5, self.words - 1) for x in self.tokens)
        return [word(thread.load(ref, self.row * self.words + place)) for place in at]

    def bits(self, loaded: list[Word]) -> Word:
        """A bit of each token, the first one lowest; all are set without any words."""
        if not loaded:
            return word(-1)
        found = word(0)
        for i, (token, x) in enumerate(zip(self.tokens, loaded, strict=True)):
            mine = x >> (token & (WORD - 1))
            found = found | ((mine & ((1 << self.run) - 1)) << i * self.run)
        return found

    def with_biases(self, held: list[Word], biased: Word) -> list[Word]:
        """The logits with the biases of tokens whose bits are set; most threads have none."""

        def add(state: list[Word]) -> list[Word]:
            left, *logits = state
            at, token = thread.lowest_bit(left), self.tokens[0]
            for i, other in enumerate(self.tokens):
                token = thread.select(at >= i * self.run, other, token)
            bias = self.bias_of(token + (at & (self.run - 1)))
            sums = (thread.select(at == i, thread.sum_in_pairs([x, bias]), x)
                    for i, x in enumerate(logits))  # fmt: skip
            return [left & (left - 1), *sums]

        left = biased
        if len(held) < WORD:
            left = left & ((1 << len(held)) - 1)
        return thread.repeat_while([left, *held], lambda state: state[0] != 0, add)[1:]

    def bias_of(self, token: Word) -> Word:
        """The bias of a token that has one: at the last place with an id that is not above it."""
        if self.near is not None:
            return self.near_bias_of(token, self.near)
        ids, bias, count = self.changes.ids, self.changes.bias, self.count
        found = self.row * count
        last = found + (count - 1)
        for step in reversed(range((count - 1).bit_length())):
            ahead = thread.smaller(found + (1 << step), last)
            other = word(thread.load(ids, ahead))
            other = thread.select(other < -1, word(-2) - other, other)
            found = thread.select(other > token, found, ahead)
        return Word(thread.load(bias, found))
