"""`topk_logprobs` in Pallas Mosaic GPU kernels that read the logits once.

Pass 1 (`groups_kernel`) reads each wanted row once, straight from the logits. Pass 2
(`finish_kernel`) adds up its groups, re-reads K of its parts and writes the outputs. XLA does one
thing: it gathers the logits of `extra_token_ids`.

Calls that change logits take `row_sums`: XLA makes the outputs, from a few numbers a row. Pass 1
skips forbidden tokens and those that a bias names. The groups of the latter are summed again
(`biased_groups`), and pass 2 takes them instead; XLA puts these tokens back among the top K.

Of rows that several devices share, XLA adds up the groups too (`part_sums`, `row_totals`).
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.backends.answers import in_order, usable_temperatures
from pallas_kernels.backends.groups import WIDTH, GroupSums, Top, number_of_groups
from pallas_kernels.backends.mosaic_gpu import (
    cluster_kernel,
    finish_kernel,
    groups_kernel,
    row_sum,
)
from pallas_kernels.backends.mosaic_gpu.changes import biased_groups
from pallas_kernels.backends.mosaic_gpu.changes.row_changes import FlatChanges
from pallas_kernels.backends.mosaic_gpu.groups_kernel import GroupOutputs
from pallas_kernels.backends.mosaic_gpu.reading import make_targets
from pallas_kernels.backends.mosaic_gpu.schedule import (
    Schedule,
    choose_read_schedule,
    choose_schedule,
)
from pallas_kernels.backends.row_totals import PartSums
from pallas_kernels.backends.xla.tails import last_columns, tail_of_shard
from pallas_kernels.contract import changes as of_logits
from pallas_kernels.contract.rows import Outputs, Rows, RowSums
from pallas_kernels.contract.types import TopkLogprobs
from pallas_kernels.lowering.forms import vary_like
from pallas_kernels.meshes.placement import WHOLE
from pallas_kernels.numbers.ordered_keys import is_counted
from pallas_kernels.numbers.quotient import quotient

HEAD, LAST = WIDTH, 2 * WIDTH  # columns at the ends of a shard that may be in none of its groups


def topk_logprobs(rows: Rows, outputs: Outputs, schedule: Schedule | None = None) -> TopkLogprobs:
    """`pallas_kernels.topk_logprobs` of whole, unchanged rows."""
    assert rows.changes is None
    _, out = _run(schedule, outputs, "given", rows, rows.token_ids)
    return _answers(out, outputs, rows)


def row_sums(
    rows: Rows, selected: jax.Array, outputs: Outputs, schedule: Schedule | None = None
) -> RowSums:
    """`xla.rows.row_sums` on a GPU."""
    changes, allowed, biased = rows.changes, None, None
    if changes is not None:
        allowed = of_logits.unbiased(changes, rows.logits.shape[1])
        if changes.bias is not None:
            biased = biased_groups.biased_of(rows)
    _, finished = _run(schedule, outputs, "logits", rows, selected, allowed, biased=biased)
    count = rows.num_targets
    larger, ids, logits = finished.ranks, *top_of(finished, count, outputs.k)
    if biased is not None:
        larger, ids, logits = _with_biased(larger, ids, logits, rows, selected, outputs)
    maximum, total = finished.statistics[:count], finished.statistics[count:]
    return RowSums(maximum, total, larger, ids, logits, finished.entropy)


def largest_logits(rows: Rows, k: int) -> Top:
    """The top k of rows; -1 where there is no such token. No group is added up for it."""
    width, infinite = rows.logits.shape[1], jnp.full(rows.num_targets, jnp.inf, jnp.float32)
    allowed = None if rows.changes is None else of_logits.unbiased(rows.changes, width)
    _, finished = _run(None, Outputs(k), "top", rows, infinite, allowed)
    ids, logits = top_of(finished, rows.num_targets, k)
    if rows.changes is not None and rows.changes.bias is not None:
        _, ids, logits = _with_biased(finished.ranks, ids, logits, rows, infinite, Outputs(k))
    return Top(jnp.where(logits > -jnp.inf, ids, jnp.int32(-1)), logits)


def _with_biased(
    larger: jax.Array,
    top_ids: jax.Array,
    top_logits: jax.Array,
    rows: Rows,
    selected: jax.Array,
    outputs: Outputs,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The count [R], and the top K [R, K], of rows as kernels leave them, and of biased tokens."""
    assert rows.changes is not None
    ids, logits = of_logits.biased(rows.logits, rows.places, rows.changes)
    limit = selected[:, None]
    counts = is_counted(logits, limit, outputs.inclusive) & (logits > -jnp.inf)
    top = in_order(top_ids, top_logits, ids, logits, outputs.k)
    return larger + counts.sum(axis=1, dtype=jnp.int32), *top


