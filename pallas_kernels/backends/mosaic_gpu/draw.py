"""Drawing a token of each slot's row, after it was read: one kernel, a program a slot.

Gumbel-max in two steps. A group is drawn by the logarithm of its sum, from what the read left; then
a token in it, from its 256 logits. The noise is a function of a purpose, the request's seed, the
token's position and the id of the group or token: the words and the arithmetic that XLA has too.

Where tokens are left out of a row, by a cut or since a rejected draft could have been they, the
groups that held them are read and summed once more (`chosen_groups`), no others.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.backends.groups import LARGEST, WIDTH, Drawn, RowsToDraw
from pallas_kernels.backends.mosaic_gpu import compat, thread
from pallas_kernels.backends.mosaic_gpu.changes.row_changes import RowChanges, flat_changes
from pallas_kernels.backends.mosaic_gpu.chosen_groups import (
    NO_GROUP,
    Chosen,
    Row,
    load_groups,
    over_groups,
    scratch_types,
)
from pallas_kernels.backends.mosaic_gpu.compat import GPU, Readable
from pallas_kernels.backends.mosaic_gpu.groups_kernel import maxima_and_sums
from pallas_kernels.backends.mosaic_gpu.reading import LOG2_E
from pallas_kernels.backends.mosaic_gpu.schedule import (
    GROUPS_PER_BLOCK,
    RUN,
    WARPGROUP,
    Index,
    Schedule,
    choose_read_schedule,
)
from pallas_kernels.backends.mosaic_gpu.thread import Value, Vector, Word, load_at_once, word
from pallas_kernels.contract.changes import Changes, of_rows
from pallas_kernels.numbers.random_draws import gumbel_noise, log_of, threefry_word

_BITS = 32  # tokens of a word


def draw(
    logits: jax.Array, rows: RowsToDraw, purposes: tuple[int, int], changes: Changes | None = None
) -> Drawn:
    """A token of each slot's row.

    Args:
      logits: [N, V], whole on this device.
      rows: the slots; their rows are valid.
      purposes: of the groups' noise, and of the tokens'.
      changes: of the N rows; of those that are drawn from alone, words are made.
    """
    slots, num_rows = len(rows.rows), len(logits)
    schedule = choose_read_schedule(num_rows, logits.shape[1], logits.dtype.name)
    number, count = rows.maxima.shape[1], rows.excluded_ids.shape[1]
    kernel = GPU.kernel(
        functools.partial(
            _draw_kernel, schedule=schedule, number=number, count=count, purposes=purposes
        ),
        out_type=[compat.shape((slots,), jnp.float32), compat.shape((slots,), jnp.int32)],
        scratch_types=(*scratch_types(number), GPU.SMEM((num_words(schedule),), jnp.int32)),
        grid=(slots,),
        grid_names=("slot",),
        compiler_params=compat.compiler_params(approx_math=True),
        kernel_name="draw",
    )
    arrays = rows._replace(seed=lax.bitcast_convert_type(rows.seed, jnp.int32))
    flat: RowsToDraw = jax.tree.map(lambda x: x.reshape(-1), arrays)
    of_slots = flat_changes(of_rows(changes, rows.rows), logits.shape[1])
    return Drawn(*kernel(logits.reshape(-1), flat, of_slots))


class Best(NamedTuple):
    """The largest score so far, and what has it: the lowest number of several."""

    score: jax.Array  # float32
    number: jax.Array  # int32


def num_words(schedule: Schedule) -> int:
    """Words of shared memory: a bit for each token of as many groups as are read at a time."""
    return schedule.block // _BITS


class ExcludedTokens(NamedTuple):
    """The tokens that are left out of a slot's row, in a kernel: those of a draft's q.

    To compare each of them with everything that a thread holds would take long. Instead each thread
    has one of them and writes a mark to shared memory, where every thread finds the marks of its
    own.
    """

    ids_ref: Readable  # [B * M] i32: distinct; -1 where there is none
    start: Index
    number: int  # M, at most one a thread
    chosen: Chosen  # the groups that are read again; its memory is used before it is made
    bits_ref: jax.Ref  # [num_words] i32 in shared memory, which is used

    def groups_of(self, size: int) -> jax.Array:
        """Which of the groups 0 to `size` have one [size]."""
        return self._flags(size, WIDTH.bit_length() - 1, jnp.int32(0))

    def in_group(self, begin: Index) -> jax.Array:
        """Which of the tokens from `begin` on are excluded [256]."""
        return self._flags(WIDTH, 0, begin)

    def without(self, pieces: list[jax.Array], turn: Index, row: Row) -> list[jax.Array]:
        """The pieces of the groups of a turn of `over_groups`, with -inf for excluded tokens."""
        schedule, shape = row.schedule, pieces[0].shape

        def body(
            taken: Value, bits: Value, places: Value, start: Vector, turn: Vector, *given: Vector
        ) -> tuple[Vector, ...]:
            def place_of(token: Word) -> Word:
                group = word(thread.load(places, thread.larger(token, 0) >> 8))
                return (group - word(turn) * GROUPS_PER_BLOCK) * WIDTH + (token & 255)

            def mark(at: Word) -> None:
                thread.add_atomically(bits, at >> 5, word(1) << (at & (_BITS - 1)))

            self._mark(taken, bits, word(start), place_of, schedule.block, WARPGROUP, mark)
            me, lanes = thread.thread(), shape[1] // RUN
            group, column = me >> (lanes.bit_length() - 1), (me & (lanes - 1)) * RUN
            first = group * WIDTH + column
            out = []
            for i, piece in enumerate(given):
                mine = first + i * shape[1]
                found = word(thread.load(bits, mine >> 5)) >> (mine & (_BITS - 1))
                out.append(thread.kept(piece, ~found))
            return tuple(out)

        kinds = tuple(thread.result(shape, piece.dtype, row.layout) for piece in pieces)
        references = self.ids_ref, self.bits_ref, self.chosen.places_ref
        layouts = (None, None, None, "scalar", "scalar", *[row.layout] * len(pieces))
        return list(thread.inline(body, (*references, self.start, turn, *pieces), layouts, kinds))

    def _flags(self, size: int, shift: int, begin: Index) -> jax.Array:
        """Which of `size` places, from `begin` on, some token has when it is shifted right."""
        layout = compat.vector_layout()

        def body(taken: Value, marks: Value, start: Vector, begin: Vector) -> Vector:
            def mark(at: Word) -> None:
                thread.store(marks, at, 1)

            def place_of(token: Word) -> Word:
                return (token >> shift) - word(begin)

            self._mark(taken, marks, word(start), place_of, size, size, mark)
            mine = range(0, size, WARPGROUP)
            found = [word(thread.load(marks, thread.thread() + i)) for i in mine]
            return thread.vector_of(found, layout, (size,))

        arguments = (self.ids_ref, self.chosen.places_ref, self.start, begin)
        layouts = (None, None, "scalar", "scalar")
        kind = thread.result((size,), jnp.int32, layout)
        return compat.asarray(thread.inline(body, arguments, layouts, kind)) != 0

    def _mark(
        self,
        taken: Value,
        marks: Value,
        start: Word,
        place_of: Callable[[Word], Word],
        size: int,
        used: int,
        mark: Callable[[Word], None],
    ) -> None:
        """Set `used` words to 0, then mark each token's place, if it is one of 0 to `size`."""
        me = thread.thread()
        thread.sync_threads()  # what was here before has been read
        for i in range(0, used, WARPGROUP):
            thread.store(marks, me + i, 0)
        thread.sync_threads()
        token = word(thread.load(taken, start + thread.smaller(me, self.number - 1)))
        place = place_of(token)
        here = (token >= 0) & (me < self.number) & (place >= 0) & (place < size)
        thread.when(here, lambda: mark(place))
        thread.sync_threads()


