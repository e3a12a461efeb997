"""`topk_logprobs` in two Pallas Mosaic GPU kernels that read the logits once.

Pass 1 (`pass1_rows`) reads each wanted row once, straight from the logits. Pass 2 (`pass2_finish`)
combines the results of pass 1's programs, re-reads K of the row's groups and writes the outputs.
XLA does one thing: it gathers the logits of `extra_token_ids`.

Calls that change logits take `row_parts`: the kernels skip forbidden tokens and those that a bias
names; XLA puts the latter back and makes the outputs, from a few numbers a row.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backends.answers import (
    RowParts,
    RowStatistics,
    finish,
    usable_temperatures,
    wanted_rows,
)
from pallas_kernels.backends.mosaic_gpu import pass1_rows, pass2_finish
from pallas_kernels.backends.mosaic_gpu.outputs import Mode, RowOutputs, num_selected
from pallas_kernels.backends.mosaic_gpu.pass1_rows import Extra
from pallas_kernels.backends.mosaic_gpu.pass2_finish import Inputs
from pallas_kernels.backends.mosaic_gpu.targets import Targets, make_targets, over_temperature
from pallas_kernels.backends.mosaic_gpu.tiling import Tiling, choose_tiling
from pallas_kernels.backends.parts import with_biased
from pallas_kernels.backends.xla.greedy import greedy_of_rows
from pallas_kernels.contract import changes as of_logits
from pallas_kernels.contract.changes import Changes
from pallas_kernels.contract.types import TopkLogprobs
from pallas_kernels.contract.wanted import Wanted
from pallas_kernels.lowering.blocks import vary_like
from pallas_kernels.meshes.vocab_shard import WHOLE
from pallas_kernels.topk import parts as from_parts


def topk_logprobs(
    logits: jax.Array,
    token_ids: jax.Array,
    wanted: Wanted,
    row_ids: jax.Array | None,
    num_rows: jax.Array | None,
    temperatures: jax.Array | None,
    extra_token_ids: jax.Array,
    changes: Changes | None = None,
    tiling: Tiling | None = None,
    interpret: Any = None,
) -> TopkLogprobs:
    """`pallas_kernels.topk_logprobs` for checked arguments: the separate path."""
    if changes is not None:
        parts = functools.partial(row_parts, tiling=tiling, interpret=interpret)
        rest = (row_ids, num_rows, temperatures, extra_token_ids, changes)
        return from_parts.topk_logprobs(parts, WHOLE, logits, token_ids, wanted, *rest)
    targets = make_targets(row_ids, num_rows, temperatures)
    num_targets = token_ids.shape[0]
    tiling = tiling or choose_tiling(num_targets, logits.shape[1], wanted.k, logits.dtype.name)
    out = run(tiling, wanted, "given", logits, num_targets, token_ids, targets, interpret)
    return answers(out, wanted, logits, targets, extra_token_ids)


def greedy_topk_logprobs(
    logits: jax.Array,
    wanted: Wanted,
    num_rows: jax.Array | None,
    temperatures: jax.Array | None,
    extra_token_ids: jax.Array,
    changes: Changes | None = None,
    tiling: Tiling | None = None,
    interpret: Any = None,
) -> TopkLogprobs:
    """`pallas_kernels.greedy_topk_logprobs` for checked arguments: the fused path.

    The greedy choice is the top 1 of pass 2, so one read of the logits serves both and no argmax is
    needed; its token rank is 1 by definition. Inclusive ranks are not: pass 1 would have to count
    what is equal to a maximum that it does not know yet, so XLA finds the choice before.
    """
    num_targets, vocabulary = logits.shape
    rest = (num_rows, temperatures, extra_token_ids, changes)
    if wanted.inclusive:
        chosen = greedy_of_rows(logits, of_logits.prepared(changes, vocabulary)).token_ids
        return topk_logprobs(logits, chosen, wanted, None, *rest, tiling, interpret)
    if changes is not None:
        return _greedy_changed(logits, wanted, *rest, tiling, interpret)
    targets = make_targets(None, num_rows, temperatures)
    tiling = tiling or choose_tiling(num_targets, vocabulary, max(wanted.k, 1), logits.dtype.name)
    out = run(tiling, wanted, "greedy", logits, num_targets, None, targets, interpret)
    return answers(out, wanted, logits, targets, extra_token_ids)


def _greedy_changed(
    logits: jax.Array,
    wanted: Wanted,
    num_rows: jax.Array | None,
    temperatures: jax.Array | None,
    extra_token_ids: jax.Array,
    changes: Changes | None,
    tiling: Tiling | None,
    interpret: Any,
) -> TopkLogprobs:
    """The fused path of changed logits; only where a row is invalid are they read once more."""
    num_targets, vocabulary = logits.shape
    temperatures = None if temperatures is None else usable_temperatures(temperatures)
    changes = of_logits.prepared(changes, vocabulary)
    nothing = jnp.full(num_targets, jnp.inf, jnp.float32)  # no logit is larger: nothing to count
    more = wanted._replace(k=max(wanted.k, 1))
    parts = row_parts(
        logits, nothing, more, None, num_rows, temperatures, changes, tiling, interpret
    )
    rows = wanted_rows(num_targets, num_targets, None, num_rows)
    valid = jnp.isfinite(parts.maximum) & ~jnp.isnan(parts.sum_exp)
    first = parts.top_ids[:, 0]

    def look() -> jax.Array:
        return jnp.where(valid, first, greedy_of_rows(logits, changes).token_ids)

    chosen = lax.cond(jnp.any(rows & ~valid), look, lambda: first)
    index = jnp.arange(num_targets, dtype=jnp.int32)
    extra = from_parts.named_changed(logits, index, extra_token_ids, WHOLE, changes)
    top = parts.top_logits[:, : wanted.k]
    statistics = RowStatistics(
        parts.maximum, parts.sum_exp, jnp.zeros_like(parts.num_larger), parts.weighted
    )
    return finish(
        wanted,
        vocabulary,
        statistics,
        chosen,
        jnp.concatenate([parts.top_logits[:, :1], top, extra], axis=1),
        jnp.where(top > -jnp.inf, parts.top_ids[:, : wanted.k], jnp.int32(-1)),
        rows,
        temperatures,
    )


def row_parts(
    logits: jax.Array,
    selected: jax.Array,
    wanted: Wanted,
    row_ids: jax.Array | None,
    num_rows: jax.Array | None,
    temperatures: jax.Array | None,
    changes: Changes | None = None,
    tiling: Tiling | None = None,
    interpret: Any = None,
) -> RowParts:
    """`xla.row_parts` on a GPU: one vocabulary shard's part of rows, or changed rows."""
    num_targets, k = selected.shape[0], wanted.k
    num_logits_rows, width = logits.shape
    targets = make_targets(row_ids, num_rows, temperatures)
    tiling = tiling or choose_tiling(num_targets, width, k, logits.dtype.name)
    allowed = None if changes is None else of_logits.unbiased(changes, width)
    out = run(tiling, wanted, "parts", logits, num_targets, selected, targets, interpret, allowed)
    parts = RowParts(
        maximum=out.statistics[:num_targets],
        sum_exp=out.statistics[num_targets:],
        num_larger=out.ranks,
        top_ids=out.ids[: num_targets * k].reshape(num_targets, k),
        top_logits=out.values[: num_targets * k].reshape(num_targets, k),
        weighted=out.entropy,
    )
    if changes is None or changes.bias is None:
        return parts
    rows = jnp.arange(num_targets, dtype=jnp.int32) if row_ids is None else row_ids
    ids, values = of_logits.biased(logits, jnp.clip(rows, 0, num_logits_rows - 1), changes)
    return with_biased(parts, ids, values, selected, wanted, temperatures)


