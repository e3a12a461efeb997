"""What verification takes and returns: proposals with the distributions that they came from.

Axes: B slots, D drafts, S = D + 1 positions, M tokens of a draft's q, Q rows of whole q.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.contract.arguments import array_of, check_int, check_type, to_device
from pallas_kernels.contract.changes import Changes
from pallas_kernels.contract.field_docs import with_field_docs
from pallas_kernels.contract.types import AnyArray
from pallas_kernels.lowering import typed
from pallas_kernels.lowering.forms import Tree
from pallas_kernels.lowering.programs import compiled
from pallas_kernels.sampling.parameters import Sampling, Truncation, of_each_row

_Values = TypeVar("_Values")
AcceptRule = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
Rule = Literal["token", "block"]  # how the drafts of a slot with a q are accepted
MAX_WIDTH = 2**24  # slots, positions or drafts of a shape: more is a mistake
MOST_TOKENS = 64  # M of a draft that is drawn, where the vocabulary has as many


@with_field_docs
class CompactQ(NamedTuple):
    """The distributions that drafts were drawn from: the tokens that each can be.

    The probabilities of a draft's tokens sum to one. It is drawn from them by random numbers that
    verification does not use: `draw` has its own, and so has a JAX key that no seed was made of.

    Attributes:
      ids: distinct; -1 where there is no further token.
      logprobs: -inf where there is none.
    """

    ids: Int32[Array, "B D M"]
    logprobs: Float32[Array, "B D M"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DenseQ:
    """The distributions that drafts were drawn from, over the whole vocabulary.

    `DenseQ(logprobs)` has logprobs, `DenseQ.of_probs` probabilities and `DenseQ.of_logits` a draft
    model's logits; none of them makes an array of that size. They are what each draft was really
    drawn from, by random numbers that verification does not use. Of a row, the drafted token's
    entry is read, and the whole row where its draft is refused. NaN counts as no probability.

    Attributes:
      values: bfloat16, float16 or float32. Padding of the vocabulary is as the logits' is.
      row_ids: the values are flat, and this is the row of each draft; one that is not there is
        refused, and under `jit` clamped. Rows that no draft names hold anything.
      temperature: of logits, each slot's; a draft of one with 0 or less was certain.
      form: static, what the values are.
    """

    values: Float[Array, "B D V"] | Float[Array, "Q V"]
    row_ids: Int32[Array, "B D"] | None = None
    temperature: Float32[Array, " B"] | Float32[Array, ""] | float | None = None
    form: "DenseForm" = field(default="logprobs", metadata={"static": True})

    @classmethod
    def of_probs(cls, probs: AnyArray, row_ids: AnyArray | None = None) -> "DenseQ":
        """q as probabilities, [B, D, V] or flat [Q, V] with the row of each draft [B, D]."""
        return cls(probs, row_ids, form="probs")  # type: ignore[arg-type]

    @classmethod
    def of_logits(
        cls, logits: AnyArray, temperature: ArrayLike, row_ids: AnyArray | None = None
    ) -> "DenseQ":
        """q as softmax(logits / T); `verify` reads each row once more for its sum.

        Args:
          logits: of a draft model, [B, D, V] or flat [Q, V]; what it drew from among fewer tokens
            (top-k, top-p) has other logprobs, to be given as such.
          temperature: of the draws, one number or one a slot [B].
          row_ids: the row of each draft [B, D], of flat logits.
        """
        return cls(logits, row_ids, temperature, "logits")  # type: ignore[arg-type]


DenseForm = Literal["logprobs", "probs", "logits"]


@with_field_docs
class Drafts(NamedTuple):
    """The tokens that a drafter proposed.

    Attributes:
      token_ids: of D positions; from num on, anything.
      num: at most D.
      q: None: each draft is certain.
      report: a tree of arrays [B, D, ...] of one's own; `verify` does not look at it.
    """

    token_ids: Int32[Array, "B D"]
    num: Int32[Array, " B"]
    q: CompactQ | DenseQ | None = None
    report: Any = None

    @classmethod
    def of_flat(
        cls,
        token_ids: AnyArray,
        num: AnyArray,
        width: int,
        q: Annotated[CompactQ | DenseQ | None, "N M"] = None,
    ) -> "Drafts":
        """The drafts of ragged slots that follow one another, padding behind them.

        Args:
          token_ids: [N].
          num: [B], how many each slot has, at most `width`.
          width: D, static.
          q: the tokens that each can be, [N, M], or whole rows [N, V], of which none is copied.
        """
        ids = array_of("token_ids", token_ids, "integers", ("N",), "flat ids [N]")
        numbers = array_of("num", num, "integers", ("B",), "one a slot [B]").astype(jnp.int32)
        width, ids = check_int("width", width, 0, MAX_WIDTH, "D"), ids.astype(jnp.int32)
        if q is not None:
            check_type("q", q, (CompactQ, DenseQ), "a `CompactQ`, a `DenseQ`, or None")
        if isinstance(q, DenseQ):
            by_slot, *_ = compiled(_by_slot, width)(numbers, (ids, None))
            return cls(by_slot, numbers, replace(q, row_ids=row_ids_of(numbers, width)))
        return cls(*compiled(_by_slot, width)(numbers, (ids, q)))

    @classmethod
    def joined(cls, drawn: "Sequence[Drafts]", limit: Int32[Array, " B"]) -> "Drafts":
        """The drafts that were drawn one after another, D in all, as one proposal.

        Args:
          drawn: the results of `draw`, in the order of the positions.
          limit: how many of them each slot may get.
        """
        if not isinstance(drawn, (list, tuple)) or not all(isinstance(x, Drafts) for x in drawn):
            raise TypeError(f"drawn is {drawn!r}: give a list of `Drafts`, as `draw` makes them")
        if not drawn:
            raise ValueError("drawn is empty: give 1 and more `Drafts`; `Drafts.none` has none")
        slots = len(drawn[0].token_ids)
        limit = array_of("limit", limit, "integers", (slots,), "one a slot [B]")
        parts = [(draft.token_ids, draft.q, draft.report) for draft in drawn]
        first, *others = map(_sizes_of_slots, parts)
        if any(sizes != first for sizes in others):
            raise ValueError(
                "drawn has drafts of several kinds: give those of the same slots, all with a q of "
                "one kind and as many candidates, or all without; a certain draft's q is logprob 0 "
                "of its own id"
            )
        return compiled(_joined)(to_device(limit, jnp.int32), parts)

    @classmethod
    def none(cls, num_slots: int, num_drafts: int, vocab_size: int) -> "Drafts":
        """Empty proposals of width D, with a q as `draw` makes them."""
        num_slots = check_int("num_slots", num_slots, 0, MAX_WIDTH, "B")
        num_drafts = check_int("num_drafts", num_drafts, 0, MAX_WIDTH, "D")
        vocab_size = check_int("vocab_size", vocab_size, 1, 2**31 - 1, "V")
        wide = (num_slots, num_drafts, min(MOST_TOKENS, vocab_size))
        return compiled(_no_drafts, wide)()


@with_field_docs
class RowsRead(NamedTuple):
    """What one read of B * S rows left for the logprobs of any of their tokens.

    rows is [B, S], and [N] of flat rows. m is a row's largest logit, T its slot's temperature, and
    1 where that is 0.

    Attributes:
      largest: m.
      log_sum: log of the sum of exp(x - m); NaN where the row is invalid.
      log_scaled: log of the sum of exp((x - m) / T); NaN as well.
      temperature: T.
      top_ids: in descending order of logits, ties lowest id first.
      top_logits: -inf where a row has no more.
      maxima: of the row's groups of 256 tokens.
    """

    largest: Float32[Array, "*rows"]
    log_sum: Float32[Array, "*rows"]
    log_scaled: Float32[Array, "*rows"]
    temperature: Float32[Array, "*rows"]
    top_ids: Int32[Array, "*rows K"]
    top_logits: Float32[Array, "*rows K"]
    maxima: Float32[Array, "*rows _"]


@with_field_docs
class Verified(NamedTuple):
    """The emitted tokens: the accepted drafts, then the recovered or the bonus token.

    Attributes:
      token_ids: from num_tokens on: -1.
      num_tokens: from 1 to the number of drafts + 1; 0 of a slot without a row.
      cut: of the rows' p [B, S], which processed logprobs are of.
      read: with `k`: what `emitted_logprobs` needs.
      changed_read: the same of the changed logits, where they were changed.
      row_ids: as they were given, where the logits are flat.
      changes: of each row's logits, as they were given.
    """

    token_ids: Int32[Array, "B S"]
    num_tokens: Int32[Array, " B"]
    cut: Truncation | None = None
    read: RowsRead | None = None
    changed_read: RowsRead | None = None
    row_ids: Int32[Array, "B S"] | None = None
    changes: Changes | None = None


class Batch(NamedTuple):
    """What verification knows of the slots before it reads a row."""

    positions: Int32[Array, "B S"]  # the sequence position that each row decides
    proposed: Bool[Array, "B D"]  # the drafts that there are, and that have a row
    drafts: Drafts
    sampling: Sampling
    row_ids: Int32[Array, "B S"] | None = None  # of the N rows; None: B * S rows, slot by slot

    def shape_of(self, rows: jax.Array) -> tuple[int, ...]:
        """How results of the N rows are given: [B, S], or [N] where these are flat."""
        return self.positions.shape if self.row_ids is None else (rows.shape[0],)

    @property
    def rows(self) -> Int32[Array, "B S"]:
        """The number of each row among the N; 0 where there is none."""
        if self.row_ids is None:
            shape = self.positions.shape
            return jnp.arange(shape[0] * shape[1], dtype=jnp.int32).reshape(shape)
        return jnp.maximum(self.row_ids, 0)

    def by_slot(self, values: _Values) -> _Values:
        """A tree of arrays [N, ...] as [B, S, ...]; unspecified where there is no row."""

        def placed(x: jax.Array) -> jax.Array:
            if self.row_ids is None:
                return x.reshape(*self.positions.shape, *x.shape[1:])
            return x[self.rows]

        return typed.tree_map(placed, values)

    def of_each_row(self, num_rows: int) -> Annotated[Sampling, "B = N"]:
        """The parameters of the N rows; those of a row that no slot has are greedy."""
        if self.row_ids is None:
            return of_each_row(self.sampling, self.positions.shape)
        slots = slots_of_rows(self.row_ids, num_rows)
        nobody = Sampling.greedy(1)
        return typed.tree_map(
            lambda x, none: jnp.concatenate([x, none])[slots], self.sampling, nobody
        )

    def with_rows(self, row_ids: jax.Array, num_rows: int) -> "Batch":
        """The same slots, with rows among `num_rows` flat ones."""
        row_ids = jnp.where((row_ids >= 0) & (row_ids < num_rows), row_ids, -1)
        proposed = self.proposed & (row_ids[:, :-1] >= 0)
        return self._replace(proposed=proposed, row_ids=row_ids)


def row_ids_of(num_rows: AnyArray, num_positions: int) -> Int32[Array, "B S"]:
    """The rows of slots that follow one another.

    Args:
      num_rows: [B], how many rows each slot has, at most S: its drafts, and one more where
        its bonus token is to be drawn.
      num_positions: S, static.

    Returns:
      `row_ids` for `verify`: -1 from a slot's number of rows on.
    """
    num_rows = array_of("num_rows", num_rows, "integers", ("B",), "one a slot [B]")
    num_rows = num_rows.astype(jnp.int32)
    num_positions = check_int("num_positions", num_positions, 1, MAX_WIDTH, "S")
    return compiled(_row_ids_of, num_positions)(num_rows)


def _row_ids_of(num_positions: int, num_rows: jax.Array) -> jax.Array:
    """`row_ids_of` an array."""
    start = jnp.cumsum(num_rows, dtype=jnp.int32) - num_rows
    index = jnp.arange(num_positions, dtype=jnp.int32)[None]
    return jnp.where(index < num_rows[:, None], start[:, None] + index, -1)


def _by_slot(width: int, num: jax.Array, flat: Any) -> tuple[Any, jax.Array, Any]:
    """The arguments of `Drafts` from flat ids and q: 0 behind a slot's number of drafts."""
    place = _row_ids_of(width, num)

    def placed(values: jax.Array) -> jax.Array:
        of_slots = values[jnp.maximum(place, 0)]
        is_draft = (place >= 0).reshape(*place.shape, *[1] * (of_slots.ndim - 2))
        return jnp.where(is_draft, of_slots, jnp.zeros((), of_slots.dtype))

    ids, q = jax.tree.map(placed, flat)
    return ids, num, q