class RowToDraw(NamedTuple):
    """The row of a slot's program, in the kernel."""

    row: Row
    excluded: ExcludedTokens
    largest: jax.Array  # m
    inverse: jax.Array  # 1 / T
    cut_logit: jax.Array  # as `groups.keeps` takes it
    cut_id: Index
    seed: Index
    position: Index
    purposes: tuple[int, int]

    def keeps(self, x: jax.Array, ids: jax.Array) -> jax.Array:
        """As `groups.keeps`: a GPU compares subnormal numbers, and has no bits of a number here."""
        last_id = compat.asarray(self.cut_id)
        last = (x == self.cut_logit) & (ids < last_id)
        return (x > self.cut_logit) | last | (ids == last_id)

    def noise(self, purpose: int, ids: jax.Array) -> jax.Array:
        """Gumbel noise of groups or tokens."""
        seed, position = (
            lax.broadcast_in_dim(x, ids.shape, ()) for x in (self.seed, self.position)
        )
        return gumbel_noise(threefry_word(seed.astype(jnp.uint32), purpose, position, ids))

    def scores(self, maxima: jax.Array, sums: jax.Array, numbers: jax.Array) -> jax.Array:
        """Of groups: the logarithm of the sum of exp((x - m) / T), and noise."""
        gap = jnp.minimum((maxima - self.largest) * self.inverse, jnp.float32(0))
        scores = log_of(sums) + gap + self.noise(self.purposes[0], numbers)
        return jnp.where(sums > 0, scores, jnp.float32(-jnp.inf))


