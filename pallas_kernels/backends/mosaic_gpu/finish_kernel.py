"""Pass 2 on a GPU: from what pass 1 has left to the outputs, one program (a warpgroup) a row.

1. Combine the partial results of the programs that read the row (`combine`).
2. Add up its groups (`row_sum`), unless XLA does.
3. Select its top K (`selection`), unless K = 0 or the row is invalid.
4. Write the outputs, also of invalid and skipped rows (`write_answers`).

One kernel does all of it. XLA would launch a kernel for every few numbers a row, and launches bound
calls of few rows.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.backends.mosaic_gpu import compat, reading, row_sum, thread
from pallas_kernels.backends.mosaic_gpu.changes.biased_groups import Replaced
from pallas_kernels.backends.mosaic_gpu.compat import GPU, Readable
from pallas_kernels.backends.mosaic_gpu.schedule import Index, Schedule
from pallas_kernels.backends.mosaic_gpu.selection import (
    RowOfLogits,
    Scratch,
    capacity,
    load_part_maxima,
    scatter,
    select_row_top_k,
    selection_scratch,
)
from pallas_kernels.backends.mosaic_gpu.thread import WARP, load_at_once
from pallas_kernels.contract.rows import Outputs
from pallas_kernels.numbers.logarithm import log_of_total
from pallas_kernels.numbers.ordered_keys import floats
from pallas_kernels.numbers.quotient import quotient

# Column 0 holds the given token. Where XLA makes the answers there is no column 0, and the top K
# stay logits; for "top" there is no sum either.
Mode = Literal["given", "logits", "top"]
LOG_OF_TOTAL = functools.partial(log_of_total, product=thread.products(compat.warp_layout()))
Convert = Callable[[jax.Array], jax.Array]  # logits -> what is written of them


_Output = TypeVar("_Output", jax.Ref, jax.Array)  # inside the kernel, and outside


class RowOutputs(NamedTuple, Generic[_Output]):
    """Outputs of R rows; K1 is K + 1. Where XLA goes on it is K, and skipped rows are anything."""

    ids: _Output  # [R * K1] i32
    values: _Output  # [R * K1] f32: logprobs; logits for "logits"
    ranks: _Output  # [R] i32: token ranks; the number of larger logits for "logits"
    # [2 * R] f32: maxima, then logs of sums; for "logits" sums, NaN where there is no answer.
    statistics: _Output
    # What is wanted besides, see `more_outputs`: an output of its own, since a slice would be a
    # launch.
    top_logits: _Output | None = None  # [R * K] f32
    log_sum_exp: _Output | None = None  # [R] f32
    entropy: _Output | None = None  # [R] f32; for "logits" what `RowSums.weighted` is


def more_outputs(outputs: Outputs, mode: Mode) -> dict[str, int]:
    """The optional outputs that there are, by name, with the numbers that each has of a row."""
    whole = mode == "given"  # XLA makes the others
    there = {
        "top_logits": outputs.k if outputs.top_logits and whole else 0,
        "log_sum_exp": int(outputs.log_sum_exp and whole),
        "entropy": int(outputs.entropy and mode != "top"),
    }
    return {name: size for name, size in there.items() if size}


def first_column(mode: Mode) -> int:
    """The column where the top K start."""
    return 1 if mode == "given" else 0


def _is_valid(maximum: jax.Array, evidence: jax.Array) -> jax.Array:
    """Whether a row has a finite logit and neither a NaN nor a +inf."""
    return (maximum > -jnp.inf) & (maximum < jnp.inf) & (evidence > 0)


class Loaded(NamedTuple):
    """Of all programs that read a row, a warp of them at a time."""

    maxima: list[jax.Array]
    evidence: list[jax.Array]
    counts: list[jax.Array]


class Combined(NamedTuple):
    """A row's numbers."""

    maximum: jax.Array  # float32
    evidence: jax.Array  # float32
    num_larger: jax.Array  # int32


def load_partials(
    partials_ref: Readable,  # [parts * R * programs] f32
    schedule: Schedule,
    num_targets: int,
    target: Index,
) -> Loaded:
    """The results of the programs that read a row."""

    def load(part: int) -> list[jax.Array]:
        begin = (part * num_targets + target) * schedule.programs
        offsets = range(0, schedule.programs, WARP)
        return [
            thread.load_in_warps(partials_ref, begin + i, min(WARP, schedule.programs - i))
            for i in offsets
        ]

    return Loaded(load(0), load(1), load(2))


