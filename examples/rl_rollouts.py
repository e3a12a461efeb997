"""Policy gradient on rollouts from speculative decoding, and the check that makes it sound.

    python examples/rl_rollouts.py
    python examples/rl_rollouts.py --mode raw        the classic mistake, and how it is noticed

The rollouts' logprobs must be those of the distribution that the tokens were drawn from: here the
request's own processed mode (temperature and top-p). The learner computes the same from a forward
pass of its own, over whole sequences without drafts, and over the tokens that each was drawn among:
the kept sets of the rollouts. |log ratio| <= 1e-4 says that both describe one policy.

The reward is a toy: the share of vowels. The model is the tiny one that comes with the package.
"""

import argparse
from collections.abc import Sequence
from functools import cache

import in_process
import jax
import jax.numpy as jnp
import numpy as np

from ipc.wire import KEPT_ALL
from jax_specdec.device import Compiled, LoopConfig, learner_logprobs
from jax_specdec.device.drafting import MtpDrafter
from jax_specdec.device.model import init_cache, llama, load_model
from jax_specdec.engine import LogprobsMode, Request, SamplingParams, byte_tokens
from jax_specdec.export import ColumnBuilder

B, MAX_TOKENS, NUM_DRAFTS = 16, 24, 1
TEMPERATURE, TOP_P = 0.9, 0.8
LEARNING_RATE = 0.02
CLOSE = 1e-4  # what two forward passes of different shapes may differ by, on a CPU
PROMPT = tuple(byte_tokens.encode("def ", start_document=True).tolist())
LENGTH = len(PROMPT) + MAX_TOKENS


def requests(mode, seed):
    """Make B requests whose tokens are drawn with seeds of their own."""
    return [
        Request(
            id=f"{seed}.{slot}", prompt_token_ids=PROMPT,
            params=SamplingParams(
                max_tokens=MAX_TOKENS, temperature=TEMPERATURE, top_p=TOP_P, seed=seed * B + slot,
                logprobs=0, logprobs_mode=mode, kept_token_ids=True,
            ),
        )
        for slot in range(B)
    ]  # fmt: skip


def rollouts(config, compiled, params, mode, seed):
    """Roll out B sequences: their columns, one row a token, and statistics."""
    builder = ColumnBuilder()
    for message in in_process.messages(config, params, requests(mode, seed), compiled):
        builder.add(message.records)
    return builder.columns(), message.state.statistics


def batch_of(columns):
    """Arrange rollouts as ids [B, LENGTH], logprobs [B, MAX_TOKENS] and padded kept sets."""
    rows = columns.rows_by_place(LENGTH)[:, len(PROMPT) :]  # no rollout ends early here
    ids = np.concatenate([np.tile(np.int32(PROMPT), (B, 1)), columns.token_id[rows]], axis=1)
    # A fixed width: one compiled program serves every batch.
    kept = columns.kept.padded(rows, width=byte_tokens.VOCAB_SIZE)
    return ids, columns.logprob[rows], kept


def policy_logprobs(params, model, ids, kept):
    """Compute the emitted tokens' logprobs [B, MAX_TOKENS] over their kept sets."""
    places = jnp.broadcast_to(jnp.arange(LENGTH - 1, dtype=jnp.int32), (B, LENGTH - 1))
    hidden, _ = llama.forward(params, model, ids[:, :-1], places, init_cache(model, B, LENGTH))
    # A row a token. Of the logits, only those of the kept tokens ever exist.
    head = params.embedding if params.head is None else params.head.T
    states, tokens = hidden[:, len(PROMPT) - 1 :], ids[:, len(PROMPT) :]
    return learner_logprobs(states, head, tokens, kept, TEMPERATURE, logits_dtype=hidden.dtype.name)


def loss(params, model, ids, behavior, kept, advantages):
    """Compute PPO's clipped surrogate (Schulman et al., arXiv 1707.06347), and the ratios."""
    ratios = jnp.exp(policy_logprobs(params, model, ids, kept) - behavior)
    gain = advantages[:, None]
    clipped = jnp.clip(ratios, 0.8, 1.2)
    return -jnp.mean(jnp.minimum(ratios * gain, clipped * gain)), ratios


def rewards_of(ids):
    """Compute the share of vowels among the emitted bytes. [B] float32."""
    return np.isin(ids[:, len(PROMPT) :], list(b"aeiou")).mean(axis=1, dtype=np.float32)


update = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)


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
    config, compiled = compiled_loop(model)
    for iteration in range(2):
        columns, statistics = rollouts(config, compiled, params, mode, seed=iteration)
        ids, behavior, kept = batch_of(columns)
        rewards = rewards_of(ids)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for epoch in range(2):
            gradient, ratios = update(params, model, ids, behavior, kept, advantages)
            if epoch == 0:  # no update yet: rollouts and learner must describe one policy
                log_ratio = jnp.abs(jnp.log(ratios))
                print(
                    f"iteration {iteration}: mean reward {rewards.mean():.3f}, "
                    f"{statistics.acceptance_rate:.0%} of the drafts accepted, "
                    f"largest |log ratio| of {log_ratio.size} tokens: {log_ratio.max():.1e}"
                )
                if not log_ratio.max() <= CLOSE:
                    raise SystemExit(f"it must be <= {CLOSE}: the rollouts are of another policy")
                all_kept = np.full_like(kept.counts, KEPT_ALL)
                whole = kept._replace(counts=all_kept, log_kept=np.zeros_like(kept.log_kept))
                _, wrong = update(params, model, ids, behavior, whole, advantages)
                print(f"  without the kept sets, the mean ratio would be {wrong.mean():.3f}")
            print(
                f"  epoch {epoch}: importance ratios from {ratios.min():.3f} to {ratios.max():.3f}"
            )
            params = jax.tree.map(lambda weight, g: weight - LEARNING_RATE * g, params, gradient)
    print(f"the last rollout: {byte_tokens.decode(ids[rewards.argmax()][1:])!r}")


if __name__ == "__main__":
    main()