def _draw_kernel(
    logits_ref: jax.Ref,  # [N * V]  in
    given: RowsToDraw,  # flat arrays  in
    changes: RowChanges,  # of the slots' rows  in
    scores_ref: jax.Ref,  # [B] f32  out
    tokens_ref: jax.Ref,  # [B] i32  out
    *scratch: jax.Ref,  # of `Chosen`, and bits of `ExcludedTokens`  shared memory
    schedule: Schedule,
    number: int,
    count: int,
    purposes: tuple[int, int],
) -> None:
    slot = lax.axis_index("slot")

    def of_slot(ref: Readable) -> jax.Array:
        return load_at_once(ref, slot)

    row_id, cut_logit, cut_id = map(of_slot, (given.rows, given.cut_logit, given.cut_id))
    seed, position = map(of_slot, (given.seed, given.position))
    row = jnp.maximum(row_id, 0)

    @pl.when(row_id >= 0)
    def _() -> None:
        chosen = Chosen(*scratch[:-1])
        maxima = load_groups(given.maxima, row, number, -jnp.inf)
        sums = load_groups(given.sums, row, number, 0.0)
        mine = RowToDraw(
            Row(schedule, logits_ref, row * schedule.vocabulary, changes, slot),
            ExcludedTokens(given.excluded_ids, slot * count, count, chosen, scratch[-1]),
            load_at_once(given.largest, row),
            load_at_once(given.inverse, row),
            cut_logit,
            cut_id,
            seed,
            position,
            purposes,
        )
        best = _best_group(mine, maxima, sums)
        scores_ref[slot] = best.score
        tokens_ref[slot] = _token_in(mine, jnp.clip(best.number, 0, number - 1))

    @pl.when(row_id < 0)
    def _() -> None:
        scores_ref[slot] = jnp.float32(-jnp.inf)
        tokens_ref[slot] = jnp.int32(-1)


def _best_group(row: RowToDraw, maxima: jax.Array, sums: jax.Array) -> Best:
    """The group that is drawn, of the tokens that are kept and not excluded."""
    numbers = compat.vector_iota(maxima.shape[0])
    reached = maxima >= row.cut_logit
    is_cut = row.cut_logit > -jnp.inf
    again = (reached & is_cut) | row.excluded.groups_of(maxima.shape[0])
    nothing = jnp.float32(0)
    left = jnp.where(again, nothing, jnp.where(reached, sums, nothing))
    first = best_of(row.scores(maxima, left, numbers), numbers)
    work = functools.partial(_better, row)
    return Best(*over_groups(row.row, row.excluded.chosen, again, work, tuple(first)))


def _better(
    row: RowToDraw, turn: Index, groups: jax.Array, best: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The best group with some more, whose tokens are summed again."""
    pieces, ids = row.row.pieces(groups), row.row.ids(groups)
    nothing = jnp.asarray(-jnp.inf, pieces[0].dtype)
    pieces = [
        jnp.where(row.keeps(piece.astype(jnp.float32), here), piece, nothing)
        for piece, here in zip(pieces, ids, strict=True)
    ]
    pieces = row.excluded.without(pieces, turn, row.row)
    scale = jnp.minimum(row.inverse * LOG2_E, jnp.float32(LARGEST))
    maxima, (sums,) = maxima_and_sums(pieces, (scale,), row.row.layout)
    score, number = best_of(row.scores(maxima.astype(jnp.float32), sums, groups), groups)
    wins = (score > best[0]) | ((score == best[0]) & (number < best[1]))
    return jnp.where(wins, score, best[0]), jnp.where(wins, number, best[1])


def best_of(scores: jax.Array, numbers: jax.Array) -> Best:
    """The largest of scores."""
    score = jnp.max(scores)
    return Best(score, ~jnp.max(jnp.where(scores == score, ~numbers, jnp.int32(~NO_GROUP))))


def _token_in(row: RowToDraw, group: jax.Array) -> jax.Array:
    """A token of one group that is kept and not excluded."""
    x, ids, begin = row.row.group(group)
    nothing = jnp.float32(-jnp.inf)
    x = jnp.where((ids >= group * WIDTH) & row.keeps(x, ids), x, nothing)
    x = jnp.where(row.excluded.in_group(begin), nothing, x)
    largest = jnp.max(x)
    largest = jnp.where(largest > -jnp.inf, largest, jnp.float32(0))
    gap = jnp.minimum((x - largest) * row.inverse, jnp.float32(0))
    return compat.asarray(best_of(gap + row.noise(row.purposes[1], ids), ids).number)
