"""`topk_logprobs` in Pallas Mosaic GPU kernels that read the logits once.

Pass 1 (`mosaic_rows`) reads each wanted row once, straight from the logits; pass 2
(`mosaic_select`) re-reads K of the row's groups, and does not exist for K = 0. The rest, a few
numbers a row, is left to XLA: combining splits, `xla.finish`, a gather of the extra ids' logits.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import mosaic_rows, mosaic_select, xla
from pallas_kernels.mosaic_tiling import Tiling, choose_tiling
from pallas_kernels.types import TopkLogprobs


class Targets(NamedTuple):
    """Which rows are wanted, and at which temperature; see `pallas_kernels.topk_logprobs`."""

    logits: jax.Array  # [N, V]
    row_ids: jax.Array  # [R] int32
    num_rows: jax.Array  # int32 scalar
    temperatures: jax.Array | None  # [R] float32, usable


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
    targets = make_targets(logits, token_ids.shape[0], row_ids, num_rows, temperatures)
    tiling = tiling or choose_tiling(token_ids.shape[0], logits.shape[1], k, logits.dtype.name)
    statistics, selected, groups = read_rows(tiling, targets, token_ids, interpret)
    known = (token_ids >= 0) & (token_ids < logits.shape[1])
    selected = jnp.where(known, selected, jnp.float32(jnp.nan))
    if k == 0:
        top_ids = jnp.zeros((token_ids.shape[0], 0), jnp.int32)
        top_logits = jnp.zeros((token_ids.shape[0], 0), jnp.float32)
    else:
        top_ids, top_logits = mosaic_select.select_top_k(
            tiling,
            k,
            logits,
            groups,
            targets.row_ids,
            targets.num_rows[None],
            None,
            interpret,
        )
    return finish(targets, statistics, token_ids, selected, top_ids, top_logits, extra_token_ids)


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
    width = max(k, 1)
    targets = make_targets(logits, num_targets, None, num_rows, temperatures)
    tiling = tiling or choose_tiling(num_targets, vocabulary, width, logits.dtype.name)
    anything = jnp.zeros(num_targets, jnp.int32)
    statistics, _, groups = read_rows(tiling, targets, anything, interpret)
    valid = jnp.isfinite(statistics.maximum) & ~jnp.isnan(statistics.sum_exp)
    ids, values = mosaic_select.select_top_k(
        tiling,
        width,
        logits,
        groups,
        targets.row_ids,
        targets.num_rows[None],
        (~valid).astype(jnp.int32),
        interpret,
    )
    return finish(
        targets,
        statistics._replace(num_larger=anything),
        ids[:, 0],
        values[:, 0],
        ids[:, :k],
        values[:, :k],
        extra_token_ids,
    )


def make_targets(
    logits: jax.Array,
    num_targets: int,
    row_ids: jax.Array | None,
    num_rows: jax.Array | None,
    temperatures: jax.Array | None,
) -> Targets:
    """The same with every default filled in."""
    return Targets(
        logits,
        jnp.arange(num_targets, dtype=jnp.int32) if row_ids is None else row_ids,
        jnp.int32(num_targets) if num_rows is None else num_rows,
        None if temperatures is None else xla.usable_temperatures(temperatures),
    )


def read_rows(
    tiling: Tiling, targets: Targets, token_ids: jax.Array, interpret: Any
) -> tuple[xla.RowStatistics, jax.Array, jax.Array]:
    """Pass 1 with its splits combined: statistics, the given tokens' logits, group maxima."""
    scales = jnp.full(token_ids.shape, mosaic_rows.LOG2_E, jnp.float32)
    if targets.temperatures is not None:
        usable = jnp.where(jnp.isnan(targets.temperatures), 1, targets.temperatures)
        scales = scales / usable
    maxima, sums, counts, selected, groups = mosaic_rows.read_rows(
        tiling,
        targets.logits,
        token_ids,
        targets.row_ids,
        targets.num_rows[None],
        scales,
        interpret,
    )
    maximum = jnp.max(maxima, axis=1)
    shifted = (maxima - maximum[:, None]) * scales[:, None]
    # A part without a finite logit has a sum of 0, which must not meet an infinite factor.
    parts = jnp.where(maxima == -jnp.inf, jnp.float32(0), sums * jnp.exp2(shifted))
    statistics = xla.RowStatistics(
        maximum, jnp.sum(parts, axis=1), jnp.sum(counts, axis=1).astype(jnp.int32)
    )
    return statistics, selected, groups


def finish(
    targets: Targets,
    statistics: xla.RowStatistics,
    token_ids: jax.Array,
    selected: jax.Array,
    top_ids: jax.Array,
    top_logits: jax.Array,
    extra_token_ids: jax.Array,
) -> TopkLogprobs:
    """Outputs from compact results; those of skipped rows may hold anything before this."""
    num_rows, vocabulary = targets.logits.shape
    index = jnp.arange(token_ids.shape[0], dtype=jnp.int32)
    wanted = (index < targets.num_rows) & (targets.row_ids >= 0) & (targets.row_ids < num_rows)
    rows = jnp.clip(targets.row_ids, 0, num_rows - 1)[:, None]
    extra = targets.logits.at[rows, jnp.clip(extra_token_ids, 0, vocabulary - 1)].get()
    known = (extra_token_ids >= 0) & (extra_token_ids < vocabulary)
    extra = jnp.where(known, extra.astype(jnp.float32), jnp.float32(jnp.nan))
    return xla.finish(
        statistics,
        token_ids,
        jnp.concatenate([selected[:, None], top_logits, extra], axis=1),
        jnp.where(top_logits > -jnp.inf, top_ids, jnp.int32(-1)),
        wanted,
        targets.temperatures,
    )
