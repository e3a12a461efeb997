"""Train the tiny byte-level model that comes with the package, or check the shipped weights.

    python examples/train_tiny_model.py --output tiny.safetensors    (a quarter of an hour)
    python examples/train_tiny_model.py --check                      (half a minute)

The decoder learns the next byte; its MTP head learns the byte after (DeepSeek-V3,
https://arxiv.org/abs/2412.19437), and, fed its own output, one byte more. Seeded throughout.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tiny_corpus
import tiny_evaluation

from jax_specdec.device.model import (
    ModelConfig,
    ModelParams,
    init_params,
    load_checkpoint,
    save_checkpoint,
    tiny_weights_path,
)
from jax_specdec.engine import byte_tokens

CONFIG = ModelConfig(
    vocab_size=byte_tokens.VOCAB_SIZE, hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2,
    head_dim=32, intermediate_size=384, num_mtp_layers=1,
)  # fmt: skip
DRAFT_WEIGHT = (0.3, 0.1)  # of the drafts' losses, beside the decoder's
TOLERANCE = 0.02  # relative, of losses


@cache
def make_step(
    config: ModelConfig, num_steps: int, peak_rate: float
) -> Callable[[Any, jax.Array], tuple[Any, jax.Array]]:
    """Make a step of AdamW (https://arxiv.org/abs/1711.05101): state, ids -> state, losses.

    The state is (params, first moments, second moments, step). Warm-up, then a cosine to a
    twentieth; gradients clipped to norm 1; no decay for norms.
    """
    beta1, beta2, decay, warm_up = 0.9, 0.95, 0.1, min(100, num_steps // 10 + 1)
    weights = jnp.array((1.0, *DRAFT_WEIGHT), jnp.float32)

    def objective(params: ModelParams, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        each = tiny_evaluation.losses(params, config, ids)
        return jnp.sum(weights * each), each

    @partial(jax.jit, donate_argnums=0)
    def step(state: Any, ids: jax.Array) -> tuple[Any, jax.Array]:
        params, first, second, count = state
        (_, each), gradient = jax.value_and_grad(objective, has_aux=True)(params, ids)
        count = count + 1
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradient)))
        gradient = jax.tree.map(lambda g: g / jnp.maximum(1.0, norm), gradient)
        first = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, first, gradient)
        second = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g * g, second, gradient)
        progress = jnp.clip((count - warm_up) / max(1, num_steps - warm_up), 0.0, 1.0)
        cosine = 0.05 + 0.95 * 0.5 * (1 + jnp.cos(jnp.pi * progress))
        rate = peak_rate * jnp.minimum(count / warm_up, 1.0) * cosine
        correct1, correct2 = 1 - beta1**count, 1 - beta2**count

        def update(name: Any, p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            change = (m / correct1) / (jnp.sqrt(v / correct2) + 1e-8)
            shrink = 0.0 if name[-1].name.endswith("norm") else decay
            new: jax.Array = p - rate * (change + shrink * p)
            return new

        params = jax.tree_util.tree_map_with_path(update, params, first, second)
        return (params, first, second, count), each

    return step


def train(config: ModelConfig, ids: np.ndarray, args: argparse.Namespace) -> ModelParams:
    """Train on random windows of ids [N]."""
    rng = np.random.default_rng(args.seed)
    params = init_params(config, jax.random.key(args.seed))
    zeros = jax.tree.map(jnp.zeros_like, params)
    state = (params, zeros, jax.tree.map(jnp.zeros_like, params), jnp.float32(0))
    step = make_step(config, args.steps, args.rate)
    window = np.arange(args.sequence + tiny_evaluation.DRAFT_DEPTH + 1)
    began, recent = time.monotonic(), []
    for number in range(1, args.steps + 1):
        starts = rng.integers(0, len(ids) - len(window), args.batch)
        state, each = step(state, jnp.asarray(ids[starts[:, None] + window[None, :]]))
        recent.append(each)
        if number % args.report == 0 or number == args.steps:
            mean = np.mean(jax.device_get(recent), axis=0)
            recent = []
            print(
                f"step {number}/{args.steps}  {time.monotonic() - began:.0f} s  nats/byte: "
                f"decoder {mean[0]:.3f}, " + ", ".join(f"draft {x:.3f}" for x in mean[1:]),
                flush=True,
            )
    return state[0]


def check(args: argparse.Namespace, held_out: np.ndarray) -> int:
    """Evaluate a checkpoint and compare with the figures in its metadata; 0 if they agree."""
    params, config, metadata = load_checkpoint(args.weights)
    recorded = json.loads(metadata["held_out"])
    sequence = int(json.loads(metadata["training"])["sequence"])
    measured = tiny_evaluation.evaluate(params, config, held_out, sequence)
    failed = False
    for name, value in measured.items():
        wrong = abs(value - recorded[name]) > TOLERANCE * recorded[name]
        failed |= wrong
        print(f"{name}: {value:.4f}, recorded {recorded[name]:.4f}{'  DIFFERS' if wrong else ''}")
    return int(failed)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--check", action="store_true", help="evaluate --weights on held-out text, train nothing")
    add("--write-corpus", action="store_true", help="write --corpus from --library, train nothing")
    add("--corpus", type=Path, default=here / "tiny_corpus.txt", help="list of files with hashes")
    add("--library", dest="libraries", type=Path, action="append",
        help="standard library directory (several with --write-corpus: only files that are the "
        "same in all)")  # fmt: skip
    add("--weights", type=Path, default=tiny_weights_path(), help="for --check")
    add("--output", type=Path, default=Path("tiny.safetensors"), help="file to write")
    add("--steps", type=int, default=2000)
    add("--batch", type=int, default=8, help="windows per step")
    add("--sequence", type=int, default=256, help="bytes per window")
    add("--rate", type=float, default=3e-3, help="peak learning rate")
    add("--seed", type=int, default=0)
    add("--report", type=int, default=50, help="steps between reports")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Train, check, or write a list of files; returns the exit status."""
    args = parse(argv)
    libraries = args.libraries or [tiny_corpus.standard_library()]
    if args.write_corpus:
        tiny_corpus.write_list(args.corpus, tiny_corpus.make_list(libraries))
        print(f"wrote {args.corpus}")
        return 0
    try:
        entries = tiny_corpus.read_list(args.corpus)
        held_out = tiny_corpus.load(entries, "held-out", libraries[0])
        if args.check:
            return check(args, held_out)
        text = tiny_corpus.load(entries, "train", libraries[0])
    except tiny_corpus.CorpusError as error:
        print(error, file=sys.stderr)
        return 2
    print(
        f"{CONFIG.num_parameters} weights, {len(text)} bytes to train on, {len(held_out)} held out"
    )
    params = train(CONFIG, text, args)
    # Evaluate the weights as they are stored, in float16.
    stored = jax.tree.map(lambda x: x.astype(jnp.float16).astype(jnp.float32), params)
    held = tiny_evaluation.evaluate(stored, CONFIG, held_out, args.sequence)
    for name, value in held.items():
        print(f"held-out {name}: {value:.4f}")
    settings = {k: getattr(args, k) for k in ("steps", "batch", "sequence", "rate", "seed")}
    save_checkpoint(
        args.output, params, CONFIG, storage_dtype="float16",
        metadata={
            "held_out": json.dumps(held),
            "training": json.dumps(settings),
            "corpus": tiny_corpus.digest(entries),
            "jax": jax.__version__,
        },
    )  # fmt: skip
    print(f"wrote {args.output}, {args.output.stat().st_size / 2**20:.2f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
