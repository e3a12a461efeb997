"""The losses of a distillation strategy, of hidden states and a head: no logits [B, S, V].

tunix' and MaxText's trainers take a strategy that makes the loss. Theirs are of whole logits of the
student and of the teacher; these are of the teacher's support: its K likeliest tokens, with one
bucket for the rest.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jax_specdec.adapters.heads import ModelHead, linear_logprobs
from pallas_kernels import linear_support_kl, linear_topk_logprobs

DivergenceName = Literal["forward", "reverse", "jensen_shannon"]


class Support(NamedTuple):
    """A teacher's support at each position."""

    token_ids: jax.Array  # [B, S, C] int32; -1: none
    logprobs: jax.Array  # [B, S, C] float32, at the temperature of the divergence


def top_support(hidden: jax.Array, head: ModelHead, k: int, temperature: float) -> Support:
    """The K likeliest tokens of a teacher's hidden states [B, S, H], without its logits."""
    rows, weight, options = _product(hidden, head)
    ids = jnp.zeros(rows.shape[0], jnp.int32)
    with head.products():
        read = linear_topk_logprobs(
            rows, weight, ids, k, temperatures=_temperatures(temperature, rows), **options
        )
    shape = (*hidden.shape[:-1], k)
    return Support(read.token_ids[:, 1:].reshape(shape), read.logprobs[:, 1:].reshape(shape))


def divergence_from_support(
    hidden: jax.Array,
    head: ModelHead,
    support: Support,
    temperature: float,
    divergence: DivergenceName,
) -> jax.Array:
    """[B, S] float32, in nats: that of a student's hidden states [B, S, H] from the support."""
    rows, weight, options = _product(hidden, head)
    count = support.token_ids.shape[-1]
    with head.products():
        nats = linear_support_kl(
            rows, weight, support.token_ids.reshape(-1, count), support.logprobs.reshape(-1, count),
            divergence=divergence, temperatures=_temperatures(temperature, rows), **options,
        )  # fmt: skip
    return nats.reshape(hidden.shape[:-1])


def cross_entropy(hidden: jax.Array, head: ModelHead, labels: jax.Array) -> jax.Array:
    """[B, S] float32, of labels [B, S]; 0 where a label is negative."""
    ids = jnp.maximum(labels, 0)
    return jnp.where(labels >= 0, -linear_logprobs(hidden, head, ids, 1.0)[0], 0)


def check_numbers(temperature: float, alpha: float) -> None:
    """Refuse what is no temperature and no weight of the divergence."""
    if not temperature > 0:
        raise ValueError(f"temperature = {temperature} must be above 0")
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha = {alpha} must be from 0, the labels alone, to 1, the teacher")


def check_labels(labels: jax.Array, hidden: jax.Array) -> None:
    """Refuse labels that are not one id for each position."""
    if labels.shape != hidden.shape[:-1] or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(
            f"labels are {labels.dtype} {labels.shape}: give ids, {hidden.shape[:-1]}, -1 where a "
            "position has none, and no one-hot rows"
        )


def _product(hidden: jax.Array, head: ModelHead) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
    """Rows and weight of one dtype, and the options of the `linear_*` functions."""
    dtype = head.dtype or jnp.result_type(hidden, head.weight)
    options = {
        "scale": head.scale,
        "soft_cap": head.soft_cap,
        "logits_dtype": jnp.dtype(dtype).name,
        "head_axes": head.axes,
    }
    return hidden.reshape(-1, hidden.shape[-1]).astype(dtype), head.weight.astype(dtype), options


def _temperatures(temperature: float, rows: jax.Array) -> jax.Array | None:
    if temperature == 1:
        return None
    return jnp.full(rows.shape[0], temperature, jnp.float32)
