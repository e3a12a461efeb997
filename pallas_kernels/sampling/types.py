"""What verification takes and returns: proposals with the distributions that they came from.

Axes: B slots, D drafts, S = D + 1 positions, M tokens of a draft's q.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jaxtyping import Array, Float32, Int32

from pallas_kernels.contract.types import TopkLogprobs
from pallas_kernels.sampling.parameters import Truncation

AcceptRule = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class CompactQ(NamedTuple):
    """The distributions that drafts were drawn from: the tokens that each can be.

    The probabilities of a draft's tokens sum to one. It is drawn from them with the random numbers
    of its position, as `drafting.draw` does it.
    """

    ids: Int32[Array, "B D M"]  # distinct; -1 where there is no further token
    logprobs: Float32[Array, "B D M"]  # -inf where there is none


class DraftReport(NamedTuple):
    """What a draft message has of drafts: the fields of a `TopkLogprobs`, by slot and draft."""

    token_ids: Int32[Array, "B D K1"]
    logprobs: Float32[Array, "B D K1"]
    token_ranks: Int32[Array, "B D"]
    extra_logprobs: Float32[Array, "B D C"]


class Drafts(NamedTuple):
    """The tokens that a drafter proposed."""

    token_ids: Int32[Array, "B D"]
    num: Int32[Array, " B"]  # at most D
    q: CompactQ | None = None  # None: each draft was certain
    report: DraftReport | None = None  # where a draft message follows


# What a draft message has of one draft a slot: of its logits [B, 1, V], and of the draft itself.
ReportDrafts = Callable[[jax.Array, Drafts], DraftReport]


class Verified(NamedTuple):
    """The emitted tokens: the accepted drafts, then the recovered or the bonus token."""

    token_ids: Int32[Array, "B S"]  # from num_tokens on: -1
    num_tokens: Int32[Array, " B"]  # from 1 to the number of drafts + 1
    cut: Truncation | None = None  # of the rows' p [B, S], which processed logprobs are of
    raw: TopkLogprobs | None = None  # of all B * S rows, where they were asked for with the tokens