def part_sums(
    rows: Rows,
    following: jax.Array | None,
    offset: jax.Array,
    selected: jax.Array,
    outputs: Outputs,
) -> PartSums:
    """`xla.rows.part_sums` on a GPU."""
    if following is None:
        return _whole_part(rows, selected, outputs)
    if rows.changes is not None:  # a copy: a run of tokens may begin anywhere in its words
        changed = of_logits.apply(rows.logits[rows.places], rows.changes)
        rows = rows._replace(logits=changed, row_ids=None, changes=None)
    return _split_part(rows, following, offset, selected, outputs)


def _whole_part(rows: Rows, selected: jax.Array, outputs: Outputs) -> PartSums:
    """The sums of rows whose groups the columns hold, but for the one in which they end."""
    changes, width = rows.changes, rows.logits.shape[1]
    allowed = None if changes is None else of_logits.unbiased(changes, width)
    schedule = schedule_of(rows, outputs.k, width)
    out, finished = _run(schedule, outputs, "top", rows, selected, allowed)
    groups = groups_of(out, schedule, number_of_groups(width))
    larger, ids, logits = finished.ranks, *top_of(finished, rows.num_targets, outputs.k)
    if changes is not None and changes.bias is not None:
        biased = biased_groups.biased_of(rows)
        groups = biased_groups.put_biased(
            groups, biased_groups.read_biased(rows, biased, weighted=outputs.entropy)
        )
        larger, ids, logits = _with_biased(larger, ids, logits, rows, selected, outputs)
    return PartSums(groups, larger, ids, logits)


def _split_part(
    rows: Rows, following: jax.Array, offset: jax.Array, selected: jax.Array, outputs: Outputs
) -> PartSums:
    """The sums of a shard's columns that cut groups at both ends.

    One read leaves the groups that the columns hold; what is at their ends are small arrays, of
    which kernels make the rest.
    """
    width, dtype = rows.logits.shape[1], rows.logits.dtype
    num_whole = width // WIDTH - 1
    tokens = num_whole * WIDTH
    schedule = schedule_of(rows, outputs.k, tokens)
    out, finished = _run(schedule, outputs, "top", rows, selected, offset=offset.reshape(1))
    last = rows.logits[:, width - last_columns(width) :][rows.places]
    tail = tail_of_shard(last, width, following.astype(dtype), offset)
    tail_schedule = choose_read_schedule(rows.num_targets, LAST, dtype.name)
    of_tail = groups_kernel.read_targets(
        tail_schedule,
        tail.reshape(-1, LAST),
        rows.num_targets,
        groups_kernel.GroupInputs(make_targets(None, rows.num_rows, rows.temperatures)),
        weighted=outputs.entropy,
        inclusive=False,
    )
    groups = jax.tree.map(
        lambda x, y: jnp.concatenate([x, y], axis=1),
        groups_of(out, schedule, num_whole),
        groups_of(of_tail, tail_schedule, 2),
    )
    # The columns before the first group and behind the last one that is whole, and no other.
    ids = np.concatenate([np.arange(HEAD), np.arange(width - LAST, width)]).astype(np.int32)
    outside = (ids < offset) | (ids >= offset + tokens)
    ends = [rows.logits[:, :HEAD], rows.logits[:, width - LAST :]]
    edges = jnp.concatenate([x[rows.places] for x in ends], axis=1)
    of_edges = Rows(
        jnp.where(outside[None], edges, jnp.asarray(-jnp.inf, dtype)),
        num_rows=rows.num_rows,
        temperatures=rows.temperatures,
    )
    k = min(outputs.k, HEAD + LAST)
    _, of_ends = _run(None, Outputs(k, inclusive=outputs.inclusive), "top", of_edges, selected)
    edge_ids, edge_logits = top_of(of_ends, rows.num_targets, k)
    edge_ids = jnp.asarray(ids)[jnp.clip(edge_ids, 0, len(ids) - 1)]
    top_ids, top_logits = top_of(finished, rows.num_targets, outputs.k)
    top = in_order(top_ids + offset, top_logits, edge_ids, edge_logits, outputs.k)
    return PartSums(groups, finished.ranks + of_ends.ranks, *top)


