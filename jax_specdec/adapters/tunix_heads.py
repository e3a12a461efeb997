"""The heads of tunix's models, taken off: logprobs of hidden states without logits."""

import dataclasses
import importlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import linear_topk_logprobs

# The models whose head is `embedder.decode` or `lm_head`, applied to the last hidden states alone.
MODELS = tuple(
    f"tunix.models.{name.lower()}.model.{name}"
    for name in ("Gemma", "Gemma3", "Gemma4", "Llama3", "Qwen2", "Qwen3")
)
_CASTING = tuple(name for name in MODELS if name.endswith(("Gemma4", "Qwen2", "Qwen3")))


class Head(NamedTuple):
    """What a model does with its last hidden states."""

    weight: jax.Array  # [V, H] or [H, V]
    axes: str
    dtype: Any  # of the product; None: the larger of the two
    soft_cap: float | None

    @property
    def num_tokens(self) -> int:
        """V."""
        return self.weight.shape[self.axes.index("V")]


def without_head(model: Any) -> tuple[Any, Head]:
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
        part.decode = lambda hidden: hidden
    else:
        model.lm_head = nnx.identity
    return model, Head(weight, "VH" if tied else "HV", dtype, soft_cap)


def linear_logprobs(
    hidden: jax.Array,
    head: Head,
    input_ids: jax.Array,
    temperature: float,
    *,
    entropy: bool = False,
) -> tuple[jax.Array, ...]:
    """`selective_log_softmax` of the logits that the head would make of hidden [..., H].

    Returns:
      Logprobs [...] float32; with `entropy` the entropies too, [...] of the logits' dtype.
    """
    dtype = head.dtype or jnp.result_type(hidden, head.weight)
    rows = hidden.reshape(-1, hidden.shape[-1]).astype(dtype)
    scaled = temperature not in (0.0, 1.0)
    read = linear_topk_logprobs(
        rows,
        head.weight.astype(dtype),
        wrapped(input_ids.reshape(-1), head.num_tokens),
        0,
        temperatures=jnp.full(rows.shape[0], temperature, jnp.float32) if scaled else None,
        soft_cap=head.soft_cap,
        logits_dtype=jnp.dtype(dtype).name,
        head_axes=head.axes,
        entropy=entropy,
    )
    logprobs = read.logprobs[:, 0].reshape(input_ids.shape)
    if read.entropy is None:
        return (logprobs,)
    return logprobs, read.entropy.reshape(input_ids.shape).astype(dtype)


def wrapped(ids: jax.Array, num_tokens: int) -> jax.Array:
    """The ids that `take_along_axis` would read, int32."""
    ids = ids.astype(jnp.int32)
    return jnp.where(ids < 0, ids + num_tokens, ids)
