"""The heads of tunix's models, taken off."""

import dataclasses
import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp

from jax_specdec.adapters.heads import ModelHead

# The models whose head is `embedder.decode` or `lm_head`, applied to the last hidden states alone.
MODELS = tuple(
    f"tunix.models.{name.lower()}.model.{name}"
    for name in ("Gemma", "Gemma3", "Gemma4", "Llama3", "Qwen2", "Qwen3")
)
_CASTING = tuple(name for name in MODELS if name.endswith(("Gemma4", "Qwen2", "Qwen3")))


def without_head(model: Any) -> tuple[Any, ModelHead]:
    """The model, whose results are now its last hidden states, and its head."""
    nnx = importlib.import_module("flax.nnx")
    name = f"{type(model).__module__}.{type(model).__qualname__}"
    if name not in MODELS:
        raise NotImplementedError(f"the head of {name}; served are {', '.join(MODELS)}")
    config = model.config
    tied = getattr(config, "use_tied_embedding", getattr(config, "weight_tying", True))
    part = model.embedder if tied else model.lm_head
    if nnx.state(part, nnx.LoRAParam):
        raise NotImplementedError(f"LoRA in the head of {name}: call tunix's own")
    weight = (part.input_embedding if tied else part.w)[...]
    dtype = config.dtype if name in _CASTING else None
    soft_cap = getattr(config, "final_logit_softcap", None)
    if soft_cap is not None:
        product = dtype or jnp.result_type(weight)
        if product != jnp.float32:
            raise NotImplementedError(f"the soft cap of {name} in {product}: float32 is served")
        # It stands behind the head, where hidden states pass now.
        model.config = dataclasses.replace(config, final_logit_softcap=None)
        model.final_logits_softcap = None
    if tied:
        part.decode = _unchanged  # always the same function: nnx.jit compares it
    else:
        model.lm_head = _no_head()()
    return model, ModelHead(weight, "VH" if tied else "HV", dtype, soft_cap)


@functools.cache
def _no_head() -> Any:
    """A class of modules that do nothing: the place of a head is a module's."""
    nnx = importlib.import_module("flax.nnx")

    class NoHead(nnx.Module):  # type: ignore[name-defined]
        def __call__(self, hidden: jax.Array) -> jax.Array:
            return hidden

    return NoHead


def _unchanged(hidden: jax.Array) -> jax.Array:
    return hidden