def _sizes_of_slots(part: Tree) -> tuple[jax.tree_util.PyTreeDef, list[tuple[int, ...]]]:
    """What parts of `_joined` have in common."""
    arrays, tree = jax.tree.flatten(part)
    return tree, [x.shape[:1] + x.shape[2:] for x in arrays]


def _joined(limit: jax.Array, parts: list[Any]) -> Drafts:
    """`Drafts.joined` of their ids, q and reports."""
    token_ids, q, report = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *parts)
    return Drafts(token_ids, jnp.minimum(limit, token_ids.shape[1]), q, report)


def _no_drafts(shape: tuple[int, int, int]) -> Drafts:
    """`Drafts.none` with a q of this shape."""
    q = CompactQ(jnp.full(shape, -1, jnp.int32), jnp.full(shape, -jnp.inf, jnp.float32))
    return Drafts(jnp.zeros(shape[:2], jnp.int32), jnp.zeros(shape[0], jnp.int32), q)


def slots_of_rows(row_ids: Int32[Array, "B S"], num_rows: int) -> Int32[Array, " N"]:
    """The slot that has each of N rows; B where none has."""
    batch, positions = row_ids.shape
    slots = jnp.broadcast_to(jnp.arange(batch, dtype=jnp.int32)[:, None], (batch, positions))
    place = jnp.where(row_ids >= 0, row_ids, num_rows)
    slot_of_row = jnp.full(num_rows, batch, jnp.int32)
    return slot_of_row.at[place.reshape(-1)].set(slots.reshape(-1), mode="drop")
