"""The answers of one device's part of a call: rows of hidden states, all of the head or a shard.

What travels where the head is split over the vocabulary, for R rows and C extra ids: two sums of R
and R * C words, for the given tokens' logits and the extra ids'. Then R * (3 + 2 K) words gathered
from every shard (R more with entropy), and one word that says whether to count again.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backends.answers import (
    SumRows,
    answers,
    is_active,
    of_all_shards,
    usable_temperatures,
)
from pallas_kernels.backends.read import row_sums
from pallas_kernels.backends.row_totals import inverse_of
from pallas_kernels.contract.rows import Outputs, Rows, RowSums, no_sums
from pallas_kernels.contract.types import TopkLogprobs
from pallas_kernels.linear import read_columns
from pallas_kernels.linear.read_columns import ColumnSums
from pallas_kernels.linear.schedule import LinearSchedule, choose_linear_schedule
from pallas_kernels.linear.tiles import read_in_tiles
from pallas_kernels.linear.types import Call, LinearInputs, LogprobScale
from pallas_kernels.lowering import forms
from pallas_kernels.lowering.implementation import use_implementation
from pallas_kernels.lowering.platforms import lowered_for
from pallas_kernels.meshes.placement import VocabShard
from pallas_kernels.numbers import ordered_keys
from pallas_kernels.numbers.logarithm import log_of_total


def target_rows(x: jax.Array, row_ids: jax.Array | None) -> jax.Array:
    """x [N, H] -> [R, H]; a row outside is clamped."""
    return x if row_ids is None else x.at[row_ids].get(mode="clip")


def inverse_temperatures(temperatures: jax.Array | None) -> jax.Array | None:
    """1 / T [R]; 1 where T is not usable."""
    if temperatures is None:
        return None
    return inverse_of(usable_temperatures(temperatures), temperatures.shape[0])


def num_columns(shard: VocabShard, width: int) -> jax.Array:
    """How many of this device's columns are the vocabulary's: [] int32, 0 to `width`."""
    return jnp.clip(shard.size(width) - shard.ids(width)[0], 0, width)


def row_sums_of(call: Call) -> SumRows:
    """The read of rows: of a top K by a TPU's kernel. Else nearly all the time is the product's."""
    backends = ("mosaic_tpu",) if call.k else ()

    def read(rows: Rows, selected: jax.Array, outputs: Outputs) -> RowSums:
        with use_implementation(call.implementation):
            return row_sums(rows, selected, outputs, backends)

    return read


def with_scale(call: Call, inputs: LinearInputs) -> tuple[TopkLogprobs, LogprobScale]:
    """The call, on one device's part of hidden and head, and what its logprobs are relative to."""
    if inputs.temperatures is not None:
        inputs = inputs._replace(temperatures=usable_temperatures(inputs.temperatures))
    head, dtype = inputs.head, jnp.dtype(call.definition.logits_dtype)
    rows, size = inputs.num_targets, inputs.hidden.shape[1]
    width = call.definition.width(head)
    schedule = call.schedule or choose_linear_schedule(
        rows, width, size, head.dtype.itemsize, dtype.itemsize, call.k
    )
    if call.row_tile is not None:
        sums, named = read_in_tiles(call, inputs, _named(inputs))
    else:
        read = _by_columns if schedule.columns < width else _by_rows
        sums, named = read(call, schedule, inputs)
    # Of rows of hidden states as of those of logits.
    active = is_active(Rows(inputs.hidden, inputs.token_ids, inputs.row_ids, inputs.num_rows))
    vocab_size, t = call.shard.size(width), inputs.temperatures
    out = answers(call.outputs, vocab_size, sums, inputs.token_ids, named, active, t)
    valid = active & jnp.isfinite(sums.maximum) & ~jnp.isnan(sums.sum_exp)
    log_sum = log_of_total(sums.sum_exp)
    return out, LogprobScale(jnp.where(valid, sums.maximum, 0), jnp.where(valid, log_sum, 0))


def _named(inputs: LinearInputs) -> jax.Array:
    """[R, 1 + C] int32: the given token and the extra ids."""
    return jnp.concatenate([inputs.token_ids[:, None], inputs.extra_token_ids], axis=1)


