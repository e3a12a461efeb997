"""Logprobs among the tokens that each row keeps: O(R C) numbers, and a block of gathered head rows.

A processed distribution (top-k, top-p, a grammar) gives probability to few tokens, and its learner
needs no other token's logit. Of the head, the kept rows alone are read.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backends.answers import usable_temperatures
from pallas_kernels.linear.backward import like
from pallas_kernels.linear.forward import inverse_temperatures
from pallas_kernels.linear.tiles import over_tiles
from pallas_kernels.linear.types import Call, LinearKeptLogprobs
from pallas_kernels.lowering import typed
from pallas_kernels.lowering.forms import (
    barrier,
    map_blocks,
    pin_to_iteration,
    rows_from,
    vary_like,
)

BLOCK_BYTES = 8 << 20  # of gathered head rows


class KeptInputs(NamedTuple):
    """A device's own part of a call's arrays."""

    hidden: jax.Array  # [R, H]
    head: jax.Array  # [W, H]
    bias: jax.Array | None  # [W]
    token_ids: jax.Array  # [R] int32
    kept_token_ids: jax.Array  # [R, C] int32; outside [0, V): none
    temperatures: jax.Array | None  # [R] float32


class _Local(NamedTuple):
    columns: jax.Array  # [R, C] int32 in [0, W)
    is_on_shard: jax.Array  # [R, C] bool: this device has the token
    real: jax.Array  # [R, C] bool: it is a token


class _Residuals(NamedTuple):
    """Values that the backward pass takes over from the forward one."""

    inputs: KeptInputs
    out: LinearKeptLogprobs
    logits: jax.Array


def _local(call: Call, inputs: KeptInputs) -> _Local:
    width, ids = inputs.head.shape[0], inputs.kept_token_ids
    real = (ids >= 0) & (ids < call.shard.size(width))
    columns = ids - call.shard.ids(width)[0]
    is_on_shard = real & (columns >= 0) & (columns < width)
    return _Local(jnp.clip(columns, 0, width - 1), is_on_shard, real)


def _block(inputs: KeptInputs) -> int:
    rows, count = inputs.kept_token_ids.shape
    of_row = max(1, count) * inputs.head.shape[1] * inputs.head.dtype.itemsize
    return max(1, min(rows, BLOCK_BYTES // of_row))


def _before_cap(
    call: Call, hidden: jax.Array, head: jax.Array, bias: jax.Array | None, columns: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The logits [B, C] float32 of hidden [B, H] before the soft cap, and the head's rows."""
    gathered = barrier(head[columns])
    products = lax.dot_general(
        hidden, gathered, (((1,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32
    )
    return call.definition.moved(products, None if bias is None else bias[columns]), gathered


def _logits(call: Call, inputs: KeptInputs, local: _Local) -> jax.Array:
    """[R, C] float32 of all devices, -inf where there is no token."""
    block = _block(inputs)

    def work(start: jax.Array) -> jax.Array:
        hidden, columns = rows_from((inputs.hidden, local.columns), start, block)
        u, _ = _before_cap(call, hidden, inputs.head, inputs.bias, columns)
        return call.definition.capped(u).astype(call.definition.logits_dtype).astype(jnp.float32)

    empty = jnp.zeros(local.columns.shape, jnp.float32)
    local_logits = map_blocks(work, block, None, empty, (inputs, local))
    logits = call.shard.across_sum(jnp.where(local.is_on_shard, local_logits, 0))
    return jnp.where(local.real, logits, -jnp.inf)


def _forward(call: Call, inputs: KeptInputs) -> tuple[LinearKeptLogprobs, jax.Array]:
    if call.row_tile is None:
        return _of_rows(call, inputs)

    def of_tile(rows: Any, start: jax.Array) -> tuple[LinearKeptLogprobs, jax.Array]:
        hidden, *rest = rows
        head = pin_to_iteration(inputs.head, start)
        return _of_rows(call, KeptInputs(hidden, head, inputs.bias, *rest))

    rows = inputs.hidden, inputs.token_ids, inputs.kept_token_ids, inputs.temperatures
    return over_tiles(call.row_tile, of_tile, rows)


def _of_rows(call: Call, inputs: KeptInputs) -> tuple[LinearKeptLogprobs, jax.Array]:
    local = _local(call, inputs)
    logits = _logits(call, inputs, local)
    maximum = jnp.max(logits, axis=1)
    valid = jnp.isfinite(maximum)
    scaled = logits - jnp.where(valid, maximum, 0)[:, None]
    if inputs.temperatures is not None:
        t = usable_temperatures(inputs.temperatures)
        valid &= ~jnp.isnan(t)
        scaled = scaled / t[:, None]
    logprobs = scaled - jnp.log(jnp.sum(jnp.exp(scaled), axis=1))[:, None]
    among = local.real & (inputs.kept_token_ids == inputs.token_ids[:, None])
    token_logprobs = jnp.max(jnp.where(among, logprobs, -jnp.inf), axis=1)
    is_token = (inputs.token_ids >= 0) & (inputs.token_ids < call.shard.size(inputs.head.shape[0]))
    kept_logprobs = jnp.where(valid[:, None] & local.real, logprobs, jnp.nan)
    return LinearKeptLogprobs(
        jnp.where(valid & is_token, token_logprobs, jnp.nan), kept_logprobs
    ), logits


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def differentiable_kept_logprobs(call: Call, inputs: KeptInputs) -> LinearKeptLogprobs:
    """One device's part of the call, differentiable in reverse mode."""
    return _forward(call, inputs)[0]


def _kept_forward(call: Call, inputs: KeptInputs) -> tuple[LinearKeptLogprobs, _Residuals]:
    out, logits = _forward(call, inputs)
    return out, _Residuals(inputs, out, logits)


def _kept_backward(
    call: Call, residuals: _Residuals, cotangent: LinearKeptLogprobs
) -> tuple[KeptInputs]:
    inputs, out, logits = residuals
    local = _local(call, inputs)
    answered = ~jnp.isnan(out.kept_logprobs)
    d_logprobs = jnp.where(answered, cotangent.kept_logprobs, 0)
    # Of an id that is kept twice, the first place counts.
    among = answered & (inputs.kept_token_ids == inputs.token_ids[:, None])
    first = among & (jnp.cumsum(among, axis=1, dtype=jnp.int32) == 1)
    d_logprobs += jnp.where(first, cotangent.logprobs[:, None], 0)
    p = jnp.where(answered, jnp.exp(out.kept_logprobs), 0)
    d_y = d_logprobs - p * jnp.sum(d_logprobs, axis=1, keepdims=True)
    inverse = inverse_temperatures(inputs.temperatures)
    d = d_y if inverse is None else d_y * inverse[:, None]
    by_temperature = None
    if inputs.temperatures is not None:
        t = inputs.temperatures
        # Relative to the largest, as the logprobs are: what all have in common moves nothing.
        above = logits - jnp.max(logits, axis=1, keepdims=True)
        moved = jnp.sum(d * jnp.where(answered & jnp.isfinite(above), above, 0), axis=1)
        by_temperature = like(jnp.where(t > 0, -moved / jnp.where(t > 0, t, 1), 0), t)
    by_hidden, by_head, by_bias = _gradients(
        call, inputs, local, jnp.where(local.is_on_shard, d, 0)
    )
    return (
        KeptInputs(
            hidden=like(by_hidden, inputs.hidden),
            head=like(by_head, inputs.head),
            bias=None if inputs.bias is None else like(by_bias, inputs.bias),
            token_ids=typed.NO_GRADIENT,
            kept_token_ids=typed.NO_GRADIENT,
            temperatures=by_temperature,
        ),
    )


def _gradients(
    call: Call, inputs: KeptInputs, local: _Local, d: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The loss's derivatives by hidden, head and bias in float32, from d [R, C] by the logits."""
    definition = call.definition
    rows, block = inputs.hidden.shape[0], _block(inputs)

    def step(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        start = jnp.minimum(i * block, rows - block)
        hidden, columns, slopes = (
            lax.dynamic_slice_in_dim(x, start, block) for x in (inputs.hidden, local.columns, d)
        )
        new = start + jnp.arange(block, dtype=jnp.int32) >= i * block  # the last block may overlap
        u, gathered = _before_cap(call, hidden, inputs.head, inputs.bias, columns)
        du = jnp.where(new[:, None], slopes * definition.slope(u), 0)
        scaled = du * jnp.float32(definition.scale)
        by_hidden = jnp.einsum("rc,rch->rh", scaled, gathered.astype(jnp.float32))
        by_hidden += lax.dynamic_slice_in_dim(sums[0], start, block)
        by_rows = scaled[:, :, None] * hidden.astype(jnp.float32)[:, None, :]
        return (
            lax.dynamic_update_slice_in_dim(sums[0], by_hidden, start, 0),
            sums[1].at[columns].add(by_rows),
            sums[2].at[columns].add(du),
        )

    zeros: tuple[jax.Array, ...] = (
        jnp.zeros(inputs.hidden.shape, jnp.float32),
        jnp.zeros(inputs.head.shape, jnp.float32),
        jnp.zeros(inputs.head.shape[0], jnp.float32),
    )
    hidden, head, bias = typed.fori_loop(
        0, -(-rows // block), step, vary_like(zeros, (inputs, local, d))
    )
    return hidden, head, bias


differentiable_kept_logprobs.defvjp(_kept_forward, _kept_backward)
