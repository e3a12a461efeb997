"""The suffix drafter: go on as the text did, most often, after the longest suffix seen before.

Source of the idea: SuffixDecoding (Oliaro et al., arXiv 2411.04975), which keeps suffix trees of
the request's own text and of a shared corpus, drafts the likeliest continuation, and drafts more
the longer the match. On an accelerator a tree's pointers would be chased one by one, so here

1. every place of the request's own text is compared with its end at once (the text is short, and
   changes with each token),
2. the corpus, which never changes, is a suffix array, found in by binary search,
3. the longer of the two matches wins; the own text's where they are equally long,
4. the places that follow the match vote: each draft is the token that most of them have next, and
   those that have another leave. Drafting ends when too few are left.

Axes: B slots, T positions of a slot, D drafts, M longest match, C candidates, N corpus places.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec.device.drafting.corpus import SEPARATOR, Corpus
from jax_specdec.device.drafting.drafters import Context, State, no_drafts
from jax_specdec.device.model.params import ModelParams
from jax_specdec.device.sampling.verify import Drafts
from pallas_kernels import vary_like

NEVER = -2  # equal to no token and no separator


class Shared(NamedTuple):
    """The corpus on the device; as in `Corpus`."""

    text: jax.Array  # [N] int32
    order: jax.Array  # [P] int32


class Places(NamedTuple):
    """Where a slot's text, or the corpus, went on after the longest match."""

    match: jax.Array  # [B] int32: how long it is, 0 for none
    place: jax.Array  # [B, C] int32: of the token after each occurrence
    exists: jax.Array  # [B, C] bool


