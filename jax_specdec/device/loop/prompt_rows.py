"""Logprobs of a prompt's positions from their hidden states and the output head.

    raw, scaled                   `linear_topk_logprobs`: a few percent of many logits at a time
    processed, a model of one's   some positions' logits at a time: a cut needs a row's whole
    own, rows in tiles            distribution, such a model gives logits alone, `head` has tiles

Axes: P positions of a chunk, E hidden size, V vocabulary.
"""

import contextlib
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from ipc.wire import LogprobsMode
from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.device.loop.state import LoopConfig
from jax_specdec.device.messages.batch_options import BatchOptions, Widths
from jax_specdec.device.messages.pack import SentRows
from jax_specdec.device.messages.row_logprobs import row_logprobs
from jax_specdec.device.model import llama, own_model
from pallas_kernels import TopkLogprobs, linear_topk_logprobs

PROMPT_LOGITS_BYTES = 32 << 20  # of the float32 logits of some positions


def prompt_rows(
    config: LoopConfig,
    params: Any,
    hidden: Float[Array, "P E"],
    token_ids: Int32[Array, " P"],
    num: Int32[Array, ""],
    extra_token_ids: Int32[Array, "P C"],
    options: Annotated[BatchOptions, "B = 1"],
    widths: Widths,
) -> TopkLogprobs:
    """The logprobs of the first `num` positions, in the mode of the request.

    Args:
      config: of the loop.
      params: the model's.
      hidden: what the decoder gave for them.
      token_ids: the token that each of them predicts.
      num: the positions that count; the others are skipped.
      extra_token_ids: more tokens of each position whose logprobs are wanted, C = widths.chosen.
      options: of the prompt's slot alone.
      widths: its static limits; k must not be None.

    Returns:
      P rows of K = widths.k top columns and C = widths.chosen further logprobs; what they mean is
      said in `row_logprobs`.
    """
    assert widths.k is not None, "a prompt without columns has no logprobs"
    in_tiles = own_model.row_tile(config.model) is not None
    is_linear = widths.mode is not LogprobsMode.PROCESSED and not in_tiles
    if isinstance(config.model, ModelConfig) and is_linear:
        return _linear(
            config, config.model, params, hidden, token_ids, num, extra_token_ids, options, widths
        )
    count = hidden.shape[0]
    most = max(1, PROMPT_LOGITS_BYTES // (4 * own_model.head_columns(config.model)))
    block = -(-count // -(-count // most))
    blocks = -(-count // block)
    spare = blocks * block - count

    def of_block(part: tuple[jax.Array, ...]) -> TopkLogprobs:
        hidden, token_ids, extra, start = part
        logits = own_model.head(params, config.model, hidden)[None]
        remaining = jnp.clip(num - start, 0, block)
        index = jnp.arange(block, dtype=jnp.int32)
        rows = SentRows(jnp.where(index < remaining, index, block), remaining)
        return row_logprobs(
            logits, token_ids[None], rows, options, widths, config.parallel, extra_token_ids=extra
        )

    parts = (
        jnp.pad(hidden, ((0, spare), (0, 0))).reshape(blocks, block, -1),
        jnp.pad(token_ids, (0, spare)).reshape(blocks, block),
        jnp.pad(extra_token_ids, ((0, spare), (0, 0))).reshape(blocks, block, -1),
        block * jnp.arange(blocks, dtype=jnp.int32),
    )
    if blocks == 1:
        return of_block((hidden, token_ids, extra_token_ids, jnp.int32(0)))
    of_blocks = lax.map(of_block, parts)
    results: TopkLogprobs = jax.tree.map(
        lambda x: x.reshape(blocks * block, *x.shape[2:])[:count], of_blocks
    )
    return results


def _linear(
    config: LoopConfig,
    model: ModelConfig,
    params: Any,
    hidden: Float[Array, "P E"],
    token_ids: Int32[Array, " P"],
    num: Int32[Array, ""],
    extra_token_ids: Int32[Array, "P C"],
    options: Annotated[BatchOptions, "B = 1"],
    widths: Widths,
) -> TopkLogprobs:
    count = hidden.shape[0]
    assert widths.k is not None
    temperatures = None
    if widths.mode is not LogprobsMode.RAW:
        is_raw = options.mode == LogprobsMode.RAW
        temperatures = jnp.broadcast_to(
            jnp.where(is_raw, 1.0, options.sampling.temperature), (count,)
        )
    head, axes = llama.unembedding(params)
    # As `llama.project` has it: float32 stays float32.
    exact = jax.default_matmul_precision("highest") if hidden.dtype == jnp.float32 else None
    with exact or contextlib.nullcontext():
        return linear_topk_logprobs(
            llama.before_head(params, model, hidden),
            head,
            token_ids,
            widths.k,
            num_rows=num,
            temperatures=temperatures,
            extra_token_ids=extra_token_ids if widths.chosen else None,
            soft_cap=model.logit_softcap,
            logits_dtype=model.dtype,
            head_axes=axes,
            mesh=config.parallel.mesh,
            axis_name=config.parallel.axis_name,
            vocab_size=model.vocab_size if model.vocab_padding else None,
        )