def combine(loaded: Loaded, schedule: Schedule) -> Combined:
    """A row's numbers. Every warp does it, so that no thread waits for another warp."""
    lanes = thread.lanes_of(schedule.programs)

    def summed(values: list[jax.Array]) -> jax.Array:
        """With 0 where a vector goes beyond the last program."""
        if schedule.programs == lanes:
            (of_lanes,) = values
            return thread.over_lanes(thread.sum_of_two, of_lanes, lanes)
        lane = compat.iota((WARP,), 0, compat.warp_layout()) & (lanes - 1)
        inside = (lane < schedule.programs - i * WARP for i in range(len(values)))
        every = (jnp.where(here, x, jnp.float32(0)) for here, x in zip(inside, values, strict=True))
        return thread.over_lanes(thread.sum_of_two, functools.reduce(jnp.add, every), lanes)

    maxima, evidence, counts = loaded  # maxima beyond the last program are its own again
    maximum = functools.reduce(jnp.maximum, maxima)
    return Combined(
        thread.over_lanes(thread.larger_float, maximum, lanes),
        summed(evidence),
        summed(counts).astype(jnp.int32),
    )


class FinishInputs(NamedTuple):
    """Inputs of pass 2: arrays outside the kernel, references inside."""

    logits: jax.Array  # [N * V]
    token_ids: Readable | None  # [R] i32 for "given", else None
    partials: jax.Array  # [3 * R * programs] f32 from pass 1
    groups: row_sum.Sources | None  # from pass 1; for "top" the maxima alone are read
    targets: reading.RowTargets
    allowed: Readable | None = None  # [R * words] i32, as pass 1 got them; where XLA goes on
    offset: Readable | None = None  # as pass 1 got it; where XLA goes on
    replaced: Replaced | None = None  # for "logits" alone


def finish_rows(
    schedule: Schedule,
    outputs: Outputs,
    mode: Mode,
    inputs: FinishInputs,
    shape: tuple[int, ...],
    num_targets: int,
) -> RowOutputs[jax.Array]:
    """The outputs of R target rows of logits of this shape; `schedule` as in pass 1."""
    kernel = GPU.kernel(
        functools.partial(
            finish_rows_kernel,
            schedule=schedule,
            outputs=outputs,
            mode=mode,
            shape=shape,
            num_targets=num_targets,
        ),
        out_type=finish_types(outputs, mode, num_targets),
        scratch_types=all_scratch_types(schedule, outputs, mode),
        grid=(num_targets,),
        grid_names=("row",),
        compiler_params=compat.compiler_params(approx_math=False),
        kernel_name="finish_rows",
    )
    return named(kernel(inputs), outputs, mode)


def all_scratch_types(schedule: Schedule, outputs: Outputs, mode: Mode) -> list[Any]:
    """The types of shared memory: of the selection, and of the row's sum."""
    types = selection_scratch(schedule, outputs.k) if outputs.k else []
    return types + ([] if mode == "top" else row_sum.sum_scratch(schedule, outputs.entropy))


def finish_types(outputs: Outputs, mode: Mode, num_targets: int) -> list[jax.ShapeDtypeStruct]:
    """The types of `RowOutputs`."""
    columns = outputs.k + first_column(mode)
    types = [
        # Without any column, one number that is not read.
        compat.shape((max(num_targets * columns, 1),), jnp.int32),
        compat.shape((max(num_targets * columns, 1),), jnp.float32),
        compat.shape((num_targets,), jnp.int32),
        compat.shape((2 * num_targets,), jnp.float32),
    ]
    more = more_outputs(outputs, mode).values()
    return types + [compat.shape((num_targets * size,), jnp.float32) for size in more]


def named(found: Sequence[jax.Array], outputs: Outputs, mode: Mode) -> RowOutputs[jax.Array]:
    """Arrays of `finish_types`."""
    more = more_outputs(outputs, mode)
    plain = len(found) - len(more)
    return RowOutputs(*found[:plain], **dict(zip(more, found[plain:], strict=True)))


class RowToFinish(NamedTuple):
    """The inputs and outputs of a target row's program, in the kernel."""

    schedule: Schedule
    outputs: Outputs
    mode: Mode
    num_targets: int
    target: Index  # which target row
    top: Index  # where its top K start in `out.ids` and `out.values`
    inputs: FinishInputs
    logits: RowOfLogits
    token: jax.Array | None  # the given token; None where XLA makes the answers
    given: jax.Array | None  # its logit
    temperature: jax.Array | None  # `RowTargets.temperature`
    part_maxima: jax.Array | None  # [padded_parts], or None without a top K
    groups: row_sum.SummedGroups | None  # the first of them, for the row's sum
    out: RowOutputs[jax.Ref]
    scratch: tuple[jax.Ref, ...]  # as `Scratch`; then `row_sum`'s

    @property
    def k(self) -> int:
        return self.outputs.k


