"""MaxText: a teacher's top K logits for distillation, from hidden states instead of logits.

What differs is on the page `docs/maxtext.md`.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_specdec.adapters.proved import check_functions, compare
from jax_specdec.adapters.replacing import replaced
from pallas_kernels import linear_topk_logprobs

NAME = "maxtext"
_SCRIPT = "maxtext.trainers.post_train.distillation.save_top_k_teacher_logits"
FUNCTIONS = (f"{_SCRIPT}:teacher_step", f"{_SCRIPT}:get_top_k_logits")  # to be proved


@contextmanager
def install() -> Iterator[tuple[str, ...]]:
    """`teacher_step` in the place of that of `save_top_k_teacher_logits`, until the `with` ends.

    Yields:
      The full names that were replaced.

    Raises:
      ImportError: MaxText is not installed, or a function of it is not one that was proved, or
        gives another result than ours on eight rows. Nothing was changed.
    """
    check_functions(NAME, FUNCTIONS)
    _compare()
    with replaced("maxtext", {FUNCTIONS[0]: teacher_step}) as names:
        yield names


def _compare() -> None:
    """Refuse another top K: that of logits [2, 4, V], and ours of what makes them."""
    hidden_key, head_key = jax.random.split(jax.random.key(0))
    hidden, head = jax.random.normal(hidden_key, (2, 4, 8)), jax.random.normal(head_key, (40, 8))
    theirs = importlib.import_module(_SCRIPT).get_top_k_logits
    compare(
        NAME, FUNCTIONS[1], lambda: theirs(hidden @ head.T, k=3),
        lambda: top_k_logits(hidden, head, 3),
    )  # fmt: skip


def teacher_step(model: Any, batch: dict[str, jax.Array], k: int) -> tuple[jax.Array, jax.Array]:
    """A forward pass of the teacher and its top K logits; logits [B, S, V] never exist.

    Args:
      model: MaxText's `Transformer`.
      batch: `inputs`, `inputs_position` and, where there are any, `inputs_segmentation`: [B, S]
        int32.
      k: K, up to 512.

    Returns:
      Logits [B, S, K] of the model's dtype, largest first, and their ids, [B, S, K] int32.

    Raises:
      NotImplementedError: a setting of the model that cannot be served; the message names it.
    """
    _check(model)
    graphdef, state = importlib.import_module("flax.nnx").split(model)
    found: tuple[jax.Array, jax.Array] = _step(graphdef, state, batch, k=k)
    return found


def top_k_logits(
    hidden: jax.Array, head: jax.Array, k: int, *, logits_dtype: str = "float32", **options: Any
) -> tuple[jax.Array, jax.Array]:
    """MaxText's `get_top_k_logits` of the logits that a head makes of hidden states.

    Args:
      hidden: [B, S, H], after the last norm.
      head: [V, H], or [H, V] with `head_axes="HV"`, of the same dtype.
      logits_dtype, options: as `pallas_kernels.linear_topk_logprobs` has them: `scale`, `soft_cap`.

    Returns:
      Logits [B, S, K] of `logits_dtype`, largest first, and their ids, [B, S, K] int32.
    """
    rows = hidden.reshape(-1, hidden.shape[-1])
    ids = jnp.zeros(rows.shape[0], jnp.int32)
    found = linear_topk_logprobs(
        rows, head, ids, k, log_sum_exp=True, logits_dtype=logits_dtype, **options
    )
    assert found.log_sum_exp is not None
    logits = (found.logprobs[:, 1:] + found.log_sum_exp[:, None]).astype(logits_dtype)
    shape = (*hidden.shape[:-1], k)
    return logits.reshape(shape), found.token_ids[:, 1:].reshape(shape)


def _check(model: Any) -> None:
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
    if names := [name for name, wanted in refused.items() if wanted]:
        raise NotImplementedError(
            f"the teacher's top K logits with {', '.join(names)}: change the setting, or use "
            "MaxText's own teacher_step"
        )


@partial(jax.jit, static_argnames=("k",))
def _step(
    graphdef: Any, state: Any, batch: dict[str, jax.Array], k: int
) -> tuple[jax.Array, jax.Array]:
    model = importlib.import_module("flax.nnx").merge(graphdef, state)
    config, decoder = model.config, model.decoder
    # The head is left out of this copy of the model: its "logits" are the last hidden states.
    decoder.apply_output_head = lambda embedder, hidden, deterministic, mode: hidden
    hidden = decoder.decoder_norm(
        model(
            decoder_input_tokens=batch["inputs"],
            decoder_positions=batch["inputs_position"],
            decoder_segment_ids=batch.get("inputs_segmentation"),
            enable_dropout=False,
        )
    )
    dtype = jnp.dtype("float32" if config.logits_dot_in_fp32 else config.dtype)
    options: dict[str, Any] = {}
    if config.logits_via_embedding:
        # MaxText's `attend_on_embedding` rounds the table so.
        head = model.token_embedder.embedding[...].astype(jnp.bfloat16)
        product = jnp.result_type(hidden, head)
        if config.normalize_embedding_logits:
            options["scale"] = hidden.shape[-1] ** -0.5
        options["soft_cap"] = config.final_logits_soft_cap or None
    else:
        head, product = decoder.logits_dense.kernel[...], dtype
        options["head_axes"] = "HV"
    precision = getattr(config.matmul_precision, "value", config.matmul_precision)
    with jax.default_matmul_precision(precision):
        logits, ids = top_k_logits(
            hidden.astype(product), head.astype(product), k, logits_dtype=dtype.name, **options
        )
    return logits.astype(jnp.float32) if config.cast_logits_to_fp32 else logits, ids
