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

from jax_specdec.adapters.maxtext_distillation import support_strategy
from jax_specdec.adapters.maxtext_heads import check_model, hidden_and_head
from jax_specdec.adapters.proved import check_functions, compare
from jax_specdec.adapters.replacing import replaced
from pallas_kernels import linear_topk_logprobs

__all__ = ["install", "support_strategy", "teacher_step", "top_k_logits"]

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
    check_model(model)
    graphdef, state = importlib.import_module("flax.nnx").split(model)
    top: tuple[jax.Array, jax.Array] = _step(graphdef, state, batch, k=k)
    return top


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
    results = linear_topk_logprobs(
        rows, head, ids, k, log_sum_exp=True, logits_dtype=logits_dtype, **options
    )
    assert results.log_sum_exp is not None
    logits = (results.logprobs[:, 1:] + results.log_sum_exp[:, None]).astype(logits_dtype)
    shape = (*hidden.shape[:-1], k)
    return logits.reshape(shape), results.token_ids[:, 1:].reshape(shape)


@partial(jax.jit, static_argnames=("k",))
def _step(
    graphdef: Any, state: Any, batch: dict[str, jax.Array], k: int
) -> tuple[jax.Array, jax.Array]:
    model = importlib.import_module("flax.nnx").merge(graphdef, state)
    hidden, head = hidden_and_head(
        model,
        decoder_input_tokens=batch["inputs"],
        decoder_positions=batch["inputs_position"],
        decoder_segment_ids=batch.get("inputs_segmentation"),
        enable_dropout=False,
    )
    dtype = model.config.dtype
    if model.config.logits_dot_in_fp32:
        dtype = "float32"
    with head.products():
        logits, ids = top_k_logits(
            hidden, head.weight, k, logits_dtype=jnp.dtype(dtype).name, head_axes=head.axes,
            scale=head.scale, soft_cap=head.soft_cap,
        )  # fmt: skip
    return logits.astype(jnp.float32) if model.config.cast_logits_to_fp32 else logits, ids