def run(
    tiling: Tiling,
    wanted: Wanted,
    mode: Mode,
    logits: jax.Array,
    num_targets: int,
    chosen: jax.Array | None,
    targets: Targets,
    interpret: Any,
    allowed: jax.Array | None = None,
) -> RowOutputs:
    """Run both passes; chosen [R] is what `pass1_rows.read_rows` counts by.

    allowed: [R, words] int32, or None; for "parts" alone.
    """
    assert allowed is None or mode == "parts"
    flat = None if allowed is None else allowed.reshape(-1)
    with_groups = num_selected(wanted.k, mode) > 0
    extra = Extra(wanted.entropy, wanted.inclusive)
    partials, groups = pass1_rows.read_rows(
        tiling, logits, num_targets, chosen, targets, with_groups, interpret, extra, flat
    )
    token_ids = chosen if mode == "given" else None
    inputs = Inputs(logits.reshape(-1), token_ids, partials, groups, targets, flat)
    rows = logits.shape[0]
    out = pass2_finish.finish_rows(tiling, wanted, mode, inputs, rows, num_targets, interpret)
    return vary_like(out, (logits, chosen, targets, allowed))


def answers(
    out: RowOutputs,
    wanted: Wanted,
    logits: jax.Array,
    targets: Targets,
    extra_token_ids: jax.Array,
) -> TopkLogprobs:
    """The outputs of pass 2, and the logprobs of the extra ids [R, C]."""
    num_targets, num_extra = extra_token_ids.shape
    k = wanted.k
    top_logits = None
    if wanted.top_logits:
        empty = jnp.zeros((num_targets, 0), jnp.float32)
        top_logits = out.top_logits.reshape(num_targets, k) if k else empty
    return TopkLogprobs(
        token_ids=out.ids.reshape(num_targets, k + 1),
        logprobs=out.values.reshape(num_targets, k + 1),
        token_ranks=out.ranks,
        extra_logprobs=(
            extra_logprobs(out, logits, targets, extra_token_ids)
            if num_extra
            else jnp.zeros((num_targets, 0), jnp.float32)
        ),
        log_sum_exp=out.log_sum_exp,
        entropy=out.entropy,
        top_logits=top_logits,
    )


def extra_logprobs(
    out: RowOutputs, logits: jax.Array, targets: Targets, extra_token_ids: jax.Array
) -> jax.Array:
    """[R, C] float32; pass 2 left NaN in the statistics of rows that have no answer."""
    num_logits_rows, vocabulary = logits.shape
    num_targets = extra_token_ids.shape[0]
    rows = targets.row_ids
    rows = jnp.arange(num_targets, dtype=jnp.int32) if rows is None else rows
    rows = jnp.clip(rows, 0, num_logits_rows - 1)[:, None]
    found = logits.at[rows, jnp.clip(extra_token_ids, 0, vocabulary - 1)].get()
    scaled = found.astype(jnp.float32) - out.statistics[:num_targets, None]
    if targets.temperatures is not None:
        temperatures = usable_temperatures(targets.temperatures)[:, None]
        scaled = over_temperature(scaled, temperatures)
    logprobs = scaled - out.statistics[num_targets:, None]
    known = (extra_token_ids >= 0) & (extra_token_ids < vocabulary)
    return jnp.where(known, logprobs, jnp.float32(jnp.nan))
