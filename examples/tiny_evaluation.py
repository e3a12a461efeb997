"""Losses of the tiny model's decoder and of its MTP head, and how often its drafts are accepted.

Training and `--check` of `train_tiny_model.py` both use these.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_specdec.device.model import (
    LayerParams,
    ModelConfig,
    ModelParams,
    init_cache,
    init_mtp_cache,
    llama,
    mtp,
)
from jax_specdec.engine import byte_tokens

DRAFT_DEPTH = 2  # drafts that the MTP head is trained for


def sequence_hidden(
    params: ModelParams, config: ModelConfig, ids: jax.Array, depth: int
) -> list[jax.Array]:
    """Run ids [B, S + depth] without a cache: hidden states [B, S, D] for each of 0..depth.

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
    hidden = [llama.norm(config, x, params.final_norm)]
    # Draft n starts from position i of draft n-1 and stands at position i+n-1. As in decoding, it
    # sees the entries 0..i made from the decoder's states, and what its own chain left behind.
    keys: list[jax.Array] = []
    values: list[jax.Array] = []

    def chain(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
        keys.append(k)
        values.append(v)
        visible = jnp.concatenate([causal] + [own] * (len(keys) - 1), axis=-1)
        k, v = jnp.concatenate(keys, 1), jnp.concatenate(values, 1)
        return llama.attention(q, k, v, visible), None

    for n in range(1, depth + 1):
        mtp_layers = mtp.mtp_params(params)
        layer = jax.tree.map(lambda leaf: leaf[0], mtp_layers.layers)
        x = mtp.mtp_inputs(params, config, hidden[-1], ids[:, n : n + s])
        x, _ = llama.decoder_layer(layer, config, x, positions + (n - 1), chain)
        hidden.append(llama.norm(config, x, mtp_layers.final_norm))
    return hidden


def losses(params: ModelParams, config: ModelConfig, ids: jax.Array) -> jax.Array:
    """Compute mean nats a byte [1 + DRAFT_DEPTH], decoder first; ids [B, S + DRAFT_DEPTH + 1]."""
    s = ids.shape[1] - DRAFT_DEPTH - 1
    result = []
    for n, hidden in enumerate(sequence_hidden(params, config, ids[:, :-1], DRAFT_DEPTH)):
        logprobs = jax.nn.log_softmax(llama.logits(params, config, hidden))
        target = ids[:, n + 1 : n + 1 + s, None]
        result.append(-jnp.mean(jnp.take_along_axis(logprobs, target, axis=-1)))
    return jnp.stack(result)


def evaluate(
    params: ModelParams, config: ModelConfig, ids: np.ndarray, sequence: int
) -> dict[str, float]:
    """Compute losses (nats/byte) over all whole windows of held-out ids, and acceptance."""
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
    """Measure the share of the MTP head's first drafts accepted in greedy speculative decoding.

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
    """Decode greedily: tokens [B, generated], and the MTP head's guess of each one's successor."""
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
