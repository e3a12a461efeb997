"""Pass 1 of the GPU kernels, interpreted on a CPU with race detection, against float64.

Shapes are small, but every path is taken: split rows, whole and ragged blocks, rows that start
between vectors, skipped rows. What the interpreter cannot run (pass 2, groups, masks, draws,
counts) is executed as PTX, with races looked for: `.ci/run` runs the cases of what changed.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.backends.mosaic_gpu import compat, rows_kernel
from pallas_kernels.backends.mosaic_gpu.reading import make_targets
from pallas_kernels.backends.mosaic_gpu.schedule import Schedule
from pallas_kernels.contract.rows import Outputs
from pallas_kernels.testing import oracle
from tests.support.interpreted_kernels import interpret_params, run_without_races
from tests.support.watched_interpreters import watched

CASES = {
    # Rows start at vectors; several blocks a step; a ragged last block.
    "bfloat16": (Schedule(8448, "bfloat16", 256, 1), True, Outputs(0, entropy=True)),
    # An odd vocabulary: every row has another skew, and so edges at both ends.
    "odd bfloat16": (Schedule(8195, "bfloat16", 128, 1), True, Outputs(0, inclusive=True)),
    # The same with split rows and wide groups.
    "float32": (Schedule(12_290, "float32", 256, 2), True, Outputs(0, False, True, False, True)),
    # Whole blocks only, no edges.
    "float16": (Schedule(8192, "float16", 128, 2), True, Outputs(0)),
    # No group maxima; a row of nothing but edges.
    "k = 0": (Schedule(4100, "float16", 128, 0), False, Outputs(0)),
}
LOG2_E = np.log2(np.e)


def combined(partials, scale):
    """A row's maximum, sum, count and sum by exponents of 2, from its programs' [parts, P]."""
    maxima, sums, counts, *weighted = partials.astype(np.float64)
    maximum = maxima.max()
    with np.errstate(invalid="ignore"):
        moved = np.maximum((maxima - maximum) * scale, -200)
    found = [maximum, (sums * np.exp2(moved)).sum(), counts.sum()]
    return (*found, *(((w + moved * sums) * np.exp2(moved)).sum() for w in weighted))


def group_maxima(schedule, row, skew):
    """[num_groups] float32: a group has the ids of its block alone, and of the row."""
    number = np.arange(schedule.num_groups)
    block = schedule.block_ids(number // schedule.groups_per_block, skew)
    start, begin, end = (np.asarray(x)[:, None] for x in block)
    ids = start + (number % schedule.groups_per_block * schedule.group_width)[:, None]
    ids = ids + np.arange(schedule.group_width)
    return np.where((ids >= begin) & (ids < end), row[ids], -np.inf).max(axis=1)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.fast] * (name == "float16")) for name in CASES]
)
def test_pass_1(name):
    """Rows picked by row_ids, out of order, some skipped; temperatures; ids outside."""
    schedule, with_groups, extra = CASES[name]
    vocabulary, width = schedule.vocabulary, schedule.group_width
    x = oracle.edge_rows(vocabulary, schedule.dtype, width)
    row_ids = np.array([1, 0, 2, 3, -1, 4, 6, 5, 7, 1, 0, 0], np.int32)
    ids = [width, vocabulary - 1, vocabulary - 2, 3, 0, 1, 2, 3, 4, vocabulary, -1, 5]
    token_ids, count = np.array(ids, np.int32), 11
    temperatures = np.array([0, 0.5] + [1] * 10, np.float32)

    def call(x, token_ids, row_ids, count, temperatures, interpret):
        targets = make_targets(row_ids, count, temperatures)
        given = (schedule, x, len(ids), token_ids, targets, with_groups, extra)
        return rows_kernel.read_rows(*given, interpret=interpret)

    arrays = token_ids, row_ids, jnp.int32(count), temperatures
    partials, groups = run_without_races(call, x, *arrays)
    parts = 4 if extra.entropy else 3
    partials = np.asarray(partials)[: parts * len(ids) * schedule.programs]
    partials = partials.reshape(parts, len(ids), schedule.programs)
    assert (groups is not None) == with_groups
    for target, row_id in enumerate(row_ids[:count]):
        if not 0 <= row_id < len(x):
            continue
        row = x[row_id].astype(np.float64)
        scale = LOG2_E / (temperatures[target] or 1)
        maximum, total, larger, *weighted = combined(partials[:, target], scale)
        if not oracle.is_valid(row):
            assert not total > 0 or maximum == np.inf
            continue
        assert maximum == row.max()
        exponents = (row - row.max()) * scale
        np.testing.assert_allclose(total, np.exp2(exponents).sum(), rtol=1e-5)
        chosen = row[np.clip(token_ids[target], 0, vocabulary - 1)]
        assert larger == (row >= chosen if extra.inclusive else row > chosen).sum()
        if extra.entropy:
            terms = np.exp2(exponents) * np.maximum(exponents, -200)
            np.testing.assert_allclose(weighted, terms.sum(), rtol=1e-5, atol=1e-5)
        if with_groups:
            start = target * schedule.padded_groups
            found = np.asarray(groups)[start : start + schedule.num_groups]
            expected = group_maxima(schedule, x[row_id], schedule.skew(int(row_id)))
            np.testing.assert_array_equal(found, expected)


def kernel_of(body):
    """Two warpgroups that do this with x [128], an output [128] and what they share."""
    params = compat.compiler_params(approx_math=True)
    how = {"num_threads": 2, "thread_name": "warpgroup", "interpret": interpret_params()}
    out, shared = jax.ShapeDtypeStruct((128,), jnp.float32), plgpu.SMEM((128,), jnp.float32)
    how |= {"out_type": out, "scratch_types": [shared], "compiler_params": params}
    return plgpu.kernel(body, **how)


def test_a_race_of_any_kernel_is_seen():
    """Two warpgroups write one place without a barrier, in the first of two kernels."""

    def raced(x, out, shared):
        shared[...] = x[...]
        out[...] = shared[...]

    racy, clean = kernel_of(raced), kernel_of(lambda x, out, _: None)
    for program, races in ((lambda x: clean(racy(x)), True), (lambda x: clean(x), False)):
        with watched() as has_raced:
            jax.block_until_ready(jax.jit(program)(np.zeros(128, np.float32)))
        assert has_raced() == races
