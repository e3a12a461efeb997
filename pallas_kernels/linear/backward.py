"""Derivatives by hidden, head, bias and temperatures: recomputed, piece by piece.

With y = (logits - m) / T, m their maximum, p = softmax(y), l = log(p) and E = entropy, the
derivatives by y[v] are

    logprob of token t   [v = t] - p[v]
    log_sum_exp          p[v]
    entropy              -p[v] (l[v] + E)

and those by T are sums of these times -y[v] / T; that of log_sum_exp, m / T + log(sum(exp(y))), has
-m / T^2 too. A row or a token without an answer has none. Rounding to the logits' dtype is passed
over, as autodiff of a cast does. As there too, the logits' change is rounded to the dtype of hidden
and head before it is multiplied with them.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backends.answers import is_active, usable_temperatures
from pallas_kernels.contract.rows import Rows
from pallas_kernels.contract.types import TopkLogprobs
from pallas_kernels.linear.forward import inverse_temperatures, num_columns, target_rows, with_scale
from pallas_kernels.linear.schedule import backward_part, backward_piece
from pallas_kernels.linear.types import (
    Call,
    Definition,
    LinearInputs,
    LogprobScale,
    head_rows,
    loaded,
    stored,
    tile_product,
)
from pallas_kernels.lowering import typed
from pallas_kernels.lowering.forms import barrier, vary_like, varying_axes


class RowDerivatives(NamedTuple):
    """The loss's derivatives by each row's results."""

    ids: jax.Array  # [R, 1 + K + C] int32, this device's columns; others are of no token here
    by_logprob: jax.Array  # [R, 1 + K + C] float32, of each named token
    by_all: jax.Array  # [R] float32, what p is multiplied with
    by_entropy: jax.Array | None  # [R] float32
    by_log_sum_exp: jax.Array  # [R] float32
    scale: LogprobScale
    valid: jax.Array  # [R] bool
    inverse: jax.Array | None  # [R] float32, 1 / T


class Gradients(NamedTuple):
    """Float32, except the head's, which has its dtype."""

    hidden: jax.Array  # [R, H]
    head: jax.Array  # as the head's axes are
    bias: jax.Array | None  # [W]
    logits: jax.Array  # [R], what `of_piece` says: the temperature's


class _Residuals(NamedTuple):
    """Values that the backward pass takes over from the forward one."""

    inputs: LinearInputs
    out: TopkLogprobs
    scale: LogprobScale


def differentiable_topk_logprobs(call: Call, inputs: LinearInputs) -> TopkLogprobs:
    """One device's part of a call, differentiable in reverse mode.

    Autodiff of the forward pass would keep every block's logits. Forward mode is not offered: JAX
    says so of a function with a `custom_vjp` (TypeError).
    """
    return _with_scale(call, inputs)[0]


def derivatives_of(
    call: Call, residuals: _Residuals, cotangent: TopkLogprobs, by_scale: LogprobScale
) -> RowDerivatives:
    """The rows' derivatives by `cotangent`, the loss's derivatives by the results.

    by_scale: those by the scale. Its maximum is a constant: no result depends on which it is.
    """
    inputs, out, scale = residuals
    ids = jnp.concatenate([out.token_ids, inputs.extra_token_ids], axis=1)
    logprobs = jnp.concatenate([out.logprobs, out.extra_logprobs], axis=1)
    by_logprob = jnp.concatenate([cotangent.logprobs, cotangent.extra_logprobs], axis=1)
    by_logprob = jnp.where(jnp.isnan(logprobs) | (ids < 0), 0, by_logprob)
    assert out.log_sum_exp is not None
    assert cotangent.log_sum_exp is not None
    valid = ~jnp.isnan(out.log_sum_exp)
    if inputs.temperatures is not None:
        valid &= ~jnp.isnan(usable_temperatures(inputs.temperatures))
    by_all = cotangent.log_sum_exp + by_scale.log_sum - jnp.sum(by_logprob, axis=1)
    by_entropy = None
    if out.entropy is not None and cotangent.entropy is not None:
        by_entropy = jnp.where(valid, cotangent.entropy, 0)
        by_all -= by_entropy * jnp.where(valid, out.entropy, 0)
    first = call.shard.ids(call.definition.width(inputs.head))[0]
    return RowDerivatives(
        ids - first,
        by_logprob,
        jnp.where(valid, by_all, 0),
        by_entropy,
        jnp.where(valid, cotangent.log_sum_exp, 0),
        scale,
        valid,
        inverse_temperatures(inputs.temperatures),
    )


