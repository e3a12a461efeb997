"""One step of speculative decoding around any model: draft, run the model, verify, pack.

This is the whole device side of a decoding loop of your own. Everything here may be jitted, and
runs inside `lax.while_loop` too.

Axes: B requests, T tokens, D drafts, S = D + 1 positions, V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ipc.wire import SlotState
from jax_specdec.drafters import draw
from jax_specdec.messages import StepOutput, draft_message, target_message
from jax_specdec.modes import Asked, Widths
from jax_specdec.verify import Drafts, verify

NUM_DRAFTS = 3


class Loop(NamedTuple):
    """What the loop carries from step to step."""

    tokens: jax.Array  # [B, T] int32: prompt and emitted tokens
    lengths: jax.Array  # [B] int32: how many of them are known
    remaining: jax.Array  # [B] int32: tokens that may still be emitted
    number: jax.Array  # [] uint32: of the next step


def start(requests) -> Loop:
    """The loop before the first step of these requests."""
    longest = max(len(r.prompt_token_ids) + r.params.max_tokens for r in requests) + NUM_DRAFTS
    rows = [r.prompt_token_ids + (0,) * (longest - len(r.prompt_token_ids)) for r in requests]
    return Loop(
        jnp.array(rows, jnp.int32),
        jnp.array([len(r.prompt_token_ids) for r in requests], jnp.int32),
        jnp.array([r.params.max_tokens for r in requests], jnp.int32),
        jnp.uint32(0),
    )


Model = Callable[[jax.Array, jax.Array], jax.Array]


def step(
    model: Model,
    drafter: Model,
    loop: Loop,
    asked: Asked,
    widths: Widths,
) -> tuple[Loop, jax.Array, jax.Array]:
    """Emit 1 to D + 1 tokens for every request.

    Args:
      model: `(tokens [B, T], positions [B, S]) -> logits [B, S, V]`, the target.
      drafter: the same of a smaller model.
      asked, widths: what the requests want to know (`jax_specdec.slots` makes both).

    Returns:
      The loop after the step, and its target and its draft message, [W] uint32 each.
    """
    row = jnp.arange(NUM_DRAFTS + 1, dtype=jnp.int32)[None, :]
    request = jnp.arange(loop.lengths.shape[0])[:, None]
    active = loop.remaining > 0

    # 1. Draft, drawing each token the way that verification expects.
    def draft(tokens: jax.Array, place: jax.Array) -> tuple[jax.Array, jax.Array]:
        position = (loop.lengths + place)[:, None]
        logits = drafter(tokens, position - 1)
        drawn = draw(logits, asked.sampling, position[:, 0])
        return tokens.at[request, position].set(drawn[:, None], mode="drop"), logits[:, 0]

    tokens, draft_logits = jax.lax.scan(draft, loop.tokens, row[0, :-1])
    draft_ids = jnp.take_along_axis(tokens, loop.lengths[:, None] + row[:, :-1], axis=1)
    num_drafts = jnp.clip(loop.remaining - 1, 0, NUM_DRAFTS)
    drafts = Drafts(draft_ids, num_drafts, jnp.swapaxes(draft_logits, 0, 1))

    # 2. Run the model over the last token and the drafts. 3. Verify.
    logits = model(tokens, loop.lengths[:, None] - 1 + row)
    verified = verify(logits, drafts, asked.sampling, loop.lengths)
    num_tokens = jnp.where(active, verified.num_tokens, 0)
    places = jnp.where(row < num_tokens[:, None], loop.lengths[:, None] + row, tokens.shape[1])
    after = Loop(
        loop.tokens.at[request, places].set(verified.token_ids, mode="drop"),
        loop.lengths + num_tokens,
        loop.remaining - num_tokens,
        loop.number + 1,
    )

    # 4. Logprobs of what was emitted, of those who asked, packed into words.
    output = StepOutput(
        logits=logits,
        token_ids=verified.token_ids,
        num_tokens=num_tokens,
        num_rows=num_tokens,
        num_drafts=jnp.where(active, num_drafts, 0),
        drafts=drafts._replace(num=jnp.where(active, num_drafts, 0)),
        state=jnp.where(active, SlotState.TOKENS, SlotState.STOPPED).astype(jnp.int32),
        running=jnp.any(after.remaining > 0),
        greedy_rows=None,
    )
    number = jnp.stack([loop.number, jnp.uint32(0)])
    target = target_message(output, asked, number, draft_follows=True, widths=widths)
    return after, target, draft_message(output, asked, number, widths=widths)