def finish_rows_kernel(
    inputs: FinishInputs,
    ids_ref: jax.Ref,  # out, as `RowOutputs`
    values_ref: jax.Ref,
    ranks_ref: jax.Ref,
    statistics_ref: jax.Ref,
    *others: jax.Ref,  # out, as `more_outputs`; scratch
    schedule: Schedule,
    outputs: Outputs,
    mode: Mode,
    shape: tuple[int, ...],
    num_targets: int,
    own: Callable[[], Index] = lambda: lax.axis_index("row"),  # its target row
    wait: Callable[[], object] = lambda: None,  # until pass 1 has ended
) -> None:
    k = outputs.k
    more = more_outputs(outputs, mode)
    scratch = others[len(more) :]
    optional = dict(zip(more, others, strict=False))
    target = own()
    num_rows, width = shape
    # What needs no other number is loaded first, so that it all comes from memory at once.
    logits_row, number = inputs.targets.row(target)
    temperature = inputs.targets.temperature(target)
    token = given = None
    if inputs.token_ids is not None:
        token = load_at_once(inputs.token_ids, target)
        clipped = jnp.clip(logits_row, 0, num_rows - 1) * width
        given = inputs.logits[clipped + jnp.clip(token, 0, width - 1)]
    first = logits_row * width
    if inputs.offset is not None:
        first = first + inputs.offset[0]
    wait()
    partials = load_partials(inputs.partials, schedule, num_targets, target)
    maxima = groups = None
    if mode != "top":
        assert inputs.groups is not None
        groups = inputs.groups.load(schedule, target, 0)
    if k:
        assert inputs.groups is not None
        start = target * schedule.padded_parts
        if groups is not None and row_sum.num_turns(schedule) == 1:
            maxima = groups.maxima
        else:
            maxima = load_part_maxima(schedule, inputs.groups.maxima_ref, start)
    active = reading.is_active_target(target, logits_row, number, num_rows)
    row = RowToFinish(
        schedule,
        outputs,
        mode,
        num_targets,
        target,
        target * (k + first_column(mode)) + first_column(mode),
        inputs,
        RowOfLogits(
            inputs.logits,
            width,
            first,
            reading.mask_of_row(inputs.allowed, target, schedule),
        ),
        token,
        given,
        temperature,
        maxima,
        groups,
        RowOutputs(ids_ref, values_ref, ranks_ref, statistics_ref, **optional),
        scratch,
    )

    @pl.when(active)
    def _() -> None:
        found = combine(partials, schedule)
        if first_column(mode):
            write_answers(row, found)
        else:
            write_logits(row, found)

    if first_column(mode):
        pl.when(~active)(lambda: write_skipped(row))


def write_logits(row: RowToFinish, found: Combined) -> None:
    """Write what XLA makes the answers of: sums, and the top K's logits."""
    unbiased, evidence, count = found
    maximum, replacements = unbiased, None
    if row.inputs.replaced is not None:
        assert row.inputs.groups is not None
        replacements = row_sum.load_replacements(
            row.schedule, row.target, row.inputs.groups, row.inputs.replaced, row.num_targets
        )
        maximum = jnp.maximum(maximum, replacements.maximum)
        evidence = evidence + replacements.evidence
    if row.groups is None:
        write_statistics(row, maximum, evidence, count)
    else:
        total, weighted = total_of(row, maximum, replacements)
        valid = _is_valid(maximum, evidence)
        write_statistics(row, maximum, jnp.where(valid, total, jnp.float32(jnp.nan)), count)
        if row.out.entropy is not None:
            row.out.entropy[row.target] = weighted
    if row.k:
        # Of the tokens without a bias: their own maximum counts.
        has_top = _is_valid(unbiased, found.evidence)
        pl.when(has_top)(lambda: write_top_k(row, unbiased, lambda logits: logits))
        pl.when(~has_top)(lambda: write_no_top_k(row, jnp.float32(-jnp.inf)))


def total_of(
    row: RowToFinish, maximum: jax.Array, replacements: row_sum.Replacements | None = None
) -> row_sum.RowTotal:
    """The row's sums."""
    assert row.groups is not None
    assert row.inputs.groups is not None
    return row_sum.row_total(
        row.schedule,
        row.target,
        row.inputs.groups,
        row.groups,
        maximum,
        reading.inverse_in_kernel(row.temperature),
        row.scratch[-1],
        replacements,
    )


