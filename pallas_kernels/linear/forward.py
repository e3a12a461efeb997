"""The answers of one device's part of a call: rows of hidden states, all of the head or a shard.

What travels where the head is split over the vocabulary, for R rows and C extra ids: two sums of R
and R * C words, for the given tokens' logits and the extra ids'. Then R * (3 + 2 K) words gathered
from every shard (R more with entropy), and one word that says whether to count again.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backends.answers import active_rows, answers, of_all_shards, usable_temperatures
from pallas_kernels.backends.xla import rows as xla
from pallas_kernels.contract.rows import Rows, RowSums, no_sums
from pallas_kernels.contract.types import TopkLogprobs
from pallas_kernels.linear import read_columns
from pallas_kernels.linear.schedule import Schedule, choose_schedule
from pallas_kernels.linear.types import Call, Inputs, RowScale
from pallas_kernels.lowering import forms
from pallas_kernels.lowering.choose import lowered_for
from pallas_kernels.meshes.placement import VocabShard


class Found(NamedTuple):
    """Results of R rows over all of the vocabulary."""

    named: jax.Array  # [R, 1 + C] float32, the logits of the given token and of the extra ids
    sums: RowSums


def target_rows(x: jax.Array, row_ids: jax.Array | None) -> jax.Array:
    """x [N, H] -> [R, H]; a row outside is clamped."""
    return x if row_ids is None else x.at[row_ids].get(mode="clip")


def finite_temperatures(temperatures: jax.Array | None) -> jax.Array | None:
    """Usable temperatures [R]; 1 where one is not usable."""
    if temperatures is None:
        return None
    usable = usable_temperatures(temperatures)
    return jnp.where(jnp.isnan(usable), jnp.float32(1), usable)


def inverse_temperatures(temperatures: jax.Array | None) -> jax.Array | None:
    """1 / T [R] of `finite_temperatures`."""
    t = finite_temperatures(temperatures)
    return None if t is None else 1 / t


def num_columns(shard: VocabShard, width: int) -> jax.Array:
    """How many of this device's columns are the vocabulary's: [] int32, 0 to `width`."""
    vocab_size = shard.size(width)
    if vocab_size == VocabShard(shard.axis_name).size(width):
        return jnp.asarray(width, jnp.int32)
    return jnp.clip(vocab_size - shard.ids(width)[0], 0, width)


def with_scale(call: Call, inputs: Inputs) -> tuple[TopkLogprobs, RowScale]:
    """The call, on one device's part of hidden and head, and what its logprobs are relative to."""
    return _finish(call, inputs, _found(call, inputs))


def _found(call: Call, inputs: Inputs) -> Found:
    rows, width = inputs.num_targets, call.definition.width(inputs.head)
    schedule = call.schedule or _schedule(call, inputs)
    if schedule.columns < width:
        return _by_columns(call, schedule, inputs)
    named = _named(inputs)
    rest = (_usable(inputs), named)
    arrays = (inputs.hidden, inputs.head, inputs.bias, *rest)

    def work(start: jax.Array) -> Found:
        def part(x: jax.Array | None) -> jax.Array | None:
            if x is None or schedule.rows == rows:
                return x
            return lax.dynamic_slice_in_dim(x, start, schedule.rows)

        # Tied to the loop: else XLA would widen all of a bfloat16 head before it.
        whole = schedule.rows == rows
        hidden, head = (
            x if whole else forms.pin_to_iteration(x, start) for x in (inputs.hidden, inputs.head)
        )
        row_ids = part(inputs.row_ids)
        of_rows = part(hidden) if row_ids is None else target_rows(hidden, row_ids)
        own = [part(x) for x in rest]
        assert of_rows is not None
        assert own[1] is not None
        return _of_rows(call, of_rows, head, inputs.bias, own[0], own[1], schedule.part)

    empty = Found(jnp.zeros(named.shape, jnp.float32), no_sums(rows, call.outputs))
    return forms.map_blocks(work, schedule.rows, inputs.num_rows, empty, arrays)


def _schedule(call: Call, inputs: Inputs) -> Schedule:
    """How much of the logits exists at a time."""
    head = inputs.head
    logits = jnp.dtype(call.definition.logits_dtype)
    sizes = (head.dtype.itemsize, logits.itemsize)
    width, size = call.definition.width(head), inputs.hidden.shape[1]
    return choose_schedule(inputs.num_targets, width, size, *sizes, call.k)


def _named(inputs: Inputs) -> jax.Array:
    """[R, 1 + C] int32: the given token and the extra ids."""
    return jnp.concatenate([inputs.token_ids[:, None], inputs.extra_token_ids], axis=1)


