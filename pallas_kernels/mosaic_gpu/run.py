"""`topk_logprobs` in two Pallas Mosaic GPU kernels that read the logits once.

Pass 1 (`pass1_rows`) reads each wanted row once, straight from the logits. Pass 2 (`pass2_finish`)
combines the results of pass 1's programs, re-reads K of the row's groups and writes the outputs.
XLA does one thing: it gathers the logits of `extra_token_ids`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.blocks import vary_like
from pallas_kernels.finish import RowParts, usable_temperatures
from pallas_kernels.mosaic_gpu import pass1_rows, pass2_finish
from pallas_kernels.mosaic_gpu.pass2_finish import Inputs, Mode, RowOutputs
from pallas_kernels.mosaic_gpu.targets import Targets, make_targets, over_temperature
from pallas_kernels.mosaic_gpu.tiling import Tiling, choose_tiling
from pallas_kernels.types import TopkLogprobs


def topk_logprobs(
    logits: jax.Array,
    token_ids: jax.Array,
    k: int,
    row_ids: jax.Array | None,
    num_rows: jax.Array | None,
    temperatures: jax.Array | None,
    extra_token_ids: jax.Array,
    tiling: Tiling | None = None,
    interpret: Any = None,
) -> TopkLogprobs:
    """`pallas_kernels.topk_logprobs` for checked arguments: the separate path."""
    targets = make_targets(row_ids, num_rows, temperatures)
    tiling = tiling or choose_tiling(token_ids.shape[0], logits.shape[1], k, logits.dtype.name)
    out = run(tiling, k, "given", logits, token_ids.shape[0], token_ids, targets, interpret)
    return answers(out, k, logits, targets, extra_token_ids)


def greedy_topk_logprobs(
    logits: jax.Array,
    k: int,
    num_rows: jax.Array | None,
    temperatures: jax.Array | None,
    extra_token_ids: jax.Array,
    tiling: Tiling | None = None,
    interpret: Any = None,
) -> TopkLogprobs:
    """`pallas_kernels.greedy_topk_logprobs` for checked arguments: the fused path.

    The greedy choice is the top 1 of pass 2, so one read of the logits serves both and no argmax is
    needed; its token rank is 1 by definition.
    """
    num_targets, vocabulary = logits.shape
    targets = make_targets(None, num_rows, temperatures)
    tiling = tiling or choose_tiling(num_targets, vocabulary, max(k, 1), logits.dtype.name)
    out = run(tiling, k, "greedy", logits, num_targets, None, targets, interpret)
    return answers(out, k, logits, targets, extra_token_ids)


def row_parts(
    logits: jax.Array,
    selected: jax.Array,
    k: int,
    row_ids: jax.Array | None,
    num_rows: jax.Array | None,
    temperatures: jax.Array | None,
    tiling: Tiling | None = None,
    interpret: Any = None,
) -> RowParts:
    """`xla.row_parts` on a GPU: one vocabulary shard's part of rows."""
    num_targets = selected.shape[0]
    targets = make_targets(row_ids, num_rows, temperatures)
    tiling = tiling or choose_tiling(num_targets, logits.shape[1], k, logits.dtype.name)
    out = run(tiling, k, "parts", logits, num_targets, selected, targets, interpret)
    return RowParts(
        maximum=out.statistics[:num_targets],
        sum_exp=out.statistics[num_targets:],
        num_larger=out.ranks,
        top_ids=out.ids[: num_targets * k].reshape(num_targets, k),
        top_logits=out.values[: num_targets * k].reshape(num_targets, k),
    )


def run(
    tiling: Tiling,
    k: int,
    mode: Mode,
    logits: jax.Array,
    num_targets: int,
    chosen: jax.Array | None,
    targets: Targets,
    interpret: Any,
) -> RowOutputs:
    """Run both passes; chosen [R] is what `pass1_rows.read_rows` counts by."""
    with_groups = pass2_finish.num_selected(k, mode) > 0
    partials, groups = pass1_rows.read_rows(
        tiling, logits, num_targets, chosen, targets, with_groups, interpret
    )
    token_ids = chosen if mode == "given" else None
    inputs = Inputs(logits.reshape(-1), token_ids, partials, groups, targets)
    out = pass2_finish.finish_rows(tiling, k, mode, inputs, logits.shape[0], num_targets, interpret)
    return vary_like(out, (logits, chosen, targets))


def answers(
    out: RowOutputs,
    k: int,
    logits: jax.Array,
    targets: Targets,
    extra_token_ids: jax.Array,
) -> TopkLogprobs:
    """The outputs of pass 2, and the logprobs of the extra ids [R, C]."""
    num_targets, num_extra = extra_token_ids.shape
    return TopkLogprobs(
        token_ids=out.ids.reshape(num_targets, k + 1),
        logprobs=out.values.reshape(num_targets, k + 1),
        token_ranks=out.ranks,
        extra_logprobs=(
            extra_logprobs(out, logits, targets, extra_token_ids)
            if num_extra
            else jnp.zeros((num_targets, 0), jnp.float32)
        ),
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
