"""A drafter that is a smaller model of the same tokenizer, with a cache of its own.

The idea of speculative decoding itself: Leviathan et al., https://arxiv.org/abs/2211.17192. The
small model's weights are `ModelParams.draft` of the loop's parameters.

A step that emitted n tokens has the small model run the token before them and all of them in one
pass: what of these it ran as drafts is overwritten with the same, and what it did not (the last
accepted draft, the token after it, drafts that came from elsewhere) is made up for.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.device.drafting.drafters import Chunk, Context, draw
from jax_specdec.device.model.llama import forward, logits
from jax_specdec.device.model.params import KVCache, init_cache
from jax_specdec.device.model.prefill import prefill
from jax_specdec.device.model.sharding import ONE_DEVICE, Parallel
from pallas_kernels.sampling import Drafts


@dataclass(frozen=True)
class DraftModel:
    """The drafts of a smaller model, whose ids mean what the target's mean.

    Either vocabulary may be longer: the model never proposes an id that only one of the two has,
    and reads an id that it lacks as its last one.
    """

    model: ModelConfig
    target: ModelConfig
    num_drafts: int
    parallel: Parallel = ONE_DEVICE

    def __post_init__(self) -> None:
        if self.num_drafts < 1:
            raise ValueError(f"num_drafts = {self.num_drafts} must be positive; NoDrafter has none")

    def init(self, num_slots: int, length: int) -> tuple[Drafts, KVCache]:
        return self._none(num_slots), init_cache(self.model, num_slots, length)

    def _none(self, num_slots: int) -> Drafts:
        return Drafts.none(num_slots, self.num_drafts, self.target.vocab_size)

    def prefill(self, params: Any, state: KVCache, chunk: Chunk) -> KVCache:
        small, where = _small(params), (chunk.start, chunk.num_valid, chunk.slot)
        return prefill(small, self.model, self._clamped(chunk.tokens), *where, state)[1]

    def propose(self, params: Any, state: KVCache, context: Context) -> tuple[Drafts, KVCache]:
        small, lengths, emitted = _small(params), context.lengths, context.verified.num_tokens
        is_live = jnp.any(context.positions >= 0, axis=1)
        index = jnp.arange(context.positions.shape[1] + 1, dtype=jnp.int32)[None, :]
        places = (lengths - emitted - 1)[:, None] + index
        last = context.tokens.shape[1] - 1
        tokens = jnp.take_along_axis(context.tokens, jnp.clip(places, 0, last), axis=1)
        is_row = is_live[:, None] & (index <= emitted[:, None])
        hidden, state = forward(
            small, self.model, self._clamped(tokens), jnp.where(is_row, places, -1), state
        )
        if not context.proposes:
            return self._none(emitted.shape[0]), state
        hidden = jnp.take_along_axis(hidden, emitted[:, None, None], axis=1)
        drawn: list[Drafts] = []
        for number in range(self.num_drafts):
            if number > 0:
                at = jnp.where(is_live, lengths - 1 + number, -1)[:, None]
                tokens = self._clamped(drawn[-1].token_ids)
                hidden, state = forward(small, self.model, tokens, at, state)
            draft_logits = self._in_target(logits(small, self.model, hidden))
            place = lengths + number
            drafts = draw(
                draft_logits,
                context.sampling,
                place,
                report_drafts=context.report_drafts,
                **self.parallel.columns,
            )
            drawn.append(drafts)
        return Drafts.joined(drawn, context.limit), state

    def _clamped(self, tokens: Int32[Array, "*any"]) -> Int32[Array, "*any"]:
        return jnp.minimum(tokens, self.model.vocab_size - 1)

    def _in_target(self, x: Float[Array, "B 1 Vd"]) -> Float[Array, "B 1 V"]:
        """Logits of the target's columns; -inf where this model has none."""
        if x.shape[-1] == self.target.num_columns and self.model.vocab_size == (
            self.target.vocab_size
        ):
            return x
        x = x[..., : min(self.model.vocab_size, self.target.vocab_size)]
        more = self.target.num_columns - x.shape[-1]
        return jnp.pad(x, ((0, 0), (0, 0), (0, more)), constant_values=-jnp.inf)


def _small(params: Any) -> Any:
    """The small model's weights, or a clear error where the loop's parameters have none."""
    if params.draft is None:
        raise ValueError("these parameters have no draft model: choose another drafter, or none")
    return params.draft
