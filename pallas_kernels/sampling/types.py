"""What verification takes and returns: proposals with the distributions that they came from.

Axes: B slots, D drafts, S = D + 1 positions, M tokens of a draft's q.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float32, Int32

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
    report: Any = None  # a `DraftReport`, or one with more fields, where a draft message follows


# What a draft message has of one draft a slot: of its logits [B, 1, V], and of the draft itself.
ReportDrafts = Callable[[jax.Array, Drafts], DraftReport]


class RowsRead(NamedTuple):
    """What one read of B * S rows left for the logprobs of any of their tokens.

    m is a row's largest logit, T its slot's temperature, and 1 where that is 0.
    """

    largest: Float32[Array, "B S"]  # m
    log_sum: Float32[Array, "B S"]  # log of the sum of exp(x - m); NaN where the row is invalid
    log_scaled: Float32[Array, "B S"]  # log of the sum of exp((x - m) / T)
    temperature: Float32[Array, "B S"]  # T
    top_ids: Int32[Array, "B S K"]  # in descending order of logits, ties lowest id first
    top_logits: Float32[Array, "B S K"]  # -inf where a row has no more
    maxima: Float32[Array, "B S _"]  # of the row's groups of 256 tokens


class Verified(NamedTuple):
    """The emitted tokens: the accepted drafts, then the recovered or the bonus token."""

    token_ids: Int32[Array, "B S"]  # from num_tokens on: -1
    num_tokens: Int32[Array, " B"]  # from 1 to the number of drafts + 1
    cut: Truncation | None = None  # of the rows' p [B, S], which processed logprobs are of
    read: RowsRead | None = None  # with `k`: what `emitted_logprobs` needs
