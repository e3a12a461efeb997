"""Losses of the tiny model's decoder and of its MTP head, and how often its drafts are accepted.

Training and `--check` of `train_tiny_model.py` both use these.
"""

from __future__ import annotations

import in_process
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_specdec.device import LoopConfig
from jax_specdec.device.drafting import MtpDrafter
from jax_specdec.device.model import LayerParams, ModelConfig, ModelParams, llama, mtp
from jax_specdec.engine import Request, SamplingParams, byte_tokens

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
        return llama.attention(q, k, v, causal, config), None

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
        return llama.attention(q, k, v, visible, config), None

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
    drafter = MtpDrafter(config, num_drafts=1)
    loop = LoopConfig(config, drafter, num_slots=num_prompts, max_length=prompt_length + generated)
    asked = SamplingParams(max_tokens=generated, stop_token_ids=(byte_tokens.EOS_ID,))
    starts = np.linspace(0, len(ids) - prompt_length, num_prompts).astype(int)
    requests = [
        Request(id=str(at), prompt_token_ids=ids[at : at + prompt_length], params=asked)
        for at in starts
    ]
    *_, last = in_process.messages(loop, params, requests)
    return float(last.state.statistics.acceptance_rate)
