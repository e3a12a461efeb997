"""The multi-token prediction head: one more layer that guesses the token after the next.

At position i it joins the decoder's hidden state h_i with the embedding of token i+1 and predicts
token i+2. For longer drafts it is fed its own output: hidden state h'_i and drafted token i+2 at
position i+1 predict token i+3, and so on. Embedding and output head are the decoder's. Its layer
sees all positions.

The hidden state is the one after the decoder's final norm. Where the configuration says
`norm_in_head` it is the one before, as MiMo has it in the code that Xiaomi gave to vLLM.

Source: DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.2; the recursion of one head is
that of EAGLE, https://arxiv.org/abs/2401.15077.
"""

from __future__ import annotations

from typing import Annotated

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.device.model.arithmetic import matmul
from jax_specdec.device.model.llama import cached_layers, check_step, embed, norm
from jax_specdec.device.model.params import KVCache, ModelParams, MtpParams


def mtp_forward(
    params: ModelParams,
    config: ModelConfig,
    hidden: Float[Array, "B S E"],
    next_tokens: Int32[Array, "B S"],
    positions: Int32[Array, "B S"],
    mtp_cache: Annotated[KVCache, "B = C"],
    slot: Int32[Array, ""] | None = None,
) -> tuple[Float[Array, "B S E"], Annotated[KVCache, "B = C"]]:
    """Predict two tokens ahead; the cache rules are those of `llama.forward`.

    Args:
      hidden: the decoder's hidden states (or this function's, to draft further) at `positions`.
      next_tokens: the tokens at positions + 1.
      positions: < 0 or >= T is padding.
      mtp_cache: one layer, B slots of T positions, from `params.init_mtp_cache`.
      slot: as in `llama.forward`.

    Returns:
      Hidden states, whose `llama.project` predicts the tokens at positions + 2, and the new cache.
      An entry made from a drafted hidden state is overwritten once the real one is known: the
      caller runs the accepted positions again with the decoder's hidden states.

    Raises:
      ValueError: a model without an MTP head, or shapes that do not fit.
    """
    mtp = mtp_params(params)
    check_step(config, next_tokens, positions, mtp_cache, config.num_mtp_layers, slot)
    expected = (*next_tokens.shape, config.hidden_size)
    if hidden.shape != expected:
        raise ValueError(f"hidden must be [B, S, E] = {expected}: it is {hidden.shape}")
    x = mtp_inputs(params, config, hidden, next_tokens)
    x, mtp_cache = cached_layers(mtp.layers, config, x, positions, mtp_cache, slot)
    return norm(config, x, mtp.final_norm), mtp_cache


def mtp_params(params: ModelParams) -> MtpParams:
    """The head's weights, or a clear error for a model that has none."""
    if params.mtp is None:
        raise ValueError("this model has no MTP head: choose another drafter, or none")
    return params.mtp


def mtp_inputs(
    params: ModelParams,
    config: ModelConfig,
    hidden: Float[Array, "B S E"],
    next_tokens: Int32[Array, "B S"],
) -> Float[Array, "B S E"]:
    """The layer's input: hidden states and embeddings of the next tokens, normed and projected."""
    mtp = mtp_params(params)
    tokens = embed(params, config, next_tokens)
    joined = jnp.concatenate(
        [
            norm(config, hidden, mtp.hidden_norm),
            norm(config, tokens, mtp.token_norm),
        ],
        axis=-1,
    )
    return matmul(joined, mtp.projection)
