"""A drafter of your own, as one pure function."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jax_specdec.device.drafting.drafters import Context, State, certain, no_drafts, none_drawn
from jax_specdec.device.sampling.distribution import Truncation
from jax_specdec.device.sampling.verify import Drafts

DraftFunction = Callable[[Any, Context], Drafts]  # of the loop's params, and what a step left


@dataclass(frozen=True)
class CallableDrafter:
    """A drafter that proposes what `function(params, context)` returns, a `Drafts`:

    - `token_ids`: the tokens that follow `context.tokens[b, : context.lengths[b]]`.
    - `num`: how many of them count. A slot's drafts also end at `context.limit[b]`, and at the
      first id outside the vocabulary: -1 says "no more" as well as `num` does.
    - `logits` and `cut`: None where each draft is certain. Otherwise each draft is drawn by
      `drafting.draw` at its position, `context.lengths + d`, from logits of `logits_dtype`, and
      `drafting.joined` makes one `Drafts` of them.

    Two rules keep the emitted tokens' distribution that of the target. Certain drafts depend on
    nothing but `context`. With logits, drafts come from `drafting.draw`, and neither `num` nor the
    logits depend on drafts drawn later, or on rows of `context.hidden` that emitted nothing.

    The function is traced once. It is part of the static value, so it must be hashable and pure.
    It keeps no state: a drafter with a state implements `Drafter`, as those of this package do.

    >>> def the_same_again(params, context):
    ...     last = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)
    ...     return Drafts(jnp.repeat(last, 2, axis=1), context.limit, None)
    >>> drafter = CallableDrafter(the_same_again, num_drafts=2, vocab_size=264)
    """

    function: DraftFunction
    num_drafts: int
    vocab_size: int
    logits_dtype: str | None = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"{self.function!r} is not a function (params, context) -> Drafts")
        if self.num_drafts < 1:
            raise ValueError(f"num_drafts = {self.num_drafts} must be positive; NoDrafter has none")
        if self.vocab_size < 1:
            raise ValueError(f"vocab_size = {self.vocab_size} must be positive")

    def init(self, num_slots: int, length: int) -> tuple[Drafts, State]:
        if self.logits_dtype is None:
            return no_drafts(num_slots, self.num_drafts), ()
        shape = (num_slots, self.num_drafts, self.vocab_size)
        return none_drawn(shape, self.logits_dtype), ()

    def prefill(self, *_: Any) -> State:
        return ()

    def propose(self, params: Any, state: State, context: Context) -> tuple[Drafts, State]:
        drafts = self.function(params, context)
        self._check(drafts, context.limit.shape[0])
        # An id outside the vocabulary could be accepted as a certainty.
        known = (drafts.token_ids >= 0) & (drafts.token_ids < self.vocab_size)
        willing = jnp.cumprod(known.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
        num = jnp.clip(jnp.minimum(drafts.num, willing), 0, context.limit)
        ids = certain(drafts.token_ids, num).token_ids
        return drafts._replace(token_ids=ids, num=num), state

    def _check(self, drafts: Drafts, batch: int) -> None:
        """Refuse, while tracing, drafts that the loop could not verify."""
        name = getattr(self.function, "__name__", repr(self.function))
        if not isinstance(drafts, Drafts):
            raise TypeError(f"{name} returned a {type(drafts).__name__}; expected a Drafts")
        expected = self.init(batch, 0)[0]
        for field, got, wanted in zip(Drafts._fields, drafts, expected, strict=True):
            if _described(got) != _described(wanted):
                origin = ": `drafting.draw` makes it" if got is None else ""
                raise ValueError(
                    f"{name} returned {field} = {_described(got)}; expected {_described(wanted)}"
                    f"{origin} (B = {batch}, D = {self.num_drafts}, V = {self.vocab_size}, "
                    f"logits_dtype = {self.logits_dtype})"
                )


def _described(value: jax.Array | Truncation | None) -> str:
    """Shape and dtype of each array, to compare and to read."""
    arrays = jax.tree.leaves(value)
    return ", ".join(f"{jnp.result_type(x).name}{list(jnp.shape(x))}" for x in arrays) or "None"
