"""The GPU kernels' own bodies, interpreted on a CPU with race detection, against the oracle.

Shapes are small, but every path of the kernels is taken: split rows, whole and ragged blocks, rows
that start between vectors, skipped rows, more candidates than there is room for.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backends.mosaic_gpu import rows as run
from pallas_kernels.backends.mosaic_gpu.tiling import Tiling
from pallas_kernels.contract.types import Outputs
from pallas_kernels.testing import oracle
from tests.support import kernel_calls
from tests.support.interpreted_kernels import run_without_races

CASES = {
    # Rows start at vectors; several blocks a step; a ragged last block.
    "bfloat16": (Tiling(8448, "bfloat16", 256, 2, 1), 3),
    # An odd vocabulary: every row has another skew, and so edges at both ends.
    "odd bfloat16": (Tiling(8195, "bfloat16", 128, 1, 1), 1),
    # The same with split rows and wide groups.
    "float32": (Tiling(12_290, "float32", 256, 1, 2), 2),
    # Whole blocks only, no edges.
    "float16": (Tiling(8192, "float16", 128, 1, 2), 2),
    # No top K, no pass 2; a row of nothing but edges.
    "k = 0": (Tiling(4100, "float16", 128, 1, 0), 0),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.fast] * (name == "float16")) for name in CASES],
)
def test_separate_path(name):
    """Rows picked by row_ids, out of order, some skipped; temperatures; ids outside; extra ids."""
    tiling, k = CASES[name]
    vocabulary = tiling.vocabulary
    x = oracle.edge_rows(vocabulary, tiling.dtype, tiling.group_width)
    row_ids = np.array([1, 0, 2, 3, -1, 4, 6, 5, 7, 1, 0, 0], np.int32)
    ids = [tiling.group_width, vocabulary - 1, vocabulary - 2, 3, 0, 1, 2, 3, 4, vocabulary, -1, 5]
    token_ids = np.array(ids, np.int32)
    options = {
        "row_ids": row_ids,
        "num_rows": np.int32(11),
        "temperatures": np.array([0, 0.5] + [1] * 10, np.float32),
        "extra_token_ids": np.stack([token_ids[::-1], token_ids + 1], axis=1),
    }

    def call(x, token_ids, options, interpret):
        return kernel_calls.topk_logprobs(
            run, x, token_ids, Outputs(k), **options, tiling=tiling, interpret=interpret
        )

    actual = run_without_races(call, x, token_ids, options)
    oracle.assert_matches(actual, oracle.topk_logprobs(x, token_ids, k, **options))


@pytest.mark.parametrize(("k", "rows"), [(0, [6, 1]), (2, range(7))])
def test_fused_path(k, rows):
    """Every row's greedy choice, in invalid rows too, where the groups' maxima do not tell it."""
    tiling = Tiling(4352, "bfloat16", 128, 1, 1)
    x = oracle.edge_rows(tiling.vocabulary, tiling.dtype, tiling.group_width)[np.array(rows)]
    extra = np.array([[0, tiling.vocabulary]] * len(x), np.int32)
    temperatures = np.linspace(0, 2, len(x), dtype=np.float32)

    def call(x, num_rows, temperatures, extra, interpret):
        return kernel_calls.greedy_topk_logprobs(
            run, x, Outputs(k), num_rows, temperatures, extra, tiling=tiling, interpret=interpret
        )

    actual = run_without_races(call, x, np.int32(len(x)), temperatures, extra)
    token_ids = [oracle.greedy_token_id(row) for row in x]
    expected = oracle.topk_logprobs(
        x, token_ids, k, temperatures=temperatures, extra_token_ids=extra
    )
    oracle.assert_matches(actual, expected)


def rows_of_ties(vocabulary, dtype):
    """More logits at the top than there is room for: by keys, by ids, in few groups, at the end."""
    rng = np.random.default_rng(0)
    ids = np.arange(vocabulary)
    coarse = np.round(rng.normal(size=vocabulary) * 2) / 2
    cluster = np.where((ids >= 1000) & (ids < 1600), 5 + ids / vocabulary, coarse)
    late = np.where(ids >= vocabulary - 700, 3.0, -np.inf)
    return np.stack([np.zeros(vocabulary), coarse, cluster, late]).astype(np.dtype(dtype))


@pytest.mark.parametrize(
    ("tiling", "k"),
    [
        pytest.param(Tiling(8450, "bfloat16", 128, 1, 1), 5, marks=pytest.mark.slow),
        (Tiling(2048, "float32", 128, 1, 1), 129),  # a K larger than the number of groups
        pytest.param(Tiling(4352, "float16", 128, 1, 1), 300, marks=pytest.mark.slow),
    ],
)
def test_more_candidates_than_room(tiling, k):
    """The cut is raised by halving, first the keys, then the ids among equal ones."""
    x = rows_of_ties(tiling.vocabulary, tiling.dtype)
    token_ids = np.array([7, 0, 1100, tiling.vocabulary - 1], np.int32)

    def call(x, token_ids, interpret):
        nothing = jnp.zeros((len(x), 0), jnp.int32)
        return kernel_calls.topk_logprobs(
            run,
            x,
            token_ids,
            Outputs(k),
            None,
            None,
            None,
            nothing,
            tiling=tiling,
            interpret=interpret,
        )

    actual = run_without_races(call, x, token_ids)
    oracle.assert_matches(actual, oracle.topk_logprobs(x, token_ids, k))
