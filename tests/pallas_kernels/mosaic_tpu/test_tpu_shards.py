"""The TPU kernel's part of rows, as a vocabulary shard has it, is XLA's to the bit."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.backends.mosaic_tpu import rows as run
from pallas_kernels.backends.xla import rows as xla
from pallas_kernels.contract.rows import Outputs, RowSums
from pallas_kernels.testing import oracle
from tests.support import kernel_calls
from tests.support.interpreted_tpu_kernel import run_interpreted

V, SHARDS, K = 1173, 3, 2
WIDTH = V // SHARDS


def test_the_kernels_parts_are_those_of_xla():
    """Shards of -inf alone, of ties, with a NaN; tokens of other shards are counted by."""
    more = np.random.default_rng(3).normal(size=(3, V)) * 4
    x = np.concatenate([oracle.edge_rows(V, np.float32, 128), more.astype(np.float32)])
    x[-1, WIDTH:] = -np.inf
    selected = np.tile(x[np.arange(len(x)), np.arange(len(x)) * 80 % V], SHARDS)
    rest = (None, None, np.tile(np.geomspace(0.3, 3, len(x)).astype(np.float32), SHARDS))
    # One kernel for all of them: shards as more rows.
    parts = np.concatenate([x[:, i * WIDTH : (i + 1) * WIDTH] for i in range(SHARDS)])

    def call(parts, selected, rest, interpret, cut):
        return kernel_calls.row_sums(
            run, parts, selected, Outputs(K), *rest, interpret=interpret, cut=cut
        )

    found = run_interpreted(call, parts, selected, rest)
    expected = kernel_calls.row_sums(xla, jnp.asarray(parts), selected, Outputs(K), *rest)
    assert_same(found, expected, ~np.isnan(parts).any(1))


def assert_same(found: RowSums, expected: RowSums, rows):
    """Of rows without a NaN, all but the sums' rounding; of the others, that they have one."""
    for name in ("maximum", "num_larger", "top_logits"):
        a, b = (np.asarray(getattr(one, name))[rows] for one in (found, expected))
        np.testing.assert_array_equal(a, b)
    finite = np.asarray(expected.top_logits) > -np.inf
    finite &= rows[:, None]
    np.testing.assert_array_equal(found.top_ids[finite], expected.top_ids[finite])
    np.testing.assert_allclose(found.sum_exp[rows], expected.sum_exp[rows], rtol=3e-6)
    np.testing.assert_array_equal(np.isnan(found.sum_exp), np.isnan(expected.sum_exp))
