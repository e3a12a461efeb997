"""The head of MaxText's `Transformer`, taken off."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_specdec.adapters.heads import ModelHead


def check_model(model: Any) -> None:
    """Refuse what the model's head does and the adapter does not, by name."""
    config = model.config
    changed = config.normalize_embedding_logits or config.final_logits_soft_cap
    refused = {
        "quantization": getattr(model, "quant", None) is not None,
        "shard_mode=explicit": getattr(config.shard_mode, "value", "auto") == "explicit",
        "mtp_num_layers": config.mtp_num_layers > 0,
        "num_vocab_tiling": config.num_vocab_tiling > 1,
        "parameter_memory_host_offload": config.parameter_memory_host_offload,
        "normalize_embedding_logits or final_logits_soft_cap without logits_dot_in_fp32": (
            config.logits_via_embedding and changed and not config.logits_dot_in_fp32
        ),
    }
    if names := [name for name, applies in refused.items() if applies]:
        raise NotImplementedError(
            f"the teacher's top K logits with {', '.join(names)}: change the setting, or use "
            "MaxText's own teacher_step"
        )


def hidden_and_head(model: Any, **inputs: Any) -> tuple[jax.Array, ModelHead]:
    """The last hidden states of MaxText's `Transformer`, and its head, in the product's dtype.

    The head is left out of the model that is given.
    """
    config, decoder = model.config, model.decoder
    # Its "logits" are the last hidden states.
    decoder.apply_output_head = _hidden
    hidden = decoder.decoder_norm(model(**inputs))
    dtype = jnp.dtype("float32" if config.logits_dot_in_fp32 else config.dtype)
    precision = getattr(config.matmul_precision, "value", config.matmul_precision)
    if not config.logits_via_embedding:
        weight = decoder.logits_dense.kernel[...].astype(dtype)
        return hidden.astype(dtype), ModelHead(weight, "HV", dtype, None, precision=precision)
    # MaxText's `attend_on_embedding` rounds the table so.
    weight = model.token_embedder.embedding[...].astype(jnp.bfloat16)
    product = jnp.result_type(hidden, weight)
    scale = hidden.shape[-1] ** -0.5 if config.normalize_embedding_logits else 1.0
    soft_cap = config.final_logits_soft_cap or None
    head = ModelHead(weight.astype(product), "VH", dtype, soft_cap, scale, precision)
    return hidden.astype(product), head


def _hidden(embedder: Any, hidden: jax.Array, deterministic: bool, mode: str) -> jax.Array:
    return hidden
