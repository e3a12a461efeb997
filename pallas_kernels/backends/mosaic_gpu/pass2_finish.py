"""Pass 2 on a GPU: from pass 1's partial results to the outputs, one program (a warpgroup) a row.

1. Combine the partial results of the programs that read the row.
2. Select its top K (`select`), unless K = 0 or the row is invalid.
3. Write the outputs, also of invalid and skipped rows.

One kernel does all of it. XLA would launch a kernel for every few numbers a row, and launches bound
calls of few rows.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.backends.mosaic_gpu import compat
from pallas_kernels.backends.mosaic_gpu.combine import Combined, combine, is_valid, load_partials
from pallas_kernels.backends.mosaic_gpu.compat import GPU
from pallas_kernels.backends.mosaic_gpu.early import load_at_once
from pallas_kernels.backends.mosaic_gpu.keys import key_values
from pallas_kernels.backends.mosaic_gpu.mask import Mask
from pallas_kernels.backends.mosaic_gpu.order import scatter
from pallas_kernels.backends.mosaic_gpu.outputs import (
    Mode,
    RowOutputs,
    first_column,
    more_outputs,
    num_selected,
)
from pallas_kernels.backends.mosaic_gpu.select import (
    RowOfLogits,
    Scratch,
    capacity,
    first_largest,
    load_group_maxima,
    scratch_types,
    select_top_k,
)
from pallas_kernels.backends.mosaic_gpu.targets import Targets, exponents_scale, over_temperature
from pallas_kernels.backends.mosaic_gpu.tiling import Tiling
from pallas_kernels.contract.types import Outputs

Convert = Callable[[jax.Array], jax.Array]  # logits -> what is written of them


class Inputs(NamedTuple):
    """Inputs of pass 2: arrays outside the kernel, references inside."""

    logits: Any  # [N * V]
    token_ids: Any  # [R] i32 for "given", else None
    partials: Any  # [parts * R * programs] f32 from pass 1
    groups: Any  # [R * padded_groups] group maxima from pass 1, or None
    targets: Targets
    allowed: Any = None  # [R * words] i32, as pass 1 got them; for "parts" alone


def finish_rows(
    tiling: Tiling,
    wanted: Outputs,
    mode: Mode,
    inputs: Inputs,
    num_logits_rows: int,
    num_targets: int,
    interpret: Any = None,
) -> RowOutputs:
    """The outputs of R target rows; `tiling` as in pass 1, `inputs` as arrays."""
    columns = wanted.k + first_column(mode)
    selected = num_selected(wanted.k, mode)
    outputs = [
        # Without any column, one number that is not read.
        compat.shape((max(num_targets * columns, 1),), jnp.int32),
        compat.shape((max(num_targets * columns, 1),), jnp.float32),
        compat.shape((num_targets,), jnp.int32),
        compat.shape((2 * num_targets,), jnp.float32),
    ]
    more = more_outputs(wanted, mode)
    outputs += [compat.shape((num_targets * size,), jnp.float32) for size in more.values()]
    kernel = GPU.kernel(
        functools.partial(
            _finish_rows_kernel,
            tiling=tiling,
            what=wanted,
            mode=mode,
            num_logits_rows=num_logits_rows,
            num_targets=num_targets,
            interpreted=interpret is not None,
        ),
        out_type=outputs,
        scratch_types=scratch_types(tiling, selected) if selected else (),
        grid=(num_targets,),
        grid_names=("row",),
        compiler_params=compat.compiler_params(approx_math=False),
        kernel_name="finish_rows",
        interpret=interpret,
    )
    found = kernel(inputs)
    plain = len(found) - len(more)
    return RowOutputs(*found[:plain], **dict(zip(more, found[plain:], strict=True)))


class RowToFinish(NamedTuple):
    """What the program of a target row reads and writes, in the kernel."""

    tiling: Tiling
    wanted: Outputs
    mode: Mode
    num_targets: int
    target: Any  # which target row
    top: Any  # where its top K start in `out.ids` and `out.values`
    inputs: Inputs
    logits: RowOfLogits
    token: Any  # the given token, or None
    temperature: jax.Array | None  # `Targets.temperature`
    group_maxima: Any  # [padded_groups], or None without a top K
    out: RowOutputs  # references
    scratch: tuple[Any, ...]  # as `Scratch`

    @property
    def k(self) -> int:
        return self.wanted.k


def _finish_rows_kernel(
    inputs: Inputs,
    ids_ref: Any,  # out, as `RowOutputs`
    values_ref: Any,
    ranks_ref: Any,
    statistics_ref: Any,
    *others: Any,  # out, as `more_outputs`; scratch
    tiling: Tiling,
    what: Outputs,
    mode: Mode,
    num_logits_rows: int,
    num_targets: int,
    interpreted: bool,
) -> None:
    k = what.k
    more = more_outputs(what, mode)
    scratch = others[len(more) :]
    optional = dict(zip(more, others, strict=False))
    target = lax.axis_index("row")
    # What needs no other number is loaded first, so that it all comes from memory at once.
    logits_row = inputs.targets.row(target)
    temperature = inputs.targets.temperature(target, interpreted)
    token = None
    if inputs.token_ids is not None:
        token = load_at_once(inputs.token_ids, target, interpreted)
    partials = load_partials(
        inputs.partials, tiling, num_targets, target, mode != "greedy", what.entropy, interpreted
    )
    maxima = None
    if num_selected(k, mode):
        start = target * tiling.padded_groups
        maxima = load_group_maxima(tiling, inputs.groups, start, interpreted)
    wanted = inputs.targets.wanted(target, logits_row, num_logits_rows)
    row = RowToFinish(
        tiling,
        what,
        mode,
        num_targets,
        target,
        target * (k + first_column(mode)) + first_column(mode),
        inputs,
        RowOfLogits(
            inputs.logits,
            logits_row * tiling.vocabulary,
            tiling.skew(logits_row),
            Mask.of_row(inputs.allowed, target, tiling),
            interpreted,
        ),
        token,
        temperature,
        maxima,
        RowOutputs(ids_ref, values_ref, ranks_ref, statistics_ref, **optional),
        scratch,
    )

    @pl.when(wanted)
    def _() -> None:
        found = combine(partials, tiling, exponents_scale(temperature))
        (write_parts if mode == "parts" else write_answers)(row, found)

    if first_column(mode):
        pl.when(~wanted)(lambda: write_skipped(row))


def write_parts(row: RowToFinish, found: Combined) -> None:
    """The outputs of a part of a longer row: what was found, and the top K's logits."""
    maximum, total, count, weighted = found
    write_statistics(row, maximum, total, count)
    if row.out.entropy is not None:
        row.out.entropy[row.target] = weighted
    if row.k:
        valid = is_valid(maximum, total)
        pl.when(valid)(lambda: write_top_k(row, maximum, lambda logits: logits))
        pl.when(~valid)(lambda: write_no_top_k(row, jnp.float32(-jnp.inf)))


