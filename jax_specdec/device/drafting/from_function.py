"""Your own drafter, as one pure function."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jax_specdec.device.drafting.drafters import Context, State, no_drafts, none_drawn
from jax_specdec.device.model.params import ModelParams
from jax_specdec.device.sampling.distribution import Truncation
from jax_specdec.device.sampling.verify import Drafts

DraftFunction = Callable[[ModelParams, Context], Drafts]


@dataclass(frozen=True)
class CallableDrafter:
    """Proposes what `function(params, context)` returns: a `Drafts` of

    - `token_ids` [B, D] int32: the tokens that follow `context.tokens[b, : context.lengths[b]]`,
    - `num` [B] int32: how many of them count. A slot's drafts also end at `context.limit[b]`, and
      at the first id outside the vocabulary: -1 says "no more" as well as `num` does,
    - `logits` and `cut`: None where each draft is certain; otherwise each draft is drawn by
      `drafters.draw` at its position, `context.lengths + d`, from logits of `logits_dtype`, and
      `drafters.joined` makes one `Drafts` of them.

    The emitted tokens follow the target's distribution if certain drafts depend on nothing but
    `context`; and if, with logits, drafts come from `drafters.draw`, and neither `num` nor the
    logits depend on drafts drawn later, or on rows of `context.hidden` that emitted nothing.

    The function is traced once; it is part of the static value, so it must be hashable and pure.
    It keeps no state: a drafter that does implements `Drafter`, as those of this package do.

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
            raise TypeError(f"{self.function!r} is no function (params, context) -> Drafts")
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

    def propose(self, params: ModelParams, state: State, context: Context) -> tuple[Drafts, State]:
        drafts = self.function(params, context)
        self._check(drafts, context.limit.shape[0])
        # An id that no row of the target knows could be accepted as a certainty.
        known = (drafts.token_ids >= 0) & (drafts.token_ids < self.vocab_size)
        willing = jnp.cumprod(known.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
        num = jnp.clip(jnp.minimum(drafts.num, willing), 0, context.limit)
        exists = jnp.arange(self.num_drafts, dtype=jnp.int32)[None, :] < num[:, None]
        ids = jnp.where(exists, drafts.token_ids, 0)
        return drafts._replace(token_ids=ids, num=num), state

    def _check(self, drafts: Drafts, batch: int) -> None:
        """Refuse, while tracing, what the loop could not verify."""
        name = getattr(self.function, "__name__", repr(self.function))
        if not isinstance(drafts, Drafts):
            raise TypeError(f"{name} returned a {type(drafts).__name__}; expected a verify.Drafts")
        expected = self.init(batch, 0)[0]
        for field, got, wanted in zip(Drafts._fields, drafts, expected, strict=True):
            if _described(got) != _described(wanted):
                origin = ": `drafters.draw` makes it" if got is None else ""
                raise ValueError(
                    f"{name} returned {field} = {_described(got)}; expected {_described(wanted)}"
                    f"{origin} (B = {batch}, D = {self.num_drafts}, V = {self.vocab_size}, "
                    f"logits_dtype = {self.logits_dtype})"
                )


def _described(value: jax.Array | Truncation | None) -> str:
    """Shape and dtype of each array, for comparing and for a person."""
    arrays = jax.tree.leaves(value)
    return ", ".join(f"{jnp.result_type(x).name}{list(jnp.shape(x))}" for x in arrays) or "None"
