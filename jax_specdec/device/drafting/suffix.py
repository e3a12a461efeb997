"""The suffix drafter: continue as the text most often did after the longest suffix seen before.

Source of the idea: SuffixDecoding (Oliaro et al., arXiv 2411.04975), which keeps suffix trees of
the request's own text, drafts the likeliest continuation, and drafts more the longer the match. An
accelerator would follow a tree's pointers one by one, so here

1. every place of the text is compared with its end at once (the text is short, and changes with
   each token),
2. the places that follow the longest match vote: each draft is the token that most of them have
   next, and places with another token leave. Drafting ends when too few are left.

Axes: B slots, T positions of a slot, D drafts, M longest match, C candidates.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jax_specdec.device.drafting.drafters import Chunk, Context, DrafterState, certain, no_drafts
from pallas_kernels.sampling import Drafts

_NEVER = -1  # in place of tokens before a text, and behind it


class Places(NamedTuple):
    """Where a slot's text went on after the longest match."""

    match: Int32[Array, " B"]  # how long it is, 0 for none
    place: Int32[Array, "B C"]  # of the token after each occurrence
    exists: Bool[Array, "B C"]


@dataclass(frozen=True)
class SuffixDrafter:
    """A drafter that continues the longest suffix that occurred before, as it most often did.

    Each draft is certain (q = 1), and depends on nothing but the tokens before it: greedy and
    sampled requests keep their distribution.
    """

    num_drafts: int
    max_match: int = 32
    """M: longer matches count as this long."""
    min_match: int = 1
    drafts_per_match: float = 1.0
    """Drafts for each token of the match (`max_spec_factor` in SuffixDecoding)."""
    min_share: float = 0.1
    """Drafting goes on while at least this share of the occurrences went on as drafted."""
    max_candidates: int = 64
    """C: the most occurrences that vote. Of more, the latest do."""

    def __post_init__(self) -> None:
        if self.num_drafts < 1:
            raise ValueError(f"num_drafts = {self.num_drafts} must be positive; NoDrafter has none")
        if not 1 <= self.min_match <= self.max_match:
            raise ValueError(
                f"matches from {self.min_match} to {self.max_match} tokens: "
                "min_match must be at least 1 and at most max_match"
            )
        if not self.drafts_per_match * self.max_match >= 1:
            raise ValueError(
                f"drafts_per_match = {self.drafts_per_match} drafts nothing "
                f"even for a match of {self.max_match} tokens"
            )
        if not 0 <= self.min_share <= 1:
            raise ValueError(f"min_share = {self.min_share} is a share, from 0 to 1")
        if self.max_candidates < 1:
            raise ValueError(f"max_candidates = {self.max_candidates} must be positive")

    def init(self, num_slots: int, length: int) -> tuple[Drafts, DrafterState]:
        return no_drafts(num_slots, self.num_drafts), ()

    def prefill(self, params: Any, state: DrafterState, chunk: Chunk) -> DrafterState:
        return state

    def propose(
        self, params: Any, state: DrafterState, context: Context
    ) -> tuple[Drafts, DrafterState]:
        index = jnp.arange(context.tokens.shape[1], dtype=jnp.int32)[None, :]
        written = jnp.where(index < context.lengths[:, None], context.tokens, _NEVER)
        query = _ending(written, context.lengths, self.max_match)
        matches = longest_matches(written, context.lengths, query, self.max_candidates)
        token_ids, votes = _vote(matches, written, context.lengths, self.num_drafts)
        num = jnp.maximum(jnp.minimum(self._willing(matches, votes), context.limit), 0)
        return certain(token_ids, num), state

    def _willing(self, matches: Places, votes: Int32[Array, "B D"]) -> Int32[Array, " B"]:
        """How many drafts the match is long enough for, and enough of its places agree on."""
        least_votes = self.min_share * matches.exists.sum(axis=1, dtype=jnp.float32)
        agree = (votes > 0) & (votes.astype(jnp.float32) >= least_votes[:, None])
        agreed = jnp.cumprod(agree.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
        grown = matches.match.astype(jnp.float32) * self.drafts_per_match
        grown = jnp.minimum(grown, float(self.num_drafts)).astype(jnp.int32)
        return jnp.where(matches.match >= self.min_match, jnp.minimum(agreed, grown), 0)


def _ending(
    token_ids: Int32[Array, "B T"], lengths: Int32[Array, " B"], count: int
) -> Int32[Array, "B {count}"]:
    """The last `count` known tokens, the latest first; NEVER before the first one."""
    place = lengths[:, None] - 1 - jnp.arange(count, dtype=jnp.int32)[None, :]
    ending = jnp.take_along_axis(token_ids, jnp.maximum(place, 0), axis=1)
    return jnp.where(place >= 0, ending, _NEVER)


def longest_matches(
    token_ids: Int32[Array, "B T"],
    lengths: Int32[Array, " B"],
    query: Int32[Array, "B M"],
    max_candidates: int,
) -> Places:
    """Find where the longest suffix of the text occurred before in it, the latest place first.

    Args:
      token_ids: the text; NEVER from `lengths` on.
      lengths: of the texts.
      query: the text's end, the latest token first.
      max_candidates: C, the most places that are returned.
    """
    length = token_ids.shape[1]
    index = jnp.arange(length, dtype=jnp.int32)[None, :]
    # Place i follows known[i - 1], known[i - 2], ...: these are compared with the query.
    alive = (index > 0) & (index < lengths[:, None])
    match = jnp.zeros_like(token_ids)
    for back in range(query.shape[1]):
        before = jnp.pad(token_ids, ((0, 0), (back + 1, 0)), constant_values=_NEVER)[:, :length]
        alive &= before == query[:, back : back + 1]
        match += alive.astype(jnp.int32)
    longest = match.max(axis=1)
    is_place = (match == longest[:, None]) & (longest[:, None] > 0)
    # The n-th place is where their running count first reaches n; the latest come first.
    counted = jnp.cumsum(is_place, axis=1, dtype=jnp.int32)
    number = counted[:, -1:] - jnp.arange(max_candidates, dtype=jnp.int32)[None, :]
    place = jax.vmap(jnp.searchsorted)(counted, number).astype(jnp.int32)
    return Places(longest, place, number > 0)


def _vote(
    matches: Places, token_ids: Int32[Array, "B T"], lengths: Int32[Array, " B"], num_drafts: int
) -> tuple[Int32[Array, "B D"], Int32[Array, "B D"]]:
    """The token that most places have next, one after the other.

    Of tokens with as many votes, the one whose first place comes first in `matches` wins.

    Returns:
      Token ids, and how many places voted for all of them so far.
    """
    batch, length = token_ids.shape
    drafts = jnp.full((batch, num_drafts), _NEVER, jnp.int32)
    alive, counts = matches.exists, []
    for ahead in range(num_drafts):
        place = matches.place + ahead
        # A place that reaches the end of the text goes on in the drafts: a repetition repeats.
        following_ids = jnp.take_along_axis(token_ids, jnp.clip(place, 0, length - 1), axis=1)
        drafted = jnp.clip(place - lengths[:, None], 0, num_drafts - 1)
        drafted = jnp.take_along_axis(drafts, drafted, axis=1)
        following = jnp.where(place < lengths[:, None], following_ids, drafted)
        same = (following[:, :, None] == following[:, None, :]) & alive[:, None, :]
        votes = jnp.where(alive, same.sum(axis=-1, dtype=jnp.int32), 0)
        winner = jnp.argmax(votes, axis=1)[:, None]
        token = jnp.take_along_axis(following, winner, axis=1)
        alive &= following == token
        drafts = drafts.at[:, ahead].set(token[:, 0])
        counts.append(jnp.take_along_axis(votes, winner, axis=1)[:, 0])
    return drafts, jnp.stack(counts, axis=1)
