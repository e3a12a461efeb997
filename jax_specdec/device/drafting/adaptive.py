"""Adaptive draft length: fewer drafts for a request whose drafts are seldom accepted.

If each draft is accepted with probability a, a step with d drafts emits 1 + a + ... + a^d tokens
on average (Leviathan et al., arXiv 2211.17192, section 2.2), and takes 1 + c d times as long as a
step without drafts when each one costs the share c of it. The length that makes the most tokens
in the least time is therefore the d that maximizes

    (1 + a + ... + a^d) / (1 + c d).

a is estimated for each request, as an average over the drafts that verification reached (those up
to the first rejection; nothing is learned from the others), in which each draft weighs 1 - w times
as much as the one after it. It starts at 1, so that a new request is drafted for at full length.

Exactness: the length may depend only on tokens that were emitted and on the fate of drafts before
them, never on the values of the drafts that it limits. Verification corrects for the proposed
tokens, given their number. If a draft were dropped because of its value, the remaining ones would
no longer follow the q that verification divides by.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jax_specdec.device.drafting.drafters import Chunk, Context, Drafter, State
from pallas_kernels.sampling import Drafts


class AdaptiveState(NamedTuple):
    """The state of the drafter inside, and the estimate of a in each slot."""

    inner: State
    acceptance: Float32[Array, " B"]


@dataclass(frozen=True)
class Adaptive:
    """A drafter that proposes as many drafts of another one as pay for each request."""

    drafter: Drafter
    min_drafts: int = 1
    """At least 1: without drafts a request would never show that they are accepted again."""
    draft_cost: float = 0.05
    """c: the time that each draft a slot adds to a step, as a share of a step without drafts.
    It depends on model, batch and device; 0 only drops drafts that are never accepted."""
    weight: float = 0.1
    """w: the latest draft's weight in the average, which remembers about 1 / w drafts."""

    def __post_init__(self) -> None:
        most = self.drafter.num_drafts
        if not 1 <= self.min_drafts <= most:
            raise ValueError(
                f"min_drafts = {self.min_drafts} must be from 1 to the {most} drafts of the drafter"
                + ("; there is nothing to adapt" if most == 0 else "")
            )
        if not 0 <= self.draft_cost < 1:
            raise ValueError(
                f"draft_cost = {self.draft_cost} must be from 0 to below 1: "
                "a draft that costs as much as a step never pays"
            )
        if not 0 < self.weight < 1:
            raise ValueError(f"weight = {self.weight} must be between 0 and 1")

    @property
    def num_drafts(self) -> int:
        return self.drafter.num_drafts

    def init(self, num_slots: int, length: int) -> tuple[Drafts, AdaptiveState]:
        drafts, inner = self.drafter.init(num_slots, length)
        return drafts, AdaptiveState(inner, jnp.ones(num_slots, jnp.float32))

    def prefill(self, params: Any, state: AdaptiveState, chunk: Chunk) -> AdaptiveState:
        inner = self.drafter.prefill(params, state.inner, chunk)
        # The estimate in the slot is that of its former request. It is reset at every chunk, not at
        # position 0 alone: a prompt whose first chunks were copied does not start there.
        return AdaptiveState(inner, state.acceptance.at[chunk.slot].set(1.0))

    def propose(
        self, params: Any, state: AdaptiveState, context: Context
    ) -> tuple[Drafts, AdaptiveState]:
        accepted = jnp.maximum(context.verified.num_tokens - 1, 0)
        acceptance = updated(state.acceptance, accepted, context.num_drafts, self.weight)
        best = best_length(acceptance, self.num_drafts, self.draft_cost)
        limit = jnp.minimum(context.limit, jnp.maximum(best, self.min_drafts))
        drafts, inner = self.drafter.propose(params, state.inner, context._replace(limit=limit))
        drafts = drafts._replace(num=jnp.minimum(drafts.num, limit))
        return drafts, AdaptiveState(inner, acceptance)


def updated(
    acceptance: Float32[Array, " B"],
    accepted: Int32[Array, " B"],
    num_drafts: Int32[Array, " B"],
    weight: float,
) -> Float32[Array, " B"]:
    """The average `acceptance` after `accepted` of `num_drafts` drafts, each of this weight.

    Where fewer were accepted than drafted, one rejection counts.
    """
    forgotten = jnp.power(jnp.float32(1 - weight), accepted.astype(jnp.float32))
    after_accepted = 1 - (1 - acceptance) * forgotten
    return jnp.where(accepted < num_drafts, after_accepted * (1 - weight), after_accepted)


def best_length(
    acceptance: Float32[Array, " B"], num_drafts: int, draft_cost: float
) -> Int32[Array, " B"]:
    """The number of drafts, 0 to D, that emits most tokens in a time; of equal ones the least.

    Args:
      acceptance: a, see the module.
      num_drafts: D.
      draft_cost: c, see the module.
    """
    drafts = jnp.arange(num_drafts + 1, dtype=jnp.float32)[None, :]
    tokens = jnp.cumsum(jnp.power(acceptance[:, None], drafts), axis=1)
    return jnp.argmax(tokens / (1 + draft_cost * drafts), axis=1).astype(jnp.int32)
