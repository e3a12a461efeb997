"""Policy gradient on rollouts from speculative decoding, and the check that makes it sound.

    python examples/rl_rollouts.py
    python examples/rl_rollouts.py --mode raw        the classic mistake, and how it is noticed

The rollouts' logprobs must be those of the distribution that the tokens were drawn from: here the
request's own processed mode (temperature and top-p). The learner computes the same from a forward
pass of its own, over whole sequences without drafts, and over the tokens that each was drawn among:
the kept sets of the rollouts. Both compute rows in tiles (`row_tile`), so they have the same bits:
before the first update every ratio is 1, to the bit. The advantages are GRPO's (Shao et al.,
arXiv 2402.03300): rewards less the mean of their prompt's group, over its deviation.

The reward is a toy: the share of vowels. The model is the tiny one that comes with the package.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import in_process
import jax
import jax.numpy as jnp
import numpy as np

from ipc.wire import KEPT_ALL
from jax_specdec.device import Compiled, LoopConfig
from jax_specdec.device.drafting import MtpDrafter
from jax_specdec.device.model import load_model, sequence_logprobs
from jax_specdec.engine import LogprobsMode, Request, SamplingParams, byte_tokens
from jax_specdec.export import ColumnBuilder

B, MAX_TOKENS, NUM_DRAFTS = 16, 24, 1
TEMPERATURE, TOP_P = 0.9, 0.8
LEARNING_RATE = 0.02
TILE = 32  # rows that a product takes at once, here and there
PROMPTS = np.stack([byte_tokens.encode(x, start_document=True) for x in ("def ", "The ")])
GROUP = B // len(PROMPTS)
START = PROMPTS.shape[1]
LENGTH = START + MAX_TOKENS


def requests(mode, seed):
    """Make B requests whose tokens are drawn with seeds of their own."""
    return [
        Request(
            id=f"{seed}.{slot}", prompt_token_ids=tuple(PROMPTS[slot // GROUP].tolist()),
            params=SamplingParams(
                max_tokens=MAX_TOKENS, temperature=TEMPERATURE, top_p=TOP_P, seed=seed * B + slot,
                logprobs=0, logprobs_mode=mode, kept_token_ids=True,
            ),
        )
        for slot in range(B)
    ]  # fmt: skip


def rollouts(config, compiled, params, mode, seed):
    """Roll out B sequences: their columns, one row a token, statistics, and the bits' digest."""
    builder, digests = ColumnBuilder(), set()
    for message in in_process.messages(config, params, requests(mode, seed), compiled):
        builder.add(message.records)
        digests |= {record.digest for record in message.records}
    (digest,) = digests
    return builder.columns(), message.state.statistics, digest


def batch_of(columns):
    """Arrange rollouts as ids [B, LENGTH], logprobs [B, MAX_TOKENS] and padded kept sets."""
    slots = np.array([int(id.split(".")[1]) for id in columns.request_id])
    order = slots.argsort()  # an engine's columns have the requests as they came
    places = columns.rows_by_place(LENGTH)[order, 1:]  # -1 in prompts; no rollout ends early here
    rows = places[:, START - 1 :]
    ids = np.concatenate([PROMPTS.repeat(GROUP, axis=0), columns.token_id[rows]], axis=1)
    # A fixed width: one compiled program serves every batch.
    kept = columns.kept.padded(places, width=byte_tokens.VOCAB_SIZE)
    return ids, columns.logprob[rows], kept


def loss(params, model, ids, behavior, kept, advantages, digest):
    """Compute PPO's clipped surrogate (Schulman et al., arXiv 1707.06347), and the ratios."""
    logprobs = sequence_logprobs(params, model, ids, TEMPERATURE, kept, digest=digest)
    ratios = jnp.exp(logprobs[:, START - 1 :] - behavior)
    gain = advantages[:, None]
    clipped = jnp.clip(ratios, 0.8, 1.2)
    return -jnp.mean(jnp.minimum(ratios * gain, clipped * gain)), ratios


def rewards_of(ids):
    """Compute the share of vowels among the emitted bytes. [B] float32."""
    return np.isin(ids[:, START:], list(b"aeiou")).mean(axis=1, dtype=np.float32)


def advantages_of(rewards):
    """Compute GRPO's: rewards less the mean of their prompt's group, over its deviation. [B]."""
    groups = rewards.reshape(-1, GROUP)
    deviation = groups.std(axis=1, keepdims=True) + 1e-6
    return ((groups - groups.mean(axis=1, keepdims=True)) / deviation).reshape(B)


update = jax.jit(jax.grad(loss, has_aux=True), static_argnums=(1, 6))


@cache
def compiled_loop(model):
    """Make the decoding loop's configuration and programs, once for all rollouts."""
    config = LoopConfig(model, MtpDrafter(model, NUM_DRAFTS), num_slots=B, max_length=LENGTH)
    return config, Compiled(config)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--mode", default="processed", choices=["raw", "scaled", "processed"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    options = parser.parse_args(argv)
    mode, (params, model) = LogprobsMode[options.mode.upper()], load_model(dtype=options.dtype)
    model = replace(model, row_tile=TILE)
    config, compiled = compiled_loop(model)
    for iteration in range(2):
        columns, statistics, digest = rollouts(config, compiled, params, mode, seed=iteration)
        ids, behavior, kept = batch_of(columns)
        rewards = rewards_of(ids)
        advantages = advantages_of(rewards)
        for epoch in range(2):
            gradient, ratios = update(params, model, ids, behavior, kept, advantages, digest)
            if epoch == 0:  # no update yet: rollouts and learner must describe one policy
                log_ratio = jnp.abs(jnp.log(ratios))
                print(
                    f"iteration {iteration}: mean reward {rewards.mean():.3f}, "
                    f"{statistics.acceptance_rate:.0%} of the drafts accepted, "
                    f"ratios of {log_ratio.size} tokens that are not 1: {(ratios != 1).sum()}, "
                    f"largest |log ratio| {log_ratio.max():.1e}"
                )
                if not (ratios == 1).all():
                    raise SystemExit("all must be 1: the rollouts are of another policy")
                all_kept = np.full_like(kept.counts, KEPT_ALL)
                whole = kept._replace(counts=all_kept, log_kept=np.zeros_like(kept.log_kept))
                _, wrong = update(params, model, ids, behavior, whole, advantages, digest)
                print(f"  without the kept sets, the mean ratio would be {wrong.mean():.3f}")
            print(
                f"  epoch {epoch}: importance ratios from {ratios.min():.3f} to {ratios.max():.3f}"
            )
            params = jax.tree.map(lambda weight, g: weight - LEARNING_RATE * g, params, gradient)
    print(f"the last rollout: {byte_tokens.decode(ids[rewards.argmax()][1:])!r}")


if __name__ == "__main__":
    main()