def _by_rows(call: Call, schedule: LinearSchedule, inputs: LinearInputs) -> ColumnSums:
    """All columns, some rows at a time."""
    shard, rows, width = call.shard, inputs.num_targets, call.definition.width(inputs.head)
    rest = (inputs.row_ids, inputs.temperatures, _named(inputs))

    def work(start: jax.Array) -> ColumnSums:
        hidden, head = inputs.hidden, inputs.head
        if schedule.rows < rows:
            # Tied to the loop: else XLA would widen all of a bfloat16 head before it.
            hidden, head = (forms.pin_to_iteration(x, start) for x in (hidden, head))
        row_ids, temperatures, named = forms.rows_from(rest, start, schedule.rows)
        if row_ids is None:
            hidden = forms.rows_from(hidden, start, schedule.rows)
        of_rows = target_rows(hidden, row_ids)
        x = shard.masked(call.definition.logits(of_rows, head, inputs.bias))
        logits = shard.named_logits(x, jnp.arange(schedule.rows, dtype=jnp.int32), named)
        outputs = call.outputs._replace(k=min(call.k, width))
        arrays, part = (x, logits[:, 0], temperatures), min(schedule.part, schedule.rows)

        def sums_of(start: jax.Array) -> RowSums:
            x, selected, t = forms.rows_from(arrays, start, part)
            x = x if part == schedule.rows else forms.barrier(x)
            return row_sums_of(call)(Rows(x, temperatures=t), selected, outputs)

        sums = forms.map_blocks(sums_of, part, None, no_sums(schedule.rows, outputs), arrays)
        return ColumnSums(of_all_shards(sums, call.k, temperatures, shard, width), logits)

    empty = ColumnSums(no_sums(rows, call.outputs), jnp.zeros(rest[2].shape, jnp.float32))
    # Every vocabulary shard has the same results: they vary with the rows alone.
    return forms.map_blocks(work, schedule.rows, inputs.num_rows, empty, (inputs.hidden, rest))


def _by_columns(call: Call, schedule: LinearSchedule, inputs: LinearInputs) -> ColumnSums:
    """All rows, some columns at a time."""
    shard, definition = call.shard, call.definition
    width = definition.width(inputs.head)
    hidden = target_rows(inputs.hidden, inputs.row_ids)
    product = read_columns.Product(hidden, inputs.head, inputs.bias, num_columns(shard, width))
    named = _named(inputs)
    local = named - shard.ids(width)[0]
    is_on_shard = (local >= 0) & (local < width)
    guess = read_columns.given_logits(definition, product, jnp.clip(local[:, 0], 0, width - 1))
    is_token = (named >= 0) & (named < shard.size(width))

    def of_all_shards_at(local_logits: jax.Array, at: slice) -> jax.Array:
        """Logits [R, C] of named tokens, from the device that has each; NaN of no token."""
        logits = shard.across_sum(jnp.where(is_on_shard[:, at], local_logits, 0))
        return jnp.where(is_token[:, at], logits, jnp.nan)

    first, others = slice(1), slice(1, None)
    selected = of_all_shards_at(guess[:, None], first)[:, 0]
    rows = read_columns.RowInputs(local, selected, inputs.temperatures)
    outputs = call.outputs._replace(k=min(call.k, width))
    read = row_sums_of(call)
    sums, named_logits = read_columns.read_columns(
        definition, schedule, outputs, read, product, rows
    )
    bits, guessed = map(ordered_keys.as_integers, (named_logits[:, 0], guess))
    wrong = is_on_shard[:, 0] & is_token[:, 0] & (bits != guessed)
    wrong &= ~(jnp.isnan(named_logits[:, 0]) & jnp.isnan(guess))
    again = shard.across_maximum(jnp.any(wrong).astype(jnp.int32)) > 0

    def counted_again() -> tuple[jax.Array, jax.Array]:
        real = of_all_shards_at(named_logits[:, first], first)[:, 0]
        # By the products that made the blocks: their bits count.
        cpu, default = (
            functools.partial(read_columns.recount, definition, piece)
            for piece in (schedule.piece, schedule.elsewhere or schedule.piece)
        )
        count = lowered_for(
            product, real, like=lambda _, x: jnp.zeros_like(x, jnp.int32), cpu=cpu, default=default
        )
        return forms.vary_like(real, selected), forms.vary_like(count, sums.num_larger)

    def as_it_is() -> tuple[jax.Array, jax.Array]:
        return selected, sums.num_larger

    selected, num_larger = lax.cond(again, counted_again, as_it_is)
    sums = sums._replace(num_larger=num_larger)
    logits = jnp.concatenate(
        [selected[:, None], of_all_shards_at(named_logits[:, others], others)], axis=1
    )
    return ColumnSums(of_all_shards(sums, call.k, inputs.temperatures, shard, width), logits)