def schedule_of(rows: Rows, k: int, columns: int) -> Schedule:
    """The cut of the rows' columns."""
    return choose_schedule(rows.num_targets, columns, k, rows.logits.dtype.name)


def groups_of(out: GroupOutputs[jax.Array], schedule: Schedule, number: int) -> GroupSums:
    """[R, G] of what pass 1 has left."""

    def of_row(x: jax.Array) -> jax.Array:
        return x.reshape(-1, schedule.padded_groups)[:, :number]

    maxima = out.maxima
    if out.exact_maxima is not None:
        maxima = out.exact_maxima
    elif schedule.parts_per_group > 1:
        maxima = maxima.reshape(-1, schedule.parts_per_group).max(axis=1)
    weighted = None if out.weighted is None else of_row(out.weighted)
    return GroupSums(of_row(maxima).astype(jnp.float32), of_row(out.sums), weighted)


def top_of(
    finished: finish_kernel.RowOutputs[jax.Array], num_targets: int, k: int
) -> tuple[jax.Array, jax.Array]:
    """Ids and logits [R, K] of what pass 2 has written for "logits"."""
    size, shape = num_targets * k, (num_targets, k)
    return finished.ids[:size].reshape(shape), finished.values[:size].reshape(shape)


def _run(
    schedule: Schedule | None,
    outputs: Outputs,
    mode: finish_kernel.Mode,
    rows: Rows,
    chosen: jax.Array | None,
    allowed: jax.Array | None = None,
    offset: jax.Array | None = None,
    biased: biased_groups.Biased | None = None,
) -> tuple[GroupOutputs[jax.Array], finish_kernel.RowOutputs[jax.Array]]:
    """Run both passes; chosen [R] is what pass 1 counts by.

    allowed: [R, words] int32, or None; offset: [1] int32, or None; these and `biased` where XLA
    goes on.
    """
    assert (allowed is None and offset is None) or mode in ("logits", "top")
    assert biased is None or mode == "logits"
    flat = None if allowed is None else allowed.reshape(-1)
    logits, num_targets = rows.logits, rows.num_targets
    targets = make_targets(rows.row_ids, rows.num_rows, rows.temperatures)
    schedule = schedule or schedule_of(rows, outputs.k, logits.shape[1])
    changes = None if flat is None else FlatChanges(flat, None, None, None)
    inputs = groups_kernel.GroupInputs(targets, None, offset, changes, chosen)
    if cluster_kernel.fits_cluster(schedule):
        finished = cluster_kernel.topk_rows(
            schedule, outputs, mode, logits, num_targets, inputs, flat, biased
        )
    else:
        replaced = None
        if biased is not None:
            replaced = biased_groups.read_biased(rows, biased, weighted=outputs.entropy)
        out = groups_kernel.read_targets(
            schedule, logits, num_targets, inputs, weighted=outputs.entropy,
            inclusive=outputs.inclusive,
        )  # fmt: skip
        between = finish_kernel.FinishInputs(
            logits.reshape(-1),
            chosen if mode == "given" else None,
            out.partials,
            row_sum.Sources(out.maxima, out.sums, out.weighted),
            targets,
            flat,
            offset,
            replaced,
        )
        after = finish_kernel.finish_rows(
            schedule, outputs, mode, between, logits.shape, num_targets
        )
        finished = out, after
    return vary_like(finished, (logits, chosen, targets, allowed, jax.tree.leaves(biased)))


def _answers(
    out: finish_kernel.RowOutputs[jax.Array], outputs: Outputs, rows: Rows
) -> TopkLogprobs:
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
    finished = WHOLE.named_logits(rows.logits, rows.places, rows.extra_ids)
    scaled = finished - out.statistics[:num_targets, None]
    if rows.temperatures is not None:
        by = usable_temperatures(rows.temperatures)[:, None]
        scaled = quotient(scaled, jnp.broadcast_to(by, scaled.shape))
    return scaled - out.statistics[num_targets:, None]
