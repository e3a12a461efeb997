"""Pass 2 on a GPU: from pass 1's partial results to the outputs, one program (a warpgroup) a row.

1. Combine the partial results of the programs that read the row.
2. Select its top K (`mosaic_select`), unless K = 0 or the row is invalid.
3. Write the outputs, also of invalid and skipped rows.

It does all that in one kernel: what is left to XLA costs a launch for every few numbers a row, and
launches are what bounds calls of few rows.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mosaic_gpu import compat
from pallas_kernels.mosaic_gpu.compat import GPU
from pallas_kernels.mosaic_gpu.select import (
    LOWEST_KEY,
    RowOfLogits,
    Scratch,
    first_largest,
    key_values,
    scratch_types,
    select_top_k,
)
from pallas_kernels.mosaic_gpu.targets import Targets, over_temperature
from pallas_kernels.mosaic_gpu.tiling import WARPGROUP, Tiling

# Column 0 is the given token's, or the greedy choice's; or there is none, and logits are left as
# they are: parts of longer rows.
Mode = Literal["given", "greedy", "parts"]


class RowOutputs(NamedTuple):
    """Of R rows; K1 is K + 1, or K for "parts". Skipped rows of "parts" are not initialized."""

    ids: Any  # [R * K1] i32
    values: Any  # [R * K1] f32: logprobs; logits for "parts"
    ranks: Any  # [R] i32: token ranks; the number of larger logits for "parts"
    statistics: Any  # [2 * R] f32: maxima, then logs of sums; sums for "parts"


class Inputs(NamedTuple):
    """References in the kernel."""

    logits: Any  # [N * V]
    token_ids: Any  # [R] i32 for "given", else None
    partials: Any  # [PARTS * R * programs] f32 from pass 1
    groups: Any  # [R * padded_groups] group maxima from pass 1, or None
    targets: Targets


def finish_rows(
    tiling: Tiling,
    k: int,
    mode: Mode,
    inputs: Inputs,
    num_logits_rows: int,
    num_targets: int,
    interpret: Any = None,
) -> RowOutputs:
    """The outputs of R target rows; `tiling` as in pass 1, `inputs` as arrays."""
    columns = k + first_column(mode)
    selected = num_selected(k, mode)
    vector = WARPGROUP  # the top K as a vector of the warpgroup: K is at most 128
    top_k = [GPU.SMEM((vector,), jnp.int32), GPU.SMEM((vector,), jnp.float32)]
    kernel = GPU.kernel(
        functools.partial(
            _finish_rows_kernel,
            tiling=tiling,
            k=k,
            mode=mode,
            num_logits_rows=num_logits_rows,
            num_targets=num_targets,
            interpreted=interpret is not None,
        ),
        # Without any column, one number that nobody reads.
        out_type=[
            compat.shape((max(num_targets * columns, 1),), jnp.int32),
            compat.shape((max(num_targets * columns, 1),), jnp.float32),
            compat.shape((num_targets,), jnp.int32),
            compat.shape((2 * num_targets,), jnp.float32),
        ],
        scratch_types=[*top_k, *scratch_types(tiling, selected)] if selected else (),
        grid=(num_targets,),
        grid_names=("row",),
        compiler_params=compat.compiler_params(approx_math=False),
        kernel_name="finish_rows",
        interpret=interpret,
    )
    return RowOutputs(*kernel(inputs))


def num_selected(k: int, mode: Mode) -> int:
    """How many tokens of a row are selected: the greedy choice is the first."""
    return max(k, 1) if mode == "greedy" else k


def first_column(mode: Mode) -> int:
    """Of the top K."""
    return 0 if mode == "parts" else 1


def _finish_rows_kernel(
    inputs: Inputs,
    ids_ref: Any,  # out, as `RowOutputs`
    values_ref: Any,
    ranks_ref: Any,
    statistics_ref: Any,
    keys_smem: Any = None,  # [128] i32  scratch: the top K as ordered integers
    values_smem: Any = None,  # [128] f32  scratch: what becomes of them
    *scratch: Any,  # as `Scratch`
    tiling: Tiling,
    k: int,
    mode: Mode,
    num_logits_rows: int,
    num_targets: int,
    interpreted: bool,
) -> None:
    target = lax.axis_index("row")
    targets = inputs.targets
    row = targets.row(target)
    wanted = targets.wanted(target, row, num_logits_rows)
    top = target * (k + first_column(mode)) + first_column(mode)  # where the row's top K start
    nan = jnp.float32(jnp.nan)

    def write_statistics(maximum: jax.Array, summed: jax.Array, rank: jax.Array) -> None:
        statistics_ref[target] = maximum
        statistics_ref[num_targets + target] = summed
        ranks_ref[target] = rank

    def fill(value: jax.Array) -> None:
        """No top K."""

        def column(i: jax.Array, carry: tuple[()]) -> tuple[()]:
            ids_ref[top + i] = jnp.int32(-1)
            values_ref[top + i] = value
            return carry

        lax.fori_loop(0, k, column, ())

    def select(convert: Callable[[jax.Array], jax.Array]) -> None:
        """Write the top K's ids, and what `convert` makes of their logits."""

        def write(i: Any, key: jax.Array, token: jax.Array) -> None:
            keys_smem[i] = key

            @pl.when(i < k)
            def _() -> None:
                ids_ref[top + i] = jnp.where(key > LOWEST_KEY, token, jnp.int32(-1))

            if mode == "greedy":

                @pl.when(i == 0)
                def _() -> None:
                    ids_ref[top - 1] = token

        groups_start = target * tiling.padded_groups
        count = num_selected(k, mode)
        select_top_k(tiling, count, logits, inputs.groups, groups_start, Scratch(*scratch), write)
        # All logits become logprobs at once, and out of the chain of reductions.
        GPU.commit_smem()
        values_smem[...] = convert(key_values(compat.load_shared(keys_smem)))
        GPU.commit_smem()
        if mode == "greedy":
            values_ref[top - 1] = values_smem[0]

        def copy(i: jax.Array, carry: tuple[()]) -> tuple[()]:
            values_ref[top + i] = values_smem[i]
            return carry

        lax.fori_loop(0, k, copy, ())

    def write_parts(maximum: jax.Array, total: jax.Array, count: jax.Array) -> None:
        write_statistics(maximum, total, count)
        if k:
            valid = is_valid(maximum, total)
            pl.when(valid)(lambda: select(lambda logits: logits))
            pl.when(~valid)(lambda: fill(jnp.float32(-jnp.inf)))

    def write_answers(maximum: jax.Array, total: jax.Array, count: jax.Array) -> None:
        valid = is_valid(maximum, total)
        temperature = targets.temperature(target)
        log_sum = jnp.where(valid, jnp.log(total), nan)

        def logprobs(x: jax.Array) -> jax.Array:
            scaled = x - maximum
            if temperature is not None:
                scaled = over_temperature(scaled, temperature)
            return scaled - log_sum

        if mode == "given":
            token = inputs.token_ids[target]
            known = valid & (token >= 0) & (token < tiling.vocabulary)
            place = logits.first + jnp.clip(token, 0, tiling.vocabulary - 1)
            chosen = inputs.logits[place].astype(jnp.float32)
            ids_ref[top - 1] = token
            values_ref[top - 1] = jnp.where(known, logprobs(chosen), nan)
            rank = jnp.where(known, 1 + count, 0)
        else:
            rank = jnp.where(valid, jnp.int32(1), jnp.int32(0))
        write_statistics(maximum, log_sum, rank)
        if num_selected(k, mode):
            pl.when(valid)(lambda: select(logprobs))

        @pl.when(~valid)
        def _() -> None:
            fill(nan)
            if mode == "greedy":
                # The groups' maxima do not tell the choice where the row has a NaN or an infinity.
                ids_ref[top - 1] = first_largest(tiling, logits)
                values_ref[top - 1] = nan

    logits = RowOfLogits(inputs.logits, row * tiling.vocabulary, tiling.skew(row), interpreted)

    @pl.when(wanted)
    def _() -> None:
        results = combine(
            inputs.partials,
            tiling,
            num_targets,
            target,
            targets.scale(target),
            mode != "greedy",
            interpreted,
        )
        (write_parts if mode == "parts" else write_answers)(*results)

    if first_column(mode):

        @pl.when(~wanted)
        def _() -> None:
            ids_ref[top - 1] = jnp.int32(-1)
            values_ref[top - 1] = nan
            fill(nan)
            write_statistics(nan, nan, jnp.int32(0))


