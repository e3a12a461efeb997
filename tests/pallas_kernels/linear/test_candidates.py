"""The running top K of wide parts and of many rows, and its bit words."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backends.xla import bit_words
from pallas_kernels.backends.xla.selection import top_k
from pallas_kernels.linear import candidates
from tests.support import quick_compile

K, ROOM = 20, 64


@pytest.mark.parametrize("rows", [5, 300])
def test_wide_parts_of_many_rows(rows: int) -> None:
    """Parts are cut where they are wide, and rows where they are many: neither divides."""
    rng = np.random.default_rng(4)
    width = candidates.COLUMNS_AT_ONCE + 301
    x = jnp.asarray(np.round(rng.normal(0, 9, (rows, 2 * width))), jnp.float32)

    def call(x):
        def step(i, running):
            part = jax.lax.dynamic_slice_in_dim(x, i * width, width, 1)
            return candidates.appended(running, part, i * width, K)

        running = jax.lax.fori_loop(0, 2, step, candidates.empty(rows, K, ROOM))
        return candidates.ordered(running, K)

    found = quick_compile.jit(call)(x)
    chex.assert_trees_all_equal(tuple(found), top_k(x, K))


@pytest.mark.parametrize("n", [5, 32, 170])
def test_true_flags_are_found_in_order(n: int) -> None:
    flags = np.random.default_rng(n).random((7, n)) < 0.2
    flags[0], flags[1] = False, True
    words = bit_words.packed(jnp.asarray(flags))
    assert bit_words.counts(words).tolist() == flags.sum(1).tolist()
    found, there = (np.asarray(x) for x in bit_words.places(words, jnp.int32(2), 6))
    for row, places, real in zip(flags, found, there, strict=True):
        expected = np.flatnonzero(row)[2:8]
        assert places[real].tolist() == expected.tolist()
        assert real.tolist() == [i < len(expected) for i in range(6)]
    few = bit_words.leading(words, jnp.asarray([0, 3, 0, 1, 2, n, 40], jnp.int32))
    for row, word, number in zip(flags, np.asarray(few), (0, 3, 0, 1, 2, n, 40), strict=True):
        bits = [i for i in range(n) if word[i // 32] >> (i % 32) & 1]
        assert bits == np.flatnonzero(row)[:number].tolist()
