"""A drafter of your own, as one pure function."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jax_specdec.device.drafting.drafters import Chunk, Context, DrafterState, certain, no_drafts
from pallas_kernels.sampling import CompactQ, Drafts

DraftFunction = Callable[[Any, Context], Drafts]  # of the loop's params, and what a step left


@dataclass(frozen=True)
class CallableDrafter:
    """A drafter that proposes what `function(params, context)` returns, a `Drafts`:

    - `token_ids`: the tokens that follow `context.tokens[b, : context.lengths[b]]`.
    - `num`: how many of them count. A slot's drafts also end at `context.limit[b]`, and at the
      first id outside the vocabulary: -1 says "no more" as well as `num` does.
    - `q` and `report`: None where each draft is certain. Otherwise (`drawn=True`) each draft is
      drawn by `drafting.draw(logits, context.sampling, context.lengths + d,
      report_drafts=context.report_drafts)`, and `Drafts.joined` makes one `Drafts` of them.

    Two rules keep the emitted tokens' distribution that of the target. Certain drafts depend on
    nothing but `context`. Drawn drafts come from `drafting.draw`, and neither `num` nor the
    logits depend on drafts drawn later, or on rows of `context.hidden` that emitted nothing.

    The function is traced once. It is part of the static value, so it must be hashable and pure.
    It keeps no state: a drafter with a state implements `Drafter`, as those of this package do.

    >>> def the_same_again(params, context):
    ...     last = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)
    ...     return Drafts(jnp.repeat(last, 2, axis=1), context.limit)
    >>> drafter = CallableDrafter(the_same_again, num_drafts=2, vocab_size=264)
    """

    function: DraftFunction
    num_drafts: int
    vocab_size: int
    drawn: bool = False  # whether the drafts have a q

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"{self.function!r} is not a function (params, context) -> Drafts")
        if self.num_drafts < 1:
            raise ValueError(f"num_drafts = {self.num_drafts} must be positive; NoDrafter has none")
        if self.vocab_size < 1:
            raise ValueError(f"vocab_size = {self.vocab_size} must be positive")

    def init(self, num_slots: int, length: int) -> tuple[Drafts, DrafterState]:
        if not self.drawn:
            return no_drafts(num_slots, self.num_drafts), ()
        return Drafts.none(num_slots, self.num_drafts, self.vocab_size), ()

    def prefill(self, params: Any, state: DrafterState, chunk: Chunk) -> DrafterState:
        return ()

    def propose(
        self, params: Any, state: DrafterState, context: Context
    ) -> tuple[Drafts, DrafterState]:
        drafts = self.function(params, context)
        self._check(drafts, context)
        # An id outside the vocabulary could be accepted as a certainty.
        is_token = (drafts.token_ids >= 0) & (drafts.token_ids < self.vocab_size)
        willing = jnp.cumprod(is_token.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
        num = jnp.clip(jnp.minimum(drafts.num, willing), 0, context.limit)
        ids = certain(drafts.token_ids, num).token_ids
        return drafts._replace(token_ids=ids, num=num), state

    def _check(self, drafts: Drafts, context: Context) -> None:
        """Refuse, while tracing, drafts that the loop could not verify or tell of."""
        name = getattr(self.function, "__name__", repr(self.function))
        if not isinstance(drafts, Drafts):
            raise TypeError(f"{name} returned a {type(drafts).__name__}; expected a Drafts")
        batch = context.limit.shape[0]
        expected = self.init(batch, 0)[0]
        for field in ("token_ids", "num", "q"):
            got, expected_text = (
                _described(getattr(drafts_or_expected, field))
                for drafts_or_expected in (drafts, expected)
            )
            if got != expected_text:
                origin = ": `drafting.draw` makes it" if getattr(drafts, field) is None else ""
                raise ValueError(
                    f"{name} returned {field} = {got}; expected {expected_text}{origin} "
                    f"(B = {batch}, D = {self.num_drafts}, V = {self.vocab_size}, "
                    f"drawn = {self.drawn})"
                )
        if self.drawn and context.report_drafts is not None and drafts.report is None:
            raise ValueError(
                f"{name} returned report = None, but a request asks for its drafts' logprobs: give "
                "`drafting.draw` the argument report_drafts=context.report_drafts"
            )


def _described(value: jax.Array | CompactQ | None) -> str:
    """Shape and dtype of each array, to compare and to read."""
    arrays = jax.tree.leaves(value)
    return ", ".join(f"{jnp.result_type(x).name}{list(jnp.shape(x))}" for x in arrays) or "None"
