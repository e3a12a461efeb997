"""A step of speculative decoding around any model: draft, run the model, verify, pack.

This is the whole device side of a decoding loop of your own. Everything here may be jitted, and
runs inside `lax.while_loop` too.

Axes: B requests, T tokens, D drafts, S = D + 1 positions, V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_specdec.device import (
    BatchOptions,
    Drafts,
    Widths,
    draft_message,
    draft_rows,
    step_output,
    target_message,
    verify,
)
from jax_specdec.device.drafting import draw

NUM_DRAFTS = 2


class Loop(NamedTuple):
    """The state that the loop carries from step to step."""

    tokens: jax.Array  # [B, T] int32: prompt and emitted tokens
    lengths: jax.Array  # [B] int32: how many of them are known
    remaining: jax.Array  # [B] int32: tokens that may still be emitted
    number: jax.Array  # [] uint32: of the next step


def start(requests) -> Loop:
    """Make the loop's state before the first step of these requests."""
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
    asked: BatchOptions,
    widths: Widths,
) -> tuple[Loop, jax.Array, jax.Array]:
    """Emit 1 to D + 1 tokens for every request.

    Args:
      model: `(tokens [B, T], positions [B, S]) -> logits [B, S, V]`, the target.
      drafter: the same for a smaller model.
      asked: what each request wants to know (`options_of_requests` makes it).
      widths: the largest sizes among them (`widths_of` makes it); static.

    Returns:
      The loop after the step, and its target and its draft message, [W] uint32 each.
    """
    row = jnp.arange(NUM_DRAFTS + 1, dtype=jnp.int32)[None, :]
    request = jnp.arange(loop.lengths.shape[0])[:, None]
    active = loop.remaining > 0

    # 1. Draft: `draw` samples each token with the random numbers that `verify` expects.
    tokens, drawn = loop.tokens, []
    for place in range(NUM_DRAFTS):
        position = loop.lengths + place
        logits = drafter(tokens, position[:, None] - 1)
        drawn.append(
            draw(logits, asked.sampling, position, report_drafts=draft_rows(asked, widths))
        )
        tokens = tokens.at[request, position[:, None]].set(drawn[-1].token_ids, mode="drop")
    drafts = Drafts.joined(drawn, limit=jnp.maximum(loop.remaining - 1, 0))

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

    # 4. Pack the logprobs of emitted tokens, for the requests that asked, into words.
    running = jnp.any(after.remaining > 0)
    output = step_output(logits, drafts, verified, active=active, running=running)
    number = jnp.stack([loop.number, jnp.uint32(0)])
    target = target_message(output, asked, number, draft_follows=True, widths=widths)
    return after, target, draft_message(output, asked, number, widths=widths)
