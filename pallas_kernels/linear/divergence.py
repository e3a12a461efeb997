"""A student's divergence from a teacher that is known on some tokens: no logits, no [R, V].

Of each row the teacher names C tokens, its support, and what it gives to each; all others are one
bucket, the rest. The student's logits are read once, some columns at a time: the support's are
picked out, and the others are joined in a log-sum-exp of their own. So the rest's probability is a
sum, never 1 minus one, and keeps its digits where the support has nearly all of the mass.

With y = logits / T, lq the student's logprob of a bucket, g = d loss / d lq, G the sum of g over
all buckets, and r[v] = exp(y[v] - log_sum_exp of the rest), the derivatives by y[v] are

    a token of the support   g - q G
    another one              r[v] (g_rest - q_rest G)

Axes: R rows, C tokens of a support, V vocabulary, W columns of this device.
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backends.answers import usable_temperatures
from pallas_kernels.linear.backward import RowDerivatives, gradients, like
from pallas_kernels.linear.forward import inverse_temperatures, num_columns
from pallas_kernels.linear.schedule import backward_piece
from pallas_kernels.linear.tiles import logits_of_tile, over_tiles, sums_of_tile
from pallas_kernels.linear.types import Call, LinearInputs, LogprobScale, head_rows
from pallas_kernels.lowering import typed
from pallas_kernels.lowering.forms import barrier, vary_like

Divergence = Literal["forward", "reverse", "jensen_shannon"]
LEAST_REST = 2.0**-24  # of a teacher's mass: what float32 can tell 1 minus a sum from
SUM_ROUNDING = 1e-3  # by which a teacher's probabilities may miss 1


class SupportInputs(NamedTuple):
    """A device's own part of a call's arrays."""

    hidden: jax.Array  # [R, H]
    head: jax.Array  # [W, H], or [H, W]
    bias: jax.Array | None  # [W]
    support_ids: jax.Array  # [R, C] int32; outside [0, V): none
    support_logprobs: jax.Array  # [R, C] float32
    temperatures: jax.Array | None  # [R] float32


class SupportCall(NamedTuple):
    """The static part of a call. Hashable."""

    call: Call
    divergence: Divergence


class _Buckets(NamedTuple):
    """Logprobs of the C tokens and of the rest."""

    support: jax.Array  # [R, C]
    rest: jax.Array  # [R]


class _Student(NamedTuple):
    """The student's logprobs of each row."""

    buckets: _Buckets
    maximum: jax.Array  # [R], of the rest's logits; 0 without a finite one
    log_sum: jax.Array  # [R], log of the sum of exp((logit - maximum) / T) over the rest
    valid: jax.Array  # [R] bool


class _Partial(NamedTuple):
    """Of the columns so far."""

    maximum: jax.Array  # [R], of the rest
    sum_exp: jax.Array  # [R], of exp((logit - maximum) / T) over the rest
    logits: jax.Array  # [R, C], of the support; -inf where a column is not met yet


def _real(call: Call, inputs: SupportInputs) -> jax.Array:
    """[R, C] bool, which of the support are tokens."""
    ids = inputs.support_ids
    return (ids >= 0) & (ids < call.shard.size(call.definition.width(inputs.head)))


def _support_columns(call: Call, inputs: SupportInputs) -> jax.Array:
    """[R, C] int32, the support's columns on this device; some number outside for the others."""
    first = call.shard.ids(call.definition.width(inputs.head))[0]
    return jnp.where(_real(call, inputs), inputs.support_ids - first, -1)


