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
from jax import lax

from jax_specdec.device.model import (
    LayerParams,
    ModelConfig,
    ModelParams,
    init_cache,
    init_mtp_cache,
    init_params,
    llama,
    load_checkpoint,
    mtp,
    save_checkpoint,
    tiny_weights_path,
)
from jax_specdec.engine import byte_tokens

CONFIG = ModelConfig(
    vocab_size=byte_tokens.VOCAB_SIZE, hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2,
    head_dim=32, intermediate_size=384, num_mtp_layers=1,
)  # fmt: skip
DRAFT_DEPTH = 2  # drafts that the MTP head is trained for
DRAFT_WEIGHT = (0.3, 0.1)  # of their losses
TOLERANCE = 0.02  # relative, of losses


def sequence_hidden(
    params: ModelParams, config: ModelConfig, ids: jax.Array, depth: int
) -> list[jax.Array]:
    """Cache-free forward pass over ids [B, S + depth]: for 0..depth, hidden states [B, S, D].

    Element 0 is the decoder's, whose position i predicts token i+1; element n is the n-th
    draft's, whose position i predicts token i+1+n.
    """
    b, s = ids.shape[0], ids.shape[1] - depth
    positions = jnp.broadcast_to(jnp.arange(s, dtype=jnp.int32), (b, s))
    causal = jnp.broadcast_to(jnp.tri(s, dtype=bool), (b, s, s))
    own = jnp.broadcast_to(jnp.eye(s, dtype=bool), (b, s, s))

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
        return llama.attention(q, k, v, causal), None

    def body(x: jax.Array, layer: LayerParams) -> tuple[jax.Array, None]:
        return llama.decoder_layer(layer, config, x, positions, attend)

    # Unrolled: on CPU the gradient of a loop takes twice as long as that of straight code.
    x, _ = lax.scan(body, llama.embed(params, config, ids[:, :s]), params.layers, unroll=True)
    hidden = [llama.rms_norm(x, params.final_norm, config.norm_eps)]
    # Draft n starts from position i of draft n-1 and stands at position i+n-1. As in decoding, it
    # sees the entries 0..i made from the decoder's states, and what its own chain left behind.
    keys: list[jax.Array] = []
    values: list[jax.Array] = []

    def chain(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
        keys.append(k)
        values.append(v)
        visible = jnp.concatenate([causal] + [own] * (len(keys) - 1), axis=-1)
        return llama.attention(
            q, jnp.concatenate(keys, 1), jnp.concatenate(values, 1), visible
        ), None

    for n in range(1, depth + 1):
        mtp_layers = mtp.mtp_params(params)
        layer = jax.tree.map(lambda leaf: leaf[0], mtp_layers.layers)
        x = mtp.mtp_inputs(params, config, hidden[-1], ids[:, n : n + s])
        x, _ = llama.decoder_layer(layer, config, x, positions + (n - 1), chain)
        hidden.append(llama.rms_norm(x, mtp_layers.final_norm, config.norm_eps))
    return hidden


def losses(params: ModelParams, config: ModelConfig, ids: jax.Array) -> jax.Array:
    """Mean nats per byte [1 + DRAFT_DEPTH]: decoder, drafts; ids [B, S + DRAFT_DEPTH + 1]."""
    s = ids.shape[1] - DRAFT_DEPTH - 1
    result = []
    for n, hidden in enumerate(sequence_hidden(params, config, ids[:, :-1], DRAFT_DEPTH)):
        logprobs = jax.nn.log_softmax(llama.logits(params, config, hidden))
        target = ids[:, n + 1 : n + 1 + s, None]
        result.append(-jnp.mean(jnp.take_along_axis(logprobs, target, axis=-1)))
    return jnp.stack(result)


@cache
def make_step(
    config: ModelConfig, num_steps: int, peak_rate: float
) -> Callable[[Any, jax.Array], tuple[Any, jax.Array]]:
    """One step of AdamW (https://arxiv.org/abs/1711.05101): state, ids -> state, losses.

    The state is (params, first moments, second moments, step). Warm-up, then a cosine to a
    twentieth; gradients clipped to norm 1; no decay for norms.
    """
    beta1, beta2, decay, warm_up = 0.9, 0.95, 0.1, min(100, num_steps // 10 + 1)
    weights = jnp.array((1.0, *DRAFT_WEIGHT), jnp.float32)

    def objective(params: ModelParams, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        each = losses(params, config, ids)
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
    window = np.arange(args.sequence + DRAFT_DEPTH + 1)
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


def evaluate(
    params: ModelParams, config: ModelConfig, ids: np.ndarray, sequence: int
) -> dict[str, float]:
    """Losses (nats/byte) over all whole windows of held-out ids, and greedy acceptance."""
    size = sequence + DRAFT_DEPTH + 1
    windows = ids[: len(ids) // size * size].reshape(-1, size)
    run = jax.jit(losses, static_argnums=1)
    parts = [windows[i : i + 32] for i in range(0, len(windows), 32)]
    each = np.average(
        [run(params, config, jnp.asarray(part)) for part in parts],
        axis=0,
        weights=[len(part) for part in parts],
    )
    names = ["decoder_loss"] + [f"draft_{n + 1}_loss" for n in range(DRAFT_DEPTH)]
    result = {name: float(value) for name, value in zip(names, each, strict=True)}
    return result | {"mtp_acceptance": acceptance(params, config, ids)}


def acceptance(
    params: ModelParams,
    config: ModelConfig,
    ids: np.ndarray,
    num_prompts: int = 64,
    prompt_length: int = 96,
    generated: int = 96,
) -> float:
    """Share of the MTP head's first drafts accepted in greedy speculative decoding.

    Prompts are spread evenly over the held-out ids; the decoder continues each greedily, and one
    draft is made per step, so that an accepted draft moves a step by two tokens. After an
    end-of-document id a continuation does not count.
    """
    starts = np.linspace(0, len(ids) - prompt_length, num_prompts).astype(int)
    prompts = jnp.asarray(ids[starts[:, None] + np.arange(prompt_length)[None, :]])
    emitted, drafted = jax.device_get(
        jax.jit(_decode, static_argnums=(1, 3))(params, config, prompts, generated)
    )
    proposed = accepted = 0
    for row_emitted, row_drafted in zip(emitted, drafted, strict=True):
        at = 0  # the draft made together with token `at` is for token at + 1
        while at + 1 < generated and row_emitted[at] != byte_tokens.EOS_ID:
            hit = row_drafted[at] == row_emitted[at + 1]
            proposed, accepted = proposed + 1, accepted + int(hit)
            at += 1 + int(hit)
    return accepted / max(1, proposed)


def _decode(
    params: ModelParams, config: ModelConfig, prompts: jax.Array, generated: int
) -> tuple[jax.Array, jax.Array]:
    """Greedy tokens [B, generated] and the MTP head's guess of each one's successor."""
    b, length = prompts.shape
    total = length + generated
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (b, length))
    hidden, cache = llama.forward(params, config, prompts, positions, init_cache(config, b, total))
    _, mtp_cache = mtp.mtp_forward(
        params, config, hidden[:, :-1], prompts[:, 1:], positions[:, :-1],
        init_mtp_cache(config, b, total),
    )  # fmt: skip

    def body(carry: Any, position: jax.Array) -> tuple[Any, tuple[jax.Array, jax.Array]]:
        hidden, cache, mtp_cache = carry  # hidden [B, 1, D] at `position`
        here = jnp.broadcast_to(position, (b, 1))
        token = jnp.argmax(llama.logits(params, config, hidden), axis=-1).astype(jnp.int32)
        guess, mtp_cache = mtp.mtp_forward(params, config, hidden, token, here, mtp_cache)
        draft = jnp.argmax(llama.logits(params, config, guess), axis=-1)
        hidden, cache = llama.forward(params, config, token, here + 1, cache)
        return (hidden, cache, mtp_cache), (token[:, 0], draft[:, 0])

    where = jnp.arange(length - 1, total - 1, dtype=jnp.int32)
    _, (emitted, drafted) = lax.scan(body, (hidden[:, -1:], cache, mtp_cache), where)
    return emitted.T, drafted.T


def check(args: argparse.Namespace, held_out: np.ndarray) -> int:
    """Evaluate a checkpoint and compare with what its metadata says; 0 if they agree."""
    params, config, metadata = load_checkpoint(args.weights)
    recorded = json.loads(metadata["held_out"])
    measured = evaluate(params, config, held_out, int(json.loads(metadata["training"])["sequence"]))
    failed = False
    for name, value in measured.items():
        wrong = abs(value - recorded[name]) > TOLERANCE * recorded[name]
        failed |= wrong
        print(f"{name}: {value:.4f}, recorded {recorded[name]:.4f}{'  DIFFERS' if wrong else ''}")
    return int(failed)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command-line arguments."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
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
    # Judged as stored, not as trained.
    stored = jax.tree.map(lambda x: x.astype(jnp.float16).astype(jnp.float32), params)
    held = evaluate(stored, CONFIG, held_out, args.sequence)
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
