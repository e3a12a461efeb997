"""Drafters: values that propose the tokens which the target model verifies.

A drafter is an argument of the decoding loop: a frozen, hashable value (static under jit) with
pure functions over a state of its own. The loop treats them all alike, and proposing nothing is a
normal case.

Axes: B slots, S positions of a step, T positions of a slot, P positions of a chunk, D drafts,
E hidden size, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from ipc.field_docs import with_field_docs
from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.device.model.llama import project
from jax_specdec.device.model.mtp import mtp_forward
from jax_specdec.device.model.params import KVCache, ModelParams, init_mtp_cache
from jax_specdec.device.model.prefill import mtp_prefill
from jax_specdec.device.model.sharding import ONE_DEVICE, Parallel
from pallas_kernels import sampling
from pallas_kernels.sampling import Drafts, Sampling, Verified

# What a draft message has of one draft a slot: of its logits, as `draw` has them, of the draft and,
# of flat logits, of each slot's row.
ReportDrafts = Callable[..., Any]


def draw(
    draft_logits: Float[Array, "B 1 V"] | Float[Array, "N V"],
    sampling_of_slots: Sampling,
    positions: Int32[Array, " B"],
    *,
    report_drafts: ReportDrafts | None = None,
    **where: Any,
) -> Drafts:
    """`pallas_kernels.sampling.draw`, and the report on each draft that is drawn.

    Args:
      draft_logits, sampling_of_slots, positions: as there.
      report_drafts: makes the report (`jax_specdec.device.draft_rows`); None: there is none.
      where: as there: `row_ids`, `mesh`, `axis_name` and `vocab_size`.
    """
    drafts = sampling.draw(draft_logits, sampling_of_slots, positions, **where)
    if report_drafts is None:
        return drafts
    row_ids = where.get("row_ids")
    flat = () if row_ids is None else (row_ids,)
    return drafts._replace(report=report_drafts(draft_logits, drafts, *flat))


DrafterState = Any  # a pytree that belongs to the drafter


@with_field_docs
class Context(NamedTuple):
    """The state that a drafter sees after a step.

    Attributes:
      tokens: prompt and emitted tokens.
      lengths: how many of them are known.
      verified: this step's emitted tokens.
      num_drafts: how many drafts were verified in this step.
      hidden: the decoder's hidden states of this step's rows.
      positions: the rows' positions; -1 where a row emitted nothing.
      sampling: how each slot draws its drafts.
      limit: the most drafts that each slot may get now.
      proposes: static; False: all get none, the drafter just takes in the step's rows.
      report_drafts: For `draw`: what a draft message is to have of each draft.
    """

    tokens: Int32[Array, "B T"]
    lengths: Int32[Array, " B"]
    verified: Verified
    num_drafts: Int32[Array, " B"]
    hidden: Float[Array, "B S E"]
    positions: Int32[Array, "B S"]
    sampling: Sampling
    limit: Int32[Array, " B"]
    proposes: bool = True
    report_drafts: ReportDrafts | None = None


@with_field_docs
class Chunk(NamedTuple):
    """A chunk of a slot's prompt that the model has run.

    Attributes:
      hidden: the decoder's; position p predicts the next token.
      tokens: of the chunk.
      next_tokens: the token after each.
      start: position of the first token.
      num_valid: the rest is padding.
      slot: whose prompt it is.
    """

    hidden: Float[Array, "P E"]
    tokens: Int32[Array, " P"]
    next_tokens: Int32[Array, " P"]
    start: Int32[Array, ""]
    num_valid: Int32[Array, ""]
    slot: Int32[Array, ""]


class Drafter(Protocol):
    """A value that proposes up to `num_drafts` tokens a slot and step."""

    @property
    def num_drafts(self) -> int:
        """D: the width of the proposals."""
        ...

    def init(self, num_slots: int, length: int) -> tuple[Drafts, DrafterState]:
        """Empty proposals and the state before any request, for B slots of T positions."""
        ...

    def prefill(self, params: Any, state: DrafterState, chunk: Chunk) -> DrafterState:
        """Take in a chunk of a prompt.

        `params` are the loop's, here and in `propose`: `ModelParams`, or those of your own model.
        """
        ...

    def propose(
        self, params: Any, state: DrafterState, context: Context
    ) -> tuple[Drafts, DrafterState]:
        """Draft the tokens after `lengths`; at most `limit[b]` of them in slot b."""
        ...


@dataclass(frozen=True)
class NoDrafter:
    """Plain decoding. With `num_drafts` > 0 the steps have the shape of speculative ones."""

    num_drafts: int = 0

    def init(self, num_slots: int, length: int) -> tuple[Drafts, DrafterState]:
        return no_drafts(num_slots, self.num_drafts), ()

    def prefill(self, params: Any, state: DrafterState, chunk: Chunk) -> DrafterState:
        return ()

    def propose(
        self, params: Any, state: DrafterState, context: Context
    ) -> tuple[Drafts, DrafterState]:
        return no_drafts(context.limit.shape[0], self.num_drafts), state


@dataclass(frozen=True)
class NgramDrafter:
    """Prompt lookup: continue as the latest earlier occurrence of the last n tokens did.

    The longest n from `max_ngram` down to `min_ngram` that occurs wins. Drafts are certain (q = 1).
    Source: Saxena, "Prompt lookup decoding", 2023; n-gram matching in vLLM and FastDeploy.
    """

    num_drafts: int
    max_ngram: int = 3
    min_ngram: int = 1

    def __post_init__(self) -> None:
        if self.num_drafts < 1:
            raise ValueError(f"num_drafts = {self.num_drafts} must be positive; NoDrafter has none")
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(
                f"n-grams from {self.min_ngram} to {self.max_ngram}: "
                "min_ngram must be at least 1 and at most max_ngram"
            )

    def init(self, num_slots: int, length: int) -> tuple[Drafts, DrafterState]:
        return no_drafts(num_slots, self.num_drafts), ()

    def prefill(self, params: Any, state: DrafterState, chunk: Chunk) -> DrafterState:
        return ()

    def propose(
        self, params: Any, state: DrafterState, context: Context
    ) -> tuple[Drafts, DrafterState]:
        lengths = context.lengths
        index = jnp.arange(context.tokens.shape[1], dtype=jnp.int32)[None, :]
        token_ids = jnp.where(index < lengths[:, None], context.tokens, -1)
        source = jnp.full_like(lengths, -1)  # where the continuation begins
        # Shortest first, so that a longer match replaces a shorter one.
        for n in range(self.min_ngram, self.max_ngram + 1):
            latest = jnp.max(jnp.where(_earlier_ngrams(token_ids, lengths, n), index, -1), axis=1)
            source = jnp.where(latest >= 0, latest + n, source)
        num = jnp.where(source >= 0, jnp.clip(context.limit, 0, self.num_drafts), 0)
        # A continuation that runs into its own end goes on with itself: a repetition repeats.
        ahead = jnp.arange(self.num_drafts, dtype=jnp.int32)[None, :]
        period = jnp.maximum(lengths - source, 1)[:, None]
        place = source[:, None] + ahead % period
        draft_ids = jnp.take_along_axis(
            token_ids, jnp.clip(place, 0, token_ids.shape[1] - 1), axis=1
        )
        return certain(draft_ids, num), state


def _earlier_ngrams(
    token_ids: Int32[Array, "B T"], lengths: Int32[Array, " B"], n: int
) -> Bool[Array, "B T"]:
    """The places where the last n of the `lengths` known tokens began earlier."""
    length = token_ids.shape[1]
    index = jnp.arange(length, dtype=jnp.int32)[None, :]
    # Earlier than the n-gram itself, which needs n + 1 known tokens.
    matches = (index < lengths[:, None] - n) & (lengths[:, None] > n)
    for offset in range(n):
        place = jnp.clip(lengths - n + offset, 0, length - 1)
        last_ids = jnp.take_along_axis(token_ids, place[:, None], axis=1)
        shifted = jnp.pad(token_ids, ((0, 0), (0, offset)), constant_values=-2)[:, offset:]
        matches &= shifted == last_ids
    return matches


@dataclass(frozen=True)
class MtpDrafter:
    """The model's own multi-token prediction head, fed its own output for further drafts."""

    config: ModelConfig
    num_drafts: int
    parallel: Parallel = ONE_DEVICE

    def __post_init__(self) -> None:
        if self.config.num_mtp_layers == 0:
            raise ValueError("this model has no MTP head: choose another drafter, or none")
        if self.num_drafts < 1:
            raise ValueError(f"num_drafts = {self.num_drafts} must be positive; NoDrafter has none")

    def init(self, num_slots: int, length: int) -> tuple[Drafts, KVCache]:
        return self._none(num_slots), init_mtp_cache(self.config, num_slots, length)

    def _none(self, num_slots: int) -> Drafts:
        return Drafts.none(num_slots, self.num_drafts, self.config.vocab_size)

    def prefill(self, params: ModelParams, state: KVCache, chunk: Chunk) -> KVCache:
        where = chunk.start, chunk.num_valid, chunk.slot
        return mtp_prefill(params, self.config, chunk.hidden, chunk.next_tokens, *where, state)[1]

    def propose(
        self, params: ModelParams, state: KVCache, context: Context
    ) -> tuple[Drafts, KVCache]:
        emitted = jnp.maximum(context.verified.token_ids, 0)
        hidden, state = mtp_forward(
            params, self.config, context.hidden, emitted, context.positions, state
        )
        if not context.proposes:
            return self._none(emitted.shape[0]), state
        last = jnp.maximum(context.verified.num_tokens - 1, 0)
        hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)
        is_live = jnp.any(context.positions >= 0, axis=1)
        drawn: list[Drafts] = []
        for index in range(self.num_drafts):
            if index > 0:
                # The head's own hidden state stands at the position of the token drafted last.
                place = jnp.where(is_live, context.lengths - 2 + index, -1)[:, None]
                hidden, state = mtp_forward(
                    params, self.config, hidden, drawn[-1].token_ids, place, state
                )
            logits = project(params, self.config, hidden)
            place = context.lengths + index
            drafts = draw(
                logits,
                context.sampling,
                place,
                report_drafts=context.report_drafts,
                **self.parallel.columns,
            )
            drawn.append(drafts)
        return Drafts.joined(drawn, context.limit), state


def certain(token_ids: Int32[Array, "B D"], num: Int32[Array, " B"]) -> Drafts:
    """Drafts that were not drawn, and 0 from `num` on."""
    exists = jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None, :] < num[:, None]
    return Drafts(jnp.where(exists, token_ids, 0), num)


def no_drafts(num_slots: int, num_drafts: int) -> Drafts:
    """Empty proposals of width D."""
    zeros = jnp.zeros((num_slots, num_drafts), jnp.int32)
    return Drafts(zeros, jnp.zeros(num_slots, jnp.int32))