def write_answers(row: RowToFinish, found: Combined) -> None:
    """The outputs of a whole row, of an invalid one too."""
    maximum, evidence, count = found
    valid = _is_valid(maximum, evidence)
    total, weighted = total_of(row, maximum)
    temperature = reading.scaled_temperature(row.temperature)
    log_sum = jnp.where(valid, thread.of_numbers(LOG_OF_TOTAL, total), jnp.float32(jnp.nan))

    def over_temperature(x: jax.Array) -> jax.Array:
        if temperature is None:
            return x
        if x.ndim:
            by = compat.splat(x.shape[0], temperature)
            return quotient(x, by)
        return thread.of_numbers(quotient, x, temperature)

    def logprobs(x: jax.Array) -> jax.Array:
        return over_temperature(x - maximum) - log_sum

    rank = write_given_token(row, valid, count, logprobs)
    write_statistics(row, maximum, log_sum, rank)
    if row.out.log_sum_exp is not None:
        row.out.log_sum_exp[row.target] = over_temperature(maximum) + log_sum
    if weighted is not None and row.out.entropy is not None:
        entropy = log_sum - thread.of_numbers(quotient, weighted, total)
        if temperature is not None:
            entropy = jnp.where(temperature > 0, entropy, temperature)
        row.out.entropy[row.target] = entropy
    if row.k:
        pl.when(valid)(lambda: write_top_k(row, maximum, logprobs))
        pl.when(~valid)(lambda: write_no_top_k(row, jnp.float32(jnp.nan)))


def write_skipped(row: RowToFinish) -> None:
    """The outputs of a row that is skipped: no token, no logprob, no token rank."""
    nan = jnp.float32(jnp.nan)
    row.out.ids[row.top - 1] = jnp.int32(-1)
    row.out.values[row.top - 1] = nan
    write_no_top_k(row, nan)
    write_statistics(row, nan, nan, jnp.int32(0))
    for ref in (row.out.log_sum_exp, row.out.entropy):
        if ref is not None:
            ref[row.target] = nan


def write_statistics(
    row: RowToFinish, maximum: jax.Array, summed: jax.Array, rank: jax.Array
) -> None:
    """The row's maximum, its sum or the sum's logarithm, and its token rank or count."""
    row.out.statistics[row.target] = maximum
    row.out.statistics[row.num_targets + row.target] = summed
    row.out.ranks[row.target] = rank


def write_given_token(
    row: RowToFinish, valid: jax.Array, count: jax.Array, logprobs: Convert
) -> jax.Array:
    """Write column 0, the given token and its logprob; returns its token rank."""
    vocabulary = row.schedule.vocabulary
    token = row.token
    assert token is not None
    assert row.given is not None
    known = valid & (token >= 0) & (token < vocabulary)
    chosen = row.given.astype(jnp.float32)
    row.out.ids[row.top - 1] = token
    row.out.values[row.top - 1] = jnp.where(known, logprobs(chosen), jnp.float32(jnp.nan))
    if row.outputs.inclusive:  # padding counts where everything does
        rank = jnp.where(chosen == -jnp.inf, jnp.int32(vocabulary), count)
    else:
        rank = 1 + count
    return jnp.where(known, rank, 0)


def write_no_top_k(row: RowToFinish, value: jax.Array) -> None:
    """Ids of -1 and this value in the row's K columns."""
    if row.k == 0:
        return
    size = capacity(row.k)
    ranks = compat.vector_iota(size)
    scatter(row.out.ids, row.top, ranks, compat.full(size, -1), row.k)
    values = compat.splat(size, value)
    scatter(row.out.values, row.top, ranks, values, row.k)
    if row.out.top_logits is not None:
        scatter(row.out.top_logits, row.target * row.k, ranks, values, row.k)


def write_top_k(row: RowToFinish, maximum: jax.Array, convert: Convert) -> None:
    """Select the top K; write their ids, and what `convert` makes of their logits."""
    scratch = Scratch(*row.scratch[:4])
    assert row.part_maxima is not None
    found = select_row_top_k(row.schedule, row.k, row.logits, maximum, row.part_maxima, scratch)
    logits = floats(found.keys, jnp.float32)
    values = convert(logits)
    if row.out.top_logits is not None:
        scatter(row.out.top_logits, row.target * row.k, found.ranks, logits, row.k)
    for ref, what in ((row.out.ids, found.ids), (row.out.values, values)):
        scatter(ref, row.top, found.ranks, what, row.k)
