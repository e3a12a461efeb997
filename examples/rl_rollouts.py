"""GRPO on rollouts from speculative decoding, and the checks that make it sound.

    python examples/rl_rollouts.py
    python examples/rl_rollouts.py --mode raw        the classic mistake, and how it is noticed

Logprobs are of what tokens were drawn from: the processed mode, over the ids that each was drawn
among. The learner scores sequences in the same tiles: before an update ratios are 1, to the bit,
and all rows have the rollout's digests. The reward is a toy, the share of vowels: a plot shows it.
"""

import argparse
from dataclasses import replace
from typing import NamedTuple

import in_process
import jax
import jax.numpy as jnp
import numpy as np

from jax_specdec.device import Compiled, LoopConfig
from jax_specdec.device.drafting import MtpDrafter
from jax_specdec.device.model import load_model, sequence_logprobs
from jax_specdec.engine import LogprobsMode, Request, SamplingParams, byte_tokens
from jax_specdec.export import ColumnBuilder

B, MAX_TOKENS, NUM_DRAFTS, TILE = 16, 24, 1, 32
TEMPERATURE, TOP_P, LEARNING_RATE = 0.9, 0.8, 0.4
PROMPTS = np.stack([byte_tokens.encode(x, start_document=True) for x in ("def ", "The ")])
GROUP, START = B // len(PROMPTS), PROMPTS.shape[1]
LENGTH = START + MAX_TOKENS


class Batch(NamedTuple):
    ids: np.ndarray  # [B, LENGTH]
    behavior: np.ndarray  # [B, MAX_TOKENS], the rollouts' logprobs
    kept: tuple  # kept sets of all tokens but the first
    digests: np.ndarray  # [B, LENGTH - 1, 2], words; 0 in prompts


def requests(mode, seed):
    """Make B requests whose tokens are drawn with seeds of their own."""
    params = SamplingParams(
        max_tokens=MAX_TOKENS, temperature=TEMPERATURE, top_p=TOP_P, logprobs=0,
        logprobs_mode=mode, kept_token_ids=True, row_digest=True,
    )  # fmt: skip
    return [
        Request(id=f"{n:02}", prompt_token_ids=ids, params=replace(params, seed=seed * B + n))
        for n, ids in enumerate(PROMPTS.repeat(GROUP, axis=0))
    ]


def batch_of(columns):
    """Arrange rollouts by sequence and place; none ends early here."""
    order = columns.request_id.argsort()  # an engine's columns have the requests as they came
    places = columns.rows_by_place(LENGTH)[order, 1:]  # -1 in prompts
    rows, width = places[:, START - 1 :], byte_tokens.VOCAB_SIZE  # a fixed one: it compiles once
    ids = np.concatenate([PROMPTS.repeat(GROUP, axis=0), columns.token_id[rows]], axis=1)
    digests = np.where(places >= 0, columns.row_digest[places], 0)
    words = digests.view("<u4").reshape(*digests.shape, 2)  # jax.jit would cut 64 bits
    return Batch(ids, columns.logprob[rows], columns.kept.padded(places, width=width), words)


def loss(params, model, batch, advantages):
    """Compute PPO's clipped surrogate (arXiv 1707.06347), and the ratios: NaN of other logits."""
    logprobs = sequence_logprobs(
        params, model, batch.ids, TEMPERATURE, batch.kept, row_digests=batch.digests
    )
    ratios = jnp.exp(logprobs[:, START - 1 :] - batch.behavior)
    gains = ratios * advantages[:, None], jnp.clip(ratios, 0.8, 1.2) * advantages[:, None]
    return -jnp.mean(jnp.minimum(*gains)), ratios


update = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)


def rewards_of(ids):
    """Compute the share of vowels among the emitted bytes, [B]."""
    return np.isin(ids[:, START:], list(b"aeiou")).mean(axis=1, dtype=np.float32)


def advantages_of(rewards):
    """Compute GRPO's (arXiv 2402.03300): how far rewards are from their group's mean, [B]."""
    groups = rewards.reshape(-1, GROUP)
    above, deviation = groups - groups.mean(1, keepdims=True), groups.std(1, keepdims=True)
    return (above / (deviation + 1e-6)).reshape(B)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--mode", default="processed", choices=["raw", "scaled", "processed"])
    parser.add_argument("--iterations", type=int, default=8)
    options = parser.parse_args()
    params, model = load_model(dtype="float32")
    model, means = replace(model, row_tile=TILE), []
    config = LoopConfig(model, MtpDrafter(model, NUM_DRAFTS), num_slots=B, max_length=LENGTH)
    compiled = Compiled(config)
    for iteration in range(options.iterations):
        builder, drawn = ColumnBuilder(), requests(LogprobsMode[options.mode.upper()], iteration)
        for message in in_process.messages(config, params, drawn, compiled):
            builder.add(message.records)
        batch = batch_of(builder.columns())
        rewards = rewards_of(batch.ids)
        means.append(rewards.mean())
        later = batch._replace(digests=np.zeros_like(batch.digests))  # the weights have moved
        for epoch, rollouts in enumerate((batch, later)):
            gradient, ratios = update(params, model, rollouts, advantages_of(rewards))
            low, high = ratios.min(), ratios.max()
            print(f"{iteration}.{epoch}: {ratios.size} ratios from {low:.3f} to {high:.3f}")
            if epoch == 0 and not (ratios == 1).all():
                raise SystemExit("all must be 1: the rollouts are of another policy")
            params = jax.tree.map(lambda weight, g: weight - LEARNING_RATE * g, params, gradient)
    _, ratios = update(params, model, batch, advantages_of(rewards))
    print(f"rows of other logits, by their digests: {np.isnan(ratios).sum()}; mean rewards:")
    for iteration, mean in enumerate(means):
        print(f"{iteration:4} {mean:.3f} {'#' * round(150 * mean)}")


if __name__ == "__main__":
    main()
