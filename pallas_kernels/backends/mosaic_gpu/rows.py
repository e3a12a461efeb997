"""`topk_logprobs` in two Pallas Mosaic GPU kernels that read the logits once.

Pass 1 (`rows_kernel`) reads each wanted row once, straight from the logits. Pass 2
(`finish_kernel`) combines the results of pass 1's programs, re-reads K of the row's groups and
writes the outputs. XLA does one thing: it gathers the logits of `extra_token_ids`.

Calls that change logits take `row_sums`: the kernels skip forbidden tokens and those that a bias
names; XLA puts the latter back and makes the outputs, from a few numbers a row.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.backends.answers import usable_temperatures, with_biased
from pallas_kernels.backends.mosaic_gpu import cluster_kernel, finish_kernel
from pallas_kernels.backends.mosaic_gpu.reading import make_targets, over_temperature
from pallas_kernels.backends.mosaic_gpu.rows_kernel import read_rows
from pallas_kernels.backends.mosaic_gpu.schedule import Schedule, choose_schedule
from pallas_kernels.contract import changes as of_logits
from pallas_kernels.contract.rows import Outputs, Rows, RowSums
from pallas_kernels.contract.types import TopkLogprobs
from pallas_kernels.lowering.forms import vary_like
from pallas_kernels.meshes.placement import WHOLE


def topk_logprobs(rows: Rows, outputs: Outputs, schedule: Schedule | None = None) -> TopkLogprobs:
    """`pallas_kernels.topk_logprobs` of whole, unchanged rows; without token ids, of the choice.

    The greedy choice is the top 1 of pass 2, so one read of the logits serves both and no argmax is
    needed; its token rank is 1 by definition. Inclusive ranks are not: pass 1 would have to count
    what is equal to a maximum that it does not know yet.
    """
    assert rows.changes is None
    mode: finish_kernel.Mode = "greedy" if rows.token_ids is None else "given"
    assert not (mode == "greedy" and outputs.inclusive)
    out = run(schedule, outputs, mode, rows, rows.token_ids)
    return answers(out, outputs, rows)


def row_sums(
    rows: Rows, selected: jax.Array, outputs: Outputs, schedule: Schedule | None = None
) -> RowSums:
    """`xla.rows.row_sums` on a GPU: one vocabulary shard's part of rows, or changed rows."""
    changes = rows.changes
    allowed = None if changes is None else of_logits.unbiased(changes, rows.logits.shape[1])
    out = run(schedule, outputs, "parts", rows, selected, allowed)
    return with_biased(part_sums(out, rows.num_targets, outputs.k), rows, selected, outputs)


def part_sums(out: finish_kernel.RowOutputs[jax.Array], num_targets: int, k: int) -> RowSums:
    """What pass 2 has written for "parts"."""
    return RowSums(
        maximum=out.statistics[:num_targets],
        sum_exp=out.statistics[num_targets:],
        num_larger=out.ranks,
        top_ids=out.ids[: num_targets * k].reshape(num_targets, k),
        top_logits=out.values[: num_targets * k].reshape(num_targets, k),
        weighted=out.entropy,
    )


def run(
    schedule: Schedule | None,
    outputs: Outputs,
    mode: finish_kernel.Mode,
    rows: Rows,
    chosen: jax.Array | None,
    allowed: jax.Array | None = None,
) -> finish_kernel.RowOutputs[jax.Array]:
    """Run both passes; chosen [R] is what `read_rows` counts by.

    allowed: [R, words] int32, or None; for "parts" alone.
    """
    assert allowed is None or mode == "parts"
    flat = None if allowed is None else allowed.reshape(-1)
    logits, num_targets = rows.logits, rows.num_targets
    targets = make_targets(rows.row_ids, rows.num_rows, rows.temperatures)
    selected = finish_kernel.num_selected(outputs.k, mode)
    schedule = schedule or choose_schedule(
        num_targets, logits.shape[1], selected, logits.dtype.name
    )
    if cluster_kernel.fits(schedule):
        out = cluster_kernel.topk_rows(
            schedule, outputs, mode, logits, num_targets, chosen, targets, flat
        )
    else:
        partials, groups = read_rows(
            schedule, logits, num_targets, chosen, targets, selected > 0, outputs, flat
        )
        token_ids = chosen if mode == "given" else None
        inputs = finish_kernel.Inputs(
            logits.reshape(-1), token_ids, partials, groups, targets, flat
        )
        out = finish_kernel.finish_rows(
            schedule, outputs, mode, inputs, logits.shape[0], num_targets
        )
    return vary_like(out, (logits, chosen, targets, allowed))


def answers(out: finish_kernel.RowOutputs[jax.Array], outputs: Outputs, rows: Rows) -> TopkLogprobs:
    """The outputs of pass 2, and the logprobs of the extra ids [R, C]."""
    num_targets, k = rows.num_targets, outputs.k
    none = jnp.zeros((num_targets, 0), jnp.float32)
    top_logits = none if outputs.top_logits else None
    if out.top_logits is not None:
        top_logits = out.top_logits.reshape(num_targets, k)
    return TopkLogprobs(
        token_ids=out.ids.reshape(num_targets, k + 1),
        logprobs=out.values.reshape(num_targets, k + 1),
        token_ranks=out.ranks,
        extra_logprobs=extra_logprobs(out, rows) if rows.extra_ids.shape[1] else none,
        log_sum_exp=out.log_sum_exp,
        entropy=out.entropy,
        top_logits=top_logits,
    )


def extra_logprobs(out: finish_kernel.RowOutputs[jax.Array], rows: Rows) -> jax.Array:
    """[R, C] float32; pass 2 left NaN in the statistics of rows that have no answer."""
    num_targets = rows.num_targets
    found = WHOLE.named_logits(rows.logits, rows.places, rows.extra_ids)
    scaled = found - out.statistics[:num_targets, None]
    if rows.temperatures is not None:
        scaled = over_temperature(scaled, usable_temperatures(rows.temperatures)[:, None])
    return scaled - out.statistics[num_targets:, None]