def is_valid(maximum: jax.Array, total: jax.Array) -> jax.Array:
    """Whether a row has neither a NaN nor a +inf, and something finite; its sum is 1 or more."""
    return (maximum > -jnp.inf) & (maximum < jnp.inf) & (total > 0)


def combine(
    partials_ref: Any,  # [PARTS * R * programs] f32
    tiling: Tiling,
    num_targets: int,
    target: Any,
    scale: jax.Array,
    counted: bool,
    interpreted: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A row's maximum and sum of exponentials, float32, and its count of larger logits, int32."""

    def load(part: int) -> list[tuple[jax.Array, jax.Array]]:
        """The numbers of all programs, a warpgroup's at a time, and which of them are these."""
        begin = (part * num_targets + target) * tiling.programs
        found = []
        for offset in range(0, tiling.programs, WARPGROUP):
            x = compat.load_vector(partials_ref, begin + offset, WARPGROUP, interpreted)
            found.append((x, compat.vector_iota(WARPGROUP) < tiling.programs - offset))
        return found

    maxima, sums = load(0), load(1)
    lowest = [jnp.where(mine, x, jnp.float32(-jnp.inf)) for x, mine in maxima]
    maximum = jnp.max(functools.reduce(jnp.maximum, lowest))
    terms = []
    for (x, mine), (total, _) in zip(maxima, sums, strict=True):
        term = total * jnp.exp2((x - maximum) * scale)
        # A part without a finite logit has a sum of 0, which must not meet an infinite factor.
        terms.append(jnp.where(mine & (x != -jnp.inf), term, jnp.float32(0)))
    total = jnp.sum(functools.reduce(jnp.add, terms))
    if not counted:
        return maximum, total, jnp.int32(0)
    found = [jnp.where(mine, x, jnp.float32(0)) for x, mine in load(2)]
    return maximum, total, jnp.sum(functools.reduce(jnp.add, found)).astype(jnp.int32)