def of_piece(
    definition: Definition,
    u: jax.Array,
    real: jax.Array,
    first: jax.Array,
    changes: RowDerivatives,
    *,
    named_apart: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The loss's derivatives by u [R, W] float32, and each row's sum of d logit * (logit - m).

    To it is added what log_sum_exp's m contributes.

    Args:
      definition: of the logits.
      u: the logits of some columns before the soft cap.
      real: [W] bool, the columns that count.
      first: [] int32, the first column.
      changes: of the results.
      named_apart: the named tokens are not among those of the scale, and have no part of p; no id
        is named twice.
    """
    rows, width = u.shape
    logits = definition.capped(u).astype(definition.logits_dtype).astype(jnp.float32)
    above = logits - changes.scale.maximum[:, None]
    y = above if changes.inverse is None else above * changes.inverse[:, None]
    logprob = y - changes.scale.log_sum[:, None]
    counts = real[None] & changes.valid[:, None] & (logprob > -jnp.inf)
    p = jnp.where(counts, jnp.exp(logprob), 0)
    factor = jnp.broadcast_to(changes.by_all[:, None], u.shape)
    if changes.by_entropy is not None:
        factor = factor - changes.by_entropy[:, None] * jnp.where(counts, logprob, 0)
    columns = changes.ids - first
    # An id outside is dropped; a negative one would count from the end.
    columns = jnp.where((columns >= 0) & (columns < width), columns, width)
    columns = jnp.where(real[jnp.clip(columns, 0, width - 1)], columns, width)
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    if named_apart:
        p = p.at[row, columns].set(0, mode="drop")
    d = (p * factor).at[row, columns].add(changes.by_logprob, mode="drop")
    if changes.inverse is not None:
        d = d * changes.inverse[:, None]
    d = jnp.where(changes.valid[:, None], d, 0)
    by_maximum = changes.by_log_sum_exp * changes.scale.maximum
    if changes.inverse is not None:
        by_maximum = by_maximum * changes.inverse
    moved = jnp.sum(d * jnp.where(counts, above, 0) + p * by_maximum[:, None], axis=1)
    return jnp.where(counts | (d != 0), d * definition.slope(u), 0), moved


def gradients(
    call: Call, inputs: LinearInputs, changes: RowDerivatives, *, named_apart: bool = False
) -> Gradients:
    """The loss's derivatives by this device's own part of everything; see `of_piece`."""
    definition, head, bias = call.definition, inputs.head, inputs.bias
    hidden = target_rows(inputs.hidden, inputs.row_ids)
    rows, size = hidden.shape
    width, axis = definition.width(head), definition.axis
    piece = backward_piece(rows, width, size, head.dtype.itemsize)
    limit = num_columns(call.shard, width)

    def step(i: jax.Array, sums: Gradients) -> Gradients:
        seen = i * piece
        start = jnp.minimum(seen, width - piece)
        columns = start + jnp.arange(piece, dtype=jnp.int32)
        new = columns >= seen
        w = head_rows(head, start, piece, axis)
        own_bias = None if bias is None else lax.dynamic_slice_in_dim(bias, start, piece)
        u = definition.before_cap(hidden, w, own_bias)
        counts = new & (columns < limit)
        du, moved = of_piece(definition, u, counts, start, changes, named_apart=named_apart)
        by_bias = sums.bias
        if by_bias is not None:
            old = lax.dynamic_slice_in_dim(by_bias, start, piece)
            by_bias = lax.dynamic_update_slice_in_dim(
                by_bias, jnp.where(new, jnp.sum(du, axis=0), old), start, 0
            )
        scaled = barrier((du * jnp.float32(definition.scale)).astype(head.dtype))
        first_factor, second_factor = (hidden, scaled) if axis else (scaled, hidden)
        by_head = tile_product(first_factor, second_factor, 0, 0).astype(head.dtype)
        if width % piece:
            old = lax.dynamic_slice_in_dim(sums.head, start, piece, axis)
            is_new = jnp.expand_dims(new, 1 - axis)
            by_head = jnp.where(is_new, by_head, loaded(old, head.dtype))
        return Gradients(
            added(sums.hidden, scaled, w),
            lax.dynamic_update_slice_in_dim(sums.head, stored(by_head), start, axis),
            by_bias,
            sums.logits + moved,
        )

    part = backward_part(rows, width, size)

    def added(total: jax.Array, scaled: jax.Array, w: jax.Array) -> jax.Array:
        """total + scaled @ w: [R, H], some rows at a time."""
        if part == rows:
            return total + tile_product(scaled, w, 1, axis)

        def some(j: jax.Array, total: jax.Array) -> jax.Array:
            start = jnp.minimum(j * part, rows - part)
            new = start + jnp.arange(part, dtype=jnp.int32) >= j * part
            part_scaled = jnp.where(new[:, None], lax.dynamic_slice_in_dim(scaled, start, part), 0)
            sums = lax.dynamic_slice_in_dim(total, start, part) + tile_product(
                part_scaled, w, 1, axis
            )
            return lax.dynamic_update_slice_in_dim(total, sums, start, 0)

        return typed.fori_loop(0, -(-rows // part), some, total)

    zeros = Gradients(
        jnp.zeros((rows, size), jnp.float32),
        stored(jnp.zeros_like(head)),
        None if bias is None else jnp.zeros(width, jnp.float32),
        jnp.zeros(rows, jnp.float32),
    )
    inputs_of_all = (hidden, head, bias, limit, changes)
    sums: Gradients = lax.fori_loop(0, -(-width // piece), step, vary_like(zeros, inputs_of_all))
    return sums._replace(head=loaded(sums.head, head.dtype))


def cotangents(
    call: Call, residuals: _Residuals, cotangent: TopkLogprobs, by_scale: LogprobScale
) -> LinearInputs:
    """The loss's derivatives by the inputs; None for those that have none."""
    inputs, changes = residuals.inputs, derivatives_of(call, residuals, cotangent, by_scale)
    sums = gradients(call, inputs, changes)
    by_hidden = sums.hidden
    if inputs.row_ids is not None:
        active = is_active(Rows(inputs.hidden, inputs.token_ids, inputs.row_ids))
        rows = jnp.where(active, inputs.row_ids, inputs.hidden.shape[0])
        empty = vary_like(jnp.zeros(inputs.hidden.shape, jnp.float32), by_hidden)
        by_hidden = empty.at[rows].add(by_hidden, mode="drop")
    by_temperature = None
    if inputs.temperatures is not None:
        t = inputs.temperatures
        # A temperature of 0 is read as 1: a constant, which does not change.
        usable = changes.valid & (t != 0)
        by_temperature = like(jnp.where(usable, -sums.logits / jnp.where(usable, t, 1), 0), t)
    return LinearInputs(
        hidden=like(by_hidden, inputs.hidden),
        head=like(sums.head, inputs.head),
        bias=None if inputs.bias is None or sums.bias is None else like(sums.bias, inputs.bias),
        token_ids=typed.NO_GRADIENT,
        row_ids=None,
        num_rows=None,
        temperatures=by_temperature,
        extra_token_ids=typed.NO_GRADIENT,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_scale(call: Call, inputs: LinearInputs) -> tuple[TopkLogprobs, LogprobScale]:
    """With what the backward pass needs, whose own derivative is needed for second ones."""
    return with_scale(call, inputs)


def _forward(
    call: Call, inputs: LinearInputs
) -> tuple[tuple[TopkLogprobs, LogprobScale], _Residuals]:
    out, scale = _with_scale(call, inputs)
    return (out, scale), _Residuals(inputs, out, scale)


def _backward(
    call: Call, residuals: _Residuals, cotangent: tuple[TopkLogprobs, LogprobScale]
) -> tuple[LinearInputs]:
    return (cotangents(call, residuals, *cotangent),)


_with_scale.defvjp(_forward, _backward)


def like(gradient: jax.Array, primal: jax.Array) -> jax.Array:
    """The gradient in the primal's dtype, summed over the devices that share the primal."""
    axes = varying_axes(gradient) - varying_axes(primal)
    if axes:
        gradient = lax.psum(gradient, tuple(sorted(axes)))
    return vary_like(gradient.astype(primal.dtype), primal)