@dataclass(frozen=True)
class SuffixDrafter:
    """Continue the longest suffix that occurred before, as it most often went on.

    Each draft is certain (its q is 1), and depends on nothing but the tokens before it: greedy and
    sampled requests keep their distribution. The corpus travels in the drafter's state; here it is
    part of the static value by its digest.
    """

    num_drafts: int
    corpus: Corpus | None = None
    max_match: int = 32
    """M: longer matches count as this long. A corpus limits its own matches to `max_context`."""
    min_match: int = 1
    drafts_per_match: float = 1.0
    """Drafts for each token of the match (`max_spec_factor` in SuffixDecoding)."""
    min_share: float = 0.1
    """A draft is made while at least this share of the occurrences has gone on as drafted."""
    max_candidates: int = 64
    """C: of more occurrences in the own text, the latest vote; in the corpus, as many spread
    evenly over its order."""

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

    def init(self, num_slots: int, length: int) -> tuple[Drafts, State]:
        shared: State = ()
        if self.corpus is not None:
            shared = Shared(jnp.asarray(self.corpus.text), jnp.asarray(self.corpus.order))
        return no_drafts(num_slots, self.num_drafts), shared

    def prefill(self, params: ModelParams, state: State, *_: Any) -> State:
        return state

    def propose(self, params: ModelParams, state: State, context: Context) -> tuple[Drafts, State]:
        index = jnp.arange(context.tokens.shape[1], dtype=jnp.int32)[None, :]
        known = jnp.where(index < context.lengths[:, None], context.tokens, NEVER)
        query = _ending(known, context.lengths, self.max_match)
        found = in_own_text(known, context.lengths, query, self.max_candidates)
        from_corpus = jnp.zeros_like(found.match, bool)
        shared: Shared | None = None
        if self.corpus is not None and self.corpus.order.size > 0:
            shared = state
            query = query[:, : self.corpus.max_context]
            theirs = in_corpus(shared, query, self.max_candidates)
            from_corpus = theirs.match > found.match
            found = Places(
                jnp.maximum(theirs.match, found.match),
                jnp.where(from_corpus[:, None], theirs.place, found.place),
                jnp.where(from_corpus[:, None], theirs.exists, found.exists),
            )
        token_ids, votes = _vote(found, from_corpus, known, context.lengths, shared,
                                 self.num_drafts)  # fmt: skip
        wanted = self.min_share * found.exists.sum(axis=1, dtype=jnp.float32)
        enough = (votes > 0) & (votes.astype(jnp.float32) >= wanted[:, None])
        willing = jnp.cumprod(enough.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
        grown = found.match.astype(jnp.float32) * self.drafts_per_match
        grown = jnp.minimum(grown, float(self.num_drafts)).astype(jnp.int32)
        num = jnp.minimum(jnp.minimum(willing, grown), context.limit)
        num = jnp.where(found.match >= self.min_match, jnp.maximum(num, 0), 0)
        exists = jnp.arange(self.num_drafts, dtype=jnp.int32)[None, :] < num[:, None]
        return Drafts(jnp.where(exists, token_ids, 0), num, None), state


def _ending(known: jax.Array, lengths: jax.Array, count: int) -> jax.Array:
    """The last `count` known tokens, the latest first; NEVER before the first one. [B, count]"""
    place = lengths[:, None] - 1 - jnp.arange(count, dtype=jnp.int32)[None, :]
    ending = jnp.take_along_axis(known, jnp.maximum(place, 0), axis=1)
    return jnp.where(place >= 0, ending, NEVER)


def in_own_text(
    known: jax.Array, lengths: jax.Array, query: jax.Array, max_candidates: int
) -> Places:
    """Where the longest suffix of the text occurred before in it; the latest occurrences.

    Args:
      known: [B, T] int32; NEVER from `lengths` on.
      lengths: [B] int32.
      query: [B, M] int32: the text's end, the latest token first.
      max_candidates: at most this many places are returned.
    """
    length = known.shape[1]
    index = jnp.arange(length, dtype=jnp.int32)[None, :]
    # Place i follows known[i - 1], known[i - 2], ...: those are compared with the query.
    alive = (index > 0) & (index < lengths[:, None])
    match = jnp.zeros_like(known)
    for back in range(query.shape[1]):
        before = jnp.pad(known, ((0, 0), (back + 1, 0)), constant_values=SEPARATOR)[:, :length]
        alive &= before == query[:, back : back + 1]
        match += alive.astype(jnp.int32)
    longest = match.max(axis=1)
    is_place = (match == longest[:, None]) & (longest[:, None] > 0)
    # The n-th place is where their running count first reaches n; the latest come first.
    counted = jnp.cumsum(is_place, axis=1, dtype=jnp.int32)
    number = counted[:, -1:] - jnp.arange(max_candidates, dtype=jnp.int32)[None, :]
    place = jax.vmap(jnp.searchsorted)(counted, number).astype(jnp.int32)
    return Places(longest, place, number > 0)


def in_corpus(shared: Shared, query: jax.Array, max_candidates: int) -> Places:
    """Where the longest suffix of the text occurs in the corpus.

    Args:
      shared: the corpus, sorted; at least one place.
      query: [B, M] int32: the text's end, the latest token first; NEVER where there is none.
      max_candidates: at most this many places are returned.
    """
    batch, most = query.shape
    num_places = shared.order.shape[0]
    depth = jnp.arange(most, dtype=jnp.int32)[None, :]

    def context(rank: jax.Array) -> jax.Array:
        """The tokens before the place of each rank [B], nearest first. [B, M]"""
        place = shared.order[jnp.clip(rank, 0, num_places - 1)]
        return shared.text[jnp.maximum(place[:, None] - 1 - depth, 0)]

    def bound(wanted: jax.Array, or_equal: bool) -> jax.Array:
        """How many places have a context below the first `wanted` tokens of the query. [B]"""
        considered = depth < wanted[:, None]

        def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            low, high = bounds
            middle = low + (high - low) // 2
            theirs = context(middle)
            differs = (theirs != query) & considered
            first = jnp.argmax(differs, axis=1)[:, None]
            less = jnp.take_along_axis(theirs < query, first, axis=1)[:, 0]
            below = (low < high) & jnp.where(differs.any(axis=1), less, or_equal)
            return jnp.where(below, middle + 1, low), jnp.where(below, high, middle)

        edges = jnp.zeros(batch, jnp.int32), jnp.full(batch, num_places, jnp.int32)
        edges = vary_like(edges, (shared, query))
        low, _ = lax.fori_loop(0, num_places.bit_length(), halve, edges)
        below: jax.Array = low
        return below

    # A context that shares the most with the query stands right before it or right behind.
    at = bound(jnp.full(batch, most, jnp.int32), or_equal=False)
    match = jnp.zeros(batch, jnp.int32)
    for neighbor in (at - 1, at):
        equal = (context(neighbor) == query).astype(jnp.int32)
        match = jnp.maximum(match, jnp.cumprod(equal, axis=1).sum(axis=1, dtype=jnp.int32))
    low, high = bound(match, or_equal=False), bound(match, or_equal=True)
    num = jnp.where(match > 0, high - low, 0)[:, None]
    # `num * which // shown` without the product, which may not fit.
    which = jnp.arange(max_candidates, dtype=jnp.int32)[None, :]
    shown = jnp.clip(num, 1, max_candidates)
    rank = low[:, None] + num // shown * which + num % shown * which // shown
    place = shared.order[jnp.clip(rank, 0, num_places - 1)]
    return Places(match, place, which < jnp.minimum(num, max_candidates))


def _vote(
    found: Places,
    from_corpus: jax.Array,
    known: jax.Array,
    lengths: jax.Array,
    shared: Shared | None,
    num_drafts: int,
) -> tuple[jax.Array, jax.Array]:
    """The token that most places have next, one after the other.

    Of tokens with as many votes, the one whose first place comes first in `found` wins.

    Returns:
      Token ids [B, D] int32, and how many places voted for all of them so far [B, D] int32.
    """
    batch, length = known.shape
    drafts = jnp.full((batch, num_drafts), NEVER, jnp.int32)
    alive, counts = found.exists, []
    for ahead in range(num_drafts):
        place = found.place + ahead
        # A place that reaches the end of the own text goes on in the drafts: a repetition repeats.
        own = jnp.take_along_axis(known, jnp.clip(place, 0, length - 1), axis=1)
        drafted = jnp.clip(place - lengths[:, None], 0, num_drafts - 1)
        drafted = jnp.take_along_axis(drafts, drafted, axis=1)
        following = jnp.where(place < lengths[:, None], own, drafted)
        if shared is not None:
            theirs = shared.text[jnp.clip(place, 0, shared.text.shape[0] - 1)]
            following = jnp.where(from_corpus[:, None], theirs, following)
        alive &= following >= 0  # a document of the corpus may end
        same = (following[:, :, None] == following[:, None, :]) & alive[:, None, :]
        votes = jnp.where(alive, same.sum(axis=-1, dtype=jnp.int32), 0)
        winner = jnp.argmax(votes, axis=1)[:, None]
        token = jnp.take_along_axis(following, winner, axis=1)
        alive &= following == token
        drafts = drafts.at[:, ahead].set(token[:, 0])
        counts.append(jnp.take_along_axis(votes, winner, axis=1)[:, 0])
    return drafts, jnp.stack(counts, axis=1)
