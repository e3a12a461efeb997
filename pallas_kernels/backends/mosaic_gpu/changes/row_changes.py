"""How kernels change logits as they read them: masks and biases of rows (`FlatChanges`)."""

from typing import Generic, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu.fragmented_array import TiledLayout

from pallas_kernels.backends.mosaic_gpu import thread
from pallas_kernels.backends.mosaic_gpu.compat import Readable
from pallas_kernels.backends.mosaic_gpu.reading import Reference, mask_words
from pallas_kernels.backends.mosaic_gpu.schedule import (
    RUN,
    WARPGROUP,
    Index,
    Layout,
    Schedule,
)
from pallas_kernels.backends.mosaic_gpu.thread import Value, Vector, Word, word
from pallas_kernels.contract.changes import WORD, Changes, unbiased


class FlatChanges(NamedTuple, Generic[Reference]):
    """The changes of N rows: arrays outside a kernel, references inside.

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
    tiled = layout.to_mgpu()
    if pieces[0].ndim != 2 or not isinstance(tiled, TiledLayout):
        return False
    return pieces[0].dtype.itemsize == 2 and tiled.vector_length % 2 == 0


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
        of_row = ChangesOfRow(here, word(row), mask_words(schedule), tokens, run)
        bits = of_row.loaded_bits(here.allowed)
        if in_pairs:
            mine = [*thread.pairs_kept(mine, bits)]
        elif here.allowed is not None:
            mine = [thread.kept(x, bits >> i * each) for i, x in enumerate(mine)]
        if here.bias is None:
            return tuple(mine)
        held = [x for piece in mine for x in thread.words(piece)]
        held = of_row.with_biases(held, bits & ~of_row.loaded_bits(here.unbiased))
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
    def places(self) -> int:
        """The number of places of a row, each with an id."""
        ids, unbiased = self.changes.ids, self.changes.unbiased
        assert ids is not None
        assert unbiased is not None
        return ids.type.shape[0] * self.words // unbiased.type.shape[0]  # type: ignore[no-any-return]

    def places_before(self, last: Word) -> Near:
        """The values at the last places of a group: all are loaded at once, with the logits."""
        first = self.row * self.places
        at = first + thread.smaller(last, self.places - 1)
        pairs = [self._at(thread.larger(at - i, first)) for i in range(NEAR)]
        return Near(pairs, at - NEAR)

    def _at(self, place: Word) -> tuple[Word, Word]:
        """The id and the bias at a place of all rows."""
        ids, bias = self.changes.ids, self.changes.bias
        assert ids is not None
        assert bias is not None
        vectors = (thread.vector_at_once(ref, place, 1) for ref in (ids, bias))
        identity, value = (thread.element(vector, 0) for vector in vectors)
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

    def loaded_bits(self, ref: Value | None) -> Word:
        """`bits` of words that are loaded one by one, for which ptxas waits once."""
        if ref is None:
            return word(-1)
        bits = word(0)
        for i, token in enumerate(self.tokens):
            at = thread.smaller(thread.larger(token, 0) >> 5, self.words - 1)
            here = word(thread.load(ref, self.row * self.words + at)) >> (token & (WORD - 1))
            bits = bits | ((here & ((1 << self.run) - 1)) << i * self.run)
        return bits

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
        ids, bias, count = self.changes.ids, self.changes.bias, self.places
        assert ids is not None
        assert bias is not None
        found = self.row * count
        last = found + (count - 1)
        for step in reversed(range((count - 1).bit_length())):
            ahead = thread.smaller(found + (1 << step), last)
            other = word(thread.load(ids, ahead))
            other = thread.select(other < -1, word(-2) - other, other)
            found = thread.select(other > token, found, ahead)
        return Word(thread.load(bias, found))