def _read(call: Call, inputs: SupportInputs) -> _Partial:
    """One read of this device's part of the head."""
    definition, head = call.definition, inputs.head
    rows, size = inputs.hidden.shape
    width, axis = definition.width(head), definition.axis
    piece = backward_piece(rows, width, size, head.dtype.itemsize)
    limit, columns = num_columns(call.shard, width), _support_columns(call, inputs)
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    inverse = inverse_temperatures(inputs.temperatures)

    def step(i: jax.Array, sums: _Partial) -> _Partial:
        start = jnp.minimum(i * piece, width - piece)
        places = start + jnp.arange(piece, dtype=jnp.int32)
        new = (places >= i * piece) & (places < limit)  # the last piece may overlap
        bias = None
        if inputs.bias is not None:
            bias = lax.dynamic_slice_in_dim(inputs.bias, start, piece)
        x = definition.logits(inputs.hidden, head_rows(head, start, piece, axis), bias)
        x = jnp.where(new, x.astype(jnp.float32), -jnp.inf)
        place = columns - start
        is_met = (columns >= 0) & (place >= 0) & (place < piece)
        picked = jnp.take_along_axis(x, jnp.where(is_met, place, 0), axis=1)
        others = x.at[row, jnp.where(is_met, place, piece)].set(-jnp.inf, mode="drop")
        # A NaN stays in the maximum, and so in the sum.
        maximum = jnp.maximum(sums.maximum, jnp.max(others, axis=1))
        finite = jnp.where(maximum == -jnp.inf, 0, maximum)

        def scaled(x: jax.Array) -> jax.Array:
            above = x - finite.reshape(-1, *[1] * (x.ndim - 1))
            return above if inverse is None else above * inverse.reshape(-1, *[1] * (x.ndim - 1))

        sum_exp = sums.sum_exp * jnp.exp(scaled(sums.maximum))
        sum_exp += jnp.sum(jnp.exp(scaled(others)), axis=1)
        return _Partial(
            maximum, sum_exp, jnp.where(is_met, jnp.maximum(sums.logits, picked), sums.logits)
        )

    empty = _Partial(
        jnp.full(rows, -jnp.inf, jnp.float32),
        jnp.zeros(rows, jnp.float32),
        jnp.full(columns.shape, -jnp.inf, jnp.float32),
    )
    none = vary_like(empty, (inputs, limit, columns))
    partial: _Partial = lax.fori_loop(0, -(-width // piece), step, none)
    return partial


def _read_tile(call: Call, inputs: SupportInputs, start: jax.Array) -> _Partial:
    """A tile of rows, read whole: on every device the same, whatever the number of devices."""
    x = logits_of_tile(call, inputs.hidden, inputs.head, inputs.bias, start)
    rows, width = x.shape
    real, columns = _real(call, inputs), _support_columns(call, inputs)
    row = jnp.arange(rows, dtype=jnp.int32)
    logits = call.shard.named_logits(x, row, jnp.where(real, inputs.support_ids, -1))
    place = jnp.where((columns >= 0) & (columns < width), columns, width)
    others = barrier(x.at[row[:, None], place].set(-jnp.inf, mode="drop"))
    t = inputs.temperatures
    usable = None if t is None else usable_temperatures(t)
    infinite = jnp.full(rows, jnp.inf, jnp.float32)  # no logit is larger: none to count
    sums = sums_of_tile(call, others, infinite, usable)
    # A NaN of the support stays one; what is no token is none.
    return _Partial(sums.maximum, sums.sum_exp, jnp.where(real, logits, -jnp.inf))


def _student(call: Call, inputs: SupportInputs, start: jax.Array | None = None) -> _Student:
    """The student's buckets, of all devices.

    start: [] int32, which the rows begin with, where they are a tile.
    """
    shard, inverse = call.shard, inverse_temperatures(inputs.temperatures)

    def scaled(x: jax.Array) -> jax.Array:
        return x if inverse is None else x * inverse.reshape(-1, *[1] * (x.ndim - 1))

    if start is not None:
        maximum, sum_exp, logits = _read_tile(call, inputs, start)
        finite = jnp.where(maximum == -jnp.inf, 0, maximum)
    else:
        partial = _read(call, inputs)
        maximum = shard.across_maximum(partial.maximum)
        finite = jnp.where(maximum == -jnp.inf, 0, maximum)
        sum_exp = shard.across_sum(partial.sum_exp * jnp.exp(scaled(partial.maximum - finite)))
        logits = shard.across_maximum(partial.logits)
    largest = jnp.maximum(finite, jnp.max(logits, axis=1))
    row_maximum = jnp.maximum(maximum, jnp.max(logits, axis=1))
    y, rest = scaled(logits - largest[:, None]), scaled(finite - largest) + jnp.log(sum_exp)
    total = jnp.log(jnp.exp(rest) + jnp.sum(jnp.exp(y), axis=1))
    valid = jnp.isfinite(row_maximum) & ~jnp.isnan(sum_exp)
    if inputs.temperatures is not None:
        valid &= ~jnp.isnan(usable_temperatures(inputs.temperatures))
    log_sum = jnp.where(sum_exp > 0, jnp.log(sum_exp), 0)
    return _Student(_Buckets(y - total[:, None], rest - total), finite, log_sum, valid)


def _teacher(call: Call, inputs: SupportInputs) -> tuple[_Buckets, jax.Array]:
    """The teacher's buckets, and [R] bool, which rows are probabilities."""
    real = _real(call, inputs)
    logprobs = jnp.where(real, inputs.support_logprobs, -jnp.inf)
    mass = jnp.sum(jnp.exp(logprobs), axis=1)
    vocab_size = call.shard.size(call.definition.width(inputs.head))
    is_whole = jnp.sum(real, axis=1, dtype=jnp.int32) == vocab_size  # the rest has no token
    rest = jnp.where(is_whole, -jnp.inf, jnp.log(jnp.maximum(1 - mass, LEAST_REST)))
    least = jnp.where(is_whole, 1 - SUM_ROUNDING, 0)
    return _Buckets(logprobs, rest), (mass >= least) & (mass <= 1 + SUM_ROUNDING)


def _joined(buckets: _Buckets) -> jax.Array:
    return jnp.concatenate([buckets.support, buckets.rest[:, None]], axis=1)  # [R, C + 1]


def _terms(divergence: Divergence, lp: jax.Array, lq: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Each bucket's part of the divergence, and its derivative by lq."""
    p, q = jnp.exp(lp), jnp.exp(lq)

    def times(p: jax.Array, difference: jax.Array) -> jax.Array:
        return jnp.where(p > 0, p * difference, 0)

    if divergence == "forward":
        return times(p, lp - lq), -p
    if divergence == "reverse":
        return times(q, lq - lp), times(q, lq - lp + 1)
    middle = jnp.logaddexp(lp, lq) - jnp.log(jnp.float32(2))
    return 0.5 * (times(p, lp - middle) + times(q, lq - middle)), 0.5 * times(q, lq - middle)


def _forward(which: SupportCall, inputs: SupportInputs) -> tuple[jax.Array, _Student]:
    tile = which.call.row_tile
    if tile is None:
        return _of_rows(which, inputs)

    def of_tile(rows: Any, start: jax.Array) -> tuple[jax.Array, _Student]:
        hidden, *rest = rows
        return _of_rows(which, SupportInputs(hidden, inputs.head, inputs.bias, *rest), start)

    rows = inputs.hidden, inputs.support_ids, inputs.support_logprobs, inputs.temperatures
    return over_tiles(tile, of_tile, rows)


def _of_rows(
    which: SupportCall, inputs: SupportInputs, start: jax.Array | None = None
) -> tuple[jax.Array, _Student]:
    student = _student(which.call, inputs, start)
    teacher, sums_to_one = _teacher(which.call, inputs)
    terms, _ = _terms(which.divergence, _joined(teacher), _joined(student.buckets))
    valid = student.valid & sums_to_one
    return jnp.where(valid, jnp.sum(terms, axis=1), jnp.nan), student._replace(valid=valid)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def support_divergence(which: SupportCall, inputs: SupportInputs) -> jax.Array:
    """One device's part of the call, [R] float32, differentiable in reverse mode."""
    return _forward(which, inputs)[0]


def _with_residuals(
    which: SupportCall, inputs: SupportInputs
) -> tuple[jax.Array, tuple[SupportInputs, _Student]]:
    out, student = _forward(which, inputs)
    return out, (inputs, student)


def _backward(
    which: SupportCall, residuals: tuple[SupportInputs, _Student], cotangent: jax.Array
) -> tuple[SupportInputs]:
    inputs, student = residuals
    call, width = which.call, which.call.definition.width(inputs.head)
    lq = _joined(student.buckets)
    _, by_lq = _terms(which.divergence, _joined(_teacher(call, inputs)[0]), lq)
    counts = student.valid & (
        cotangent != 0
    )  # an infinite row that nobody asks about moves nothing
    by_lq = jnp.where(counts[:, None], by_lq * cotangent[:, None], 0)
    d = by_lq - jnp.exp(lq) * jnp.sum(by_lq, axis=1, keepdims=True)
    d = jnp.where(student.valid[:, None], d, 0)
    scale = LogprobScale(student.maximum, student.log_sum)
    inverse = inverse_temperatures(inputs.temperatures)
    zero = jnp.zeros_like(cotangent)
    columns = jnp.where(_real(call, inputs), inputs.support_ids - call.shard.ids(width)[0], -1)
    changes = RowDerivatives(
        columns, d[:, :-1], d[:, -1], None, zero, scale, student.valid, inverse
    )
    no_ids = jnp.zeros((cotangent.shape[0], 0), jnp.int32)
    of_rows = LinearInputs(
        inputs.hidden,
        inputs.head,
        inputs.bias,
        no_ids[:, :0],
        None,
        None,
        inputs.temperatures,
        no_ids,
    )
    sums = gradients(call, of_rows, changes, named_apart=True)
    by_temperature = None
    if inputs.temperatures is not None:
        t = inputs.temperatures
        usable = student.valid & (t != 0)
        by_temperature = like(jnp.where(usable, -sums.logits / jnp.where(usable, t, 1), 0), t)
    return (
        SupportInputs(
            hidden=like(sums.hidden, inputs.hidden),
            head=like(sums.head, inputs.head),
            bias=None if inputs.bias is None or sums.bias is None else like(sums.bias, inputs.bias),
            support_ids=typed.NO_GRADIENT,
            support_logprobs=jnp.zeros_like(inputs.support_logprobs),
            temperatures=by_temperature,
        ),
    )


support_divergence.defvjp(_with_residuals, _backward)
