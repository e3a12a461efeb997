"""Cells of the TPU kernel: their codes, and rows with several candidates in one cell."""

from dataclasses import replace
from unittest import mock

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.backends.mosaic_tpu import cells
from pallas_kernels.backends.mosaic_tpu import rows as run
from pallas_kernels.backends.mosaic_tpu.schedule import CUT as REAL_CUT
from pallas_kernels.backends.mosaic_tpu.schedule import choose_schedule
from pallas_kernels.contract.rows import Rows
from tests.support.interpreted_tpu_kernel import CUT, run_interpreted

BFLOAT16 = ml_dtypes.bfloat16
V, K = 2600, 4  # 20 columns of 128 tokens and 40 more: more than a cell, of 16 or of 4


def schedule_of(cut):
    return choose_schedule((8, V), 8, K, "float32", False, False, interpreted=True, cut=cut)


@pytest.mark.fast
@pytest.mark.parametrize("cut", [CUT, REAL_CUT])
def test_codes_of_cells(cut):
    """A candidate's column; that there are several, whichever two of a cell they are."""
    schedule = schedule_of(cut)
    size = schedule.cell
    x = np.full((size, 8, 128), -1, np.float32)
    pairs = [(i, j) for i in range(size) for j in range(size)]
    for lane, pair in enumerate(pairs):
        x[list(pair), lane // 128, lane % 128] = 1
    bound, first = jnp.zeros((8, 128)), cells.next_code(cells.first_codes(250), 3)
    codes = cells.code(schedule, cells.square_maxima(schedule, [*jnp.asarray(x)]), bound, first)
    several = np.asarray(cells.has_several(codes)).reshape(-1)[: len(pairs)]
    columns = np.asarray(cells.columns_of(schedule, codes)).reshape(-1)[: len(pairs)]
    np.testing.assert_array_equal(several, [i != j for i, j in pairs])
    for column, (i, j) in zip(columns, pairs, strict=True):
        assert i != j or column == 253 * size + i
        again = cells.code_of_column(first, i)
        assert not np.any(cells.has_several(again))
        assert np.all(cells.columns_of(schedule, again) == 253 * size + i)
    assert np.all(cells.cell_of(codes) == 253)


def crowded(dtype):
    """Rows whose largest logits share a lane: in a column or a row of a cell, across, all of it."""
    x = np.random.default_rng(0).normal(size=(12, V)).astype(dtype)
    last = V // 128
    columns = ((0, 1), (0, 2), (0, 3), (1, 4), (5, 10), (3, 12), (0, 1, 2, 3), (15, 16), (16, 17),
               (last - 1, last), (0, 5, 17, last), (4,))  # fmt: skip
    for row, (logits, places) in enumerate(zip(x, columns, strict=True)):
        logits[np.array(places) * 128 + row] = np.arange(8, 8 + len(places))
    x[3, 128 + 3] = x[3, 4 * 128 + 3]  # a tie
    return x


@pytest.mark.parametrize(
    ("dtype", "cut", "kept"),
    [
        (np.float32, CUT, True),
        (BFLOAT16, REAL_CUT, True),
        pytest.param(np.float32, REAL_CUT, False, marks=pytest.mark.slow),
        pytest.param(BFLOAT16, CUT, False, marks=pytest.mark.slow),
    ],
)
def test_cells_with_several_candidates(dtype, cut, kept):
    """Whether the cells' maxima are kept in VMEM, or made again where it has no room for them."""
    x = crowded(dtype)

    def chosen(*shape, **options):
        return replace(choose_schedule(*shape, **options), kept=kept)

    def call(x, interpret, cut):
        return run.largest(Rows(x), K, interpret, cut)

    with mock.patch.object(run, "choose_schedule", chosen):
        ids, logits = map(np.asarray, run_interpreted(call, x, cut=cut, races=False))
    for row, got, values in zip(x.astype(np.float64), ids, logits, strict=True):
        expected = np.lexsort((np.arange(V), -row))[:K]
        np.testing.assert_array_equal(got, expected)
        np.testing.assert_array_equal(values, row[expected])