def _of_rows(
    call: Call,
    hidden: jax.Array,
    head: jax.Array,
    bias: jax.Array | None,
    temperatures: jax.Array | None,
    named: jax.Array,
    part: int,
) -> Found:
    """All columns of some rows at a time."""
    shard, width = call.shard, call.definition.width(head)
    x = shard.masked(call.definition.logits(hidden, head, bias))
    logits = shard.looked_up(
        named, width, lambda ids: jnp.take_along_axis(x, ids, axis=1).astype(jnp.float32)
    )
    t = finite_temperatures(temperatures)
    outputs = call.outputs._replace(k=min(call.k, width))

    def sums_of(x: jax.Array, given: jax.Array, t: jax.Array | None) -> RowSums:
        return xla.row_sums(Rows(x, temperatures=t), given, outputs)

    given, rows = logits[:, 0], x.shape[0]
    if part >= rows:
        sums = sums_of(x, given, t)
    else:
        sums = _in_parts(sums_of, part, x, (given, t), no_sums(rows, outputs))
    return Found(logits, of_all_shards(sums, call.k, temperatures, shard, width))


def _in_parts(
    read: Callable[..., RowSums], part: int, x: jax.Array, rest: forms.Tree, like: RowSums
) -> RowSums:
    """What `read` finds of x and the rest, some rows at a time; `like` has the results' shapes."""
    rows = x.shape[0]

    def some(j: jax.Array, found: RowSums) -> RowSums:
        start = jnp.minimum(j * part, rows - part)
        x_of, rest_of = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, part), (x, rest))
        own = read(forms.barrier(x_of), *rest_of)
        return jax.tree.map(
            lambda whole, own: lax.dynamic_update_slice_in_dim(whole, own, start, 0), found, own
        )

    return lax.fori_loop(0, -(-rows // part), some, forms.vary_like(like, (x, rest)))


def _by_columns(call: Call, schedule: Schedule, inputs: Inputs) -> Found:
    """All rows, some columns at a time."""
    shard, definition = call.shard, call.definition
    width = definition.width(inputs.head)
    hidden = target_rows(inputs.hidden, inputs.row_ids)
    product = read_columns.Product(hidden, inputs.head, inputs.bias, num_columns(shard, width))
    named = _named(inputs)
    local = named - shard.ids(width)[0]
    mine = (local >= 0) & (local < width)
    guess = read_columns.given_logits(definition, product, jnp.clip(local[:, 0], 0, width - 1))
    known = (named >= 0) & (named < shard.size(width))

    def of_all_shards_at(own: jax.Array, at: slice) -> jax.Array:
        """Logits [R, C] of named tokens, from the device that has each; NaN of no token."""
        every = shard.across_sum(jnp.where(mine[:, at], own, 0))
        return jnp.where(known[:, at], every, jnp.nan)

    first, others = slice(1), slice(1, None)
    given = of_all_shards_at(guess[:, None], first)[:, 0]
    rows = read_columns.RowInputs(local, given, finite_temperatures(inputs.temperatures))
    outputs = call.outputs._replace(k=min(call.k, width))
    sums, own = read_columns.read_columns(definition, schedule, outputs, product, rows)
    wrong = mine[:, 0] & known[:, 0] & (_bits(own[:, 0]) != _bits(guess))
    wrong &= ~(jnp.isnan(own[:, 0]) & jnp.isnan(guess))
    again = shard.across_maximum(jnp.any(wrong).astype(jnp.int32)) > 0

    def counted_again() -> tuple[jax.Array, jax.Array]:
        real = of_all_shards_at(own[:, first], first)[:, 0]
        # By the products that made the blocks: their bits count.
        cpu, default = (
            functools.partial(read_columns.recount, definition, piece)
            for piece in (schedule.piece, schedule.elsewhere or schedule.piece)
        )
        count = lowered_for(
            product, real, like=lambda _, x: jnp.zeros_like(x, jnp.int32), cpu=cpu, default=default
        )
        return forms.vary_like(real, given), forms.vary_like(count, sums.num_larger)

    def as_it_is() -> tuple[jax.Array, jax.Array]:
        return given, sums.num_larger

    given, num_larger = lax.cond(again, counted_again, as_it_is)
    sums = sums._replace(num_larger=num_larger)
    logits = jnp.concatenate([given[:, None], of_all_shards_at(own[:, others], others)], axis=1)
    return Found(logits, of_all_shards(sums, call.k, _usable(inputs), shard, width))


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _usable(inputs: Inputs) -> jax.Array | None:
    return None if inputs.temperatures is None else usable_temperatures(inputs.temperatures)


def _finish(call: Call, inputs: Inputs, found: Found) -> tuple[TopkLogprobs, RowScale]:
    """From sums to answers: those of rows and tokens without one are as `topk_logprobs` says."""
    active = active_rows(
        inputs.hidden.shape[0], inputs.num_targets, inputs.row_ids, inputs.num_rows
    )
    size = call.shard.size(call.definition.width(inputs.head))
    sums = found.sums
    out = answers(call.outputs, size, sums, inputs.token_ids, found.named, active, _usable(inputs))
    valid = active & jnp.isfinite(sums.maximum) & ~jnp.isnan(sums.sum_exp)
    log_sum = forms.logarithm(sums.sum_exp)
    return out, RowScale(jnp.where(valid, sums.maximum, 0), jnp.where(valid, log_sum, 0))
