"""A policy trained on rollouts that a fleet of engines makes on a Ray cluster.

    python examples/ray_rollouts.py                          engines on this machine
    python examples/ray_rollouts.py --address HOST:PORT --replicas 8

The fleet delivers batches of columns: tokens, logprobs, kept sets, the weights' version. The
learner, here, scores them again and takes a step; its weights go to all replicas through Ray's
object store. In every batch the importance ratio is checked before anything is learned from it:
rollouts of these very weights have a ratio of 1, to the bit. A lost replica costs nothing but time.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from rl_rollouts import (
    LEARNING_RATE,
    LENGTH,
    NUM_DRAFTS,
    B,
    advantages_of,
    batch_of,
    requests,
    rewards_of,
    update,
)

from jax_specdec.device.model import load_model, named_arrays
from jax_specdec.engine import EngineConfig, LogprobsMode, Serves, byte_tokens
from jax_specdec.ray import RayConfig, RayEngine, columns


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--address", default="", help="of the cluster's head")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--stale", action="store_true", help="a mistake: broadcast no new weights")
    options = parser.parse_args(argv)
    params, model = load_model(dtype="float32")
    model = replace(model, row_tile=EngineConfig.row_tile)
    config = EngineConfig(
        vocab_size=byte_tokens.VOCAB_SIZE, dtype="float32", num_slots=B, max_length=LENGTH,
        num_drafts=NUM_DRAFTS, batch_invariant=True, on_worker_loss="restart", resume_lost=True,
        serves=Serves.of(one.params for one in requests(LogprobsMode.PROCESSED, 0)),
    )  # fmt: skip
    cluster = RayConfig(replicas=options.replicas, address=options.address)
    with RayEngine(config, cluster) as fleet:
        for iteration in range(options.iterations):
            rollouts = columns(list(fleet.generate(requests(LogprobsMode.PROCESSED, iteration))))
            batch = batch_of(rollouts)
            rewards = rewards_of(batch.ids)
            gradient, ratios = update(params, model, batch, advantages_of(rewards))
            log_ratio = float(jnp.abs(jnp.log(ratios)).max())
            print(
                f"iteration {iteration}: weights {np.unique(rollouts.weights_version).tolist()}, "
                f"mean reward {rewards.mean():.3f}, largest |log ratio| of {ratios.size} tokens: "
                f"{log_ratio:.1e}, rows of other logits: {np.isnan(ratios).sum()}",
                flush=True,
            )
            if log_ratio != 0:
                raise SystemExit("it must be 0: the rollouts are of another policy")
            params = jax.tree.map(lambda weight, g: weight - LEARNING_RATE * g, params, gradient)
            if not options.stale:
                fleet.update_weights(named_arrays(params))
        traffic = fleet.traffic
    print(
        f"{traffic['tokens']} tokens came in {traffic['batches']} batches of "
        f"{traffic['bytes'] / traffic['batches'] / 1e3:.1f} kB, after {traffic['calls']} calls"
    )


if __name__ == "__main__":
    main()
