"""The running top K: parts of a row, one after the other, leave what one top K of all would."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.linear import candidates
from pallas_kernels.selection import NARROWEST_GROUP, group_maxima, top_k

ROWS, WIDTH, PARTS, K, ROOM = 5, 64, 24, 20, 64


@jax.jit
def appended(running, used, x, first):
    maxima = group_maxima(x, NARROWEST_GROUP)
    return candidates.appended(running, used, x, maxima, first, K)


def rows_of(kind: str) -> np.ndarray:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(ROWS, PARTS * WIDTH)).astype(np.float32)
    if kind == "ties":
        x = np.round(x)
    if kind == "crowded":  # all of one group, and one group after the other, late in the rows
        x[:, -3 * WIDTH : -3 * WIDTH + 8] = 9 + np.arange(8)
        x[1, -2 * WIDTH :: 8] = 20
        x[2, -WIDTH:] = 30
        x[3, -4 * WIDTH : -4 * WIDTH + 16] = 8 + np.arange(16)  # many logits of few groups
    if kind == "subnormal":
        x = x * np.float32(1e-40)
    if kind == "nothing":
        x[:, WIDTH:] = -np.inf
        x[0] = -np.inf
    return x


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["random", "ties", "crowded", "subnormal", "nothing"])
def test_parts_leave_the_top_k_of_all(kind: str, dtype: str) -> None:
    x = jnp.asarray(rows_of(kind), dtype)
    running, used = candidates.empty(ROWS, K, ROOM), jnp.int32(0)
    for start in range(0, PARTS * WIDTH, WIDTH):
        running, used = appended(running, used, x[:, start : start + WIDTH], jnp.int32(start))
    found = candidates.ordered(running, K)
    values, ids = top_k(x.astype(jnp.float32), K)
    chex.assert_trees_all_equal(found.logits, values)
    known = np.asarray(values) > -np.inf
    chex.assert_trees_all_equal(np.asarray(found.ids)[known], np.asarray(ids)[known])


@pytest.mark.parametrize("n", [5, 32, 70])
def test_the_first_true_entries_come_in_order(n: int) -> None:
    flags = np.random.default_rng(n).random((7, n)) < 0.2
    flags[0], flags[1] = False, True
    found = np.asarray(candidates.first_true(jnp.asarray(flags), 6))
    for row, places in zip(flags, found, strict=True):
        expected = np.flatnonzero(row)[:6]
        assert places[: len(expected)].tolist() == expected.tolist()
        assert (places[len(expected) :] >= n).all()