def write_answers(row: RowToFinish, found: Combined) -> None:
    """The outputs of a whole row, of an invalid one too."""
    maximum, total, count, weighted = found
    valid = is_valid(maximum, total)
    log_sum = jnp.where(valid, jnp.log(total), jnp.float32(jnp.nan))

    def logprobs(x: jax.Array) -> jax.Array:
        scaled = x - maximum
        if row.temperature is not None:
            scaled = over_temperature(scaled, row.temperature)
        return scaled - log_sum

    if row.mode == "given":
        rank = write_given_token(row, valid, count, logprobs)
    else:
        rank = jnp.where(valid, jnp.int32(1), jnp.int32(0))
    write_statistics(row, maximum, log_sum, rank)
    if row.out.log_sum_exp is not None:
        of_logits = maximum
        if row.temperature is not None:
            of_logits = over_temperature(of_logits, row.temperature)
        row.out.log_sum_exp[row.target] = of_logits + log_sum
    if weighted is not None:
        entropy = log_sum - weighted / total
        if row.temperature is not None:
            entropy = jnp.where(row.temperature > 0, entropy, row.temperature)
        row.out.entropy[row.target] = entropy
    if num_selected(row.k, row.mode):
        pl.when(valid)(lambda: write_top_k(row, maximum, logprobs))

    @pl.when(~valid)
    def _() -> None:
        write_no_top_k(row, jnp.float32(jnp.nan))
        if row.mode == "greedy":
            # The groups' maxima do not tell the choice where the row has a NaN or an infinity.
            row.out.ids[row.top - 1] = first_largest(row.tiling, row.logits)
            row.out.values[row.top - 1] = jnp.float32(jnp.nan)


def write_skipped(row: RowToFinish) -> None:
    """The outputs of a row that is not wanted: no token, no logprob, no token rank."""
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
    vocabulary = row.tiling.vocabulary
    token = row.token
    known = valid & (token >= 0) & (token < vocabulary)
    place = row.logits.first + jnp.clip(token, 0, vocabulary - 1)
    chosen = row.inputs.logits[place].astype(jnp.float32)
    row.out.ids[row.top - 1] = token
    row.out.values[row.top - 1] = jnp.where(known, logprobs(chosen), jnp.float32(jnp.nan))
    if row.wanted.inclusive:  # padding counts where everything does
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
    interpreted = row.logits.interpreted
    scatter(row.out.ids, row.top, ranks, compat.full(size, -1), row.k, interpreted)
    values = compat.vector_of(size, value)
    scatter(row.out.values, row.top, ranks, values, row.k, interpreted)
    if row.out.top_logits is not None:
        scatter(row.out.top_logits, row.target * row.k, ranks, values, row.k, interpreted)


def write_top_k(row: RowToFinish, maximum: jax.Array, convert: Convert) -> None:
    """Select the top K; write their ids, and what `convert` makes of their logits."""
    count = num_selected(row.k, row.mode)
    scratch = Scratch(*row.scratch)
    found = select_top_k(row.tiling, count, row.logits, maximum, row.group_maxima, scratch)
    logits = key_values(found.keys)
    values = convert(logits)
    if row.out.top_logits is not None:
        start, interpreted = row.target * row.k, row.logits.interpreted
        scatter(row.out.top_logits, start, found.ranks, logits, row.k, interpreted)
    columns = [(row.top, row.k)] if row.k else []
    if row.mode == "greedy":
        columns.append((row.top - 1, 1))  # the greedy choice is the first
    for start, number in columns:
        for ref, what in ((row.out.ids, found.ids), (row.out.values, values)):
            scatter(ref, start, found.ranks, what, number, row.logits.interpreted)
