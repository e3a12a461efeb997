"""A row's bits are its own: no other row, no place, no K and no other output changes them."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import topk_logprobs
from pallas_kernels.backends.xla.block_rows import in_one_thread
from pallas_kernels.backends.xla.selection import FEW_ROWS, is_small_batch
from pallas_kernels.sampling import Sampling, row_read
from pallas_kernels.sampling.rows import GroupedRows
from tests.support import programs, quick_compile

MOST = 64
OPTIONS = (
    {},
    {"entropy": True},
    {"log_sum_exp": True, "top_logits": True},
    {"rank_ties": "inclusive"},
)


PLACES = (np.arange(MOST) * 7 + 3) % MOST


def some_rows(vocabulary, dtype):
    """Rows [64, V] with a few likely tokens far above a long tail, and a token of each."""
    rng = np.random.default_rng(vocabulary)
    tail = -1.8 * np.log(np.arange(1, vocabulary + 1)) + rng.normal(0, 0.3, (MOST, vocabulary))
    x = rng.permuted(tail, axis=1)
    # Rows that a small batch has too: few finite logits, and subnormal ones.
    x[PLACES[0], :7], x[PLACES[1]], x[PLACES[2]] = -np.inf, -1e-40, -1
    x[PLACES[1], 9], x[PLACES[2], 5] = -2e-40, 1e-40
    x = jnp.asarray(x, jnp.dtype(dtype))
    return x, jnp.asarray(rng.integers(0, vocabulary, MOST), jnp.int32)


def bits_of(x):
    return np.asarray(x).view(np.uint32)


# Up to three rows on a CPU are read in another way.
FEW = ((1, 0, 0, False), (2, 20, 1, False), (FEW_ROWS, 5, 0, True), (5, 40, 2, True))
MORE = ((3, 20, 1, False), (64, 1, 3, False))


@pytest.mark.parametrize(
    ("vocabulary", "dtype", "cases"),
    [(3001, "float32", FEW), pytest.param(5000, "bfloat16", MORE, marks=pytest.mark.slow)],
)
def test_no_batch_and_no_option_changes_a_rows_logprobs(vocabulary, dtype, cases):
    """Among all 64, with K = 100, they have the same bits; ids are the same too."""
    x, ids = some_rows(vocabulary, dtype)
    t = jnp.asarray(np.resize([1, 0.5, 2, 0, 3], MOST), jnp.float32)
    whole = programs.topk_logprobs(x, ids, 100, temperatures=t)
    for number, k, option, listed in cases:
        place = jnp.asarray(PLACES[:number], jnp.int32)
        given = {"temperatures": t[place], **OPTIONS[option]}
        if listed:
            given |= {"row_ids": place, "num_rows": jnp.int32(number)}
        if number % 2:
            given["extra_token_ids"] = jnp.zeros((number, 1), jnp.int32)
        out = programs.topk_logprobs(x if listed else x[place], ids[place], k, **given)
        wanted = (whole.token_ids[place, : k + 1], whole.logprobs[place, : k + 1])
        np.testing.assert_array_equal(out.token_ids, wanted[0])
        np.testing.assert_array_equal(bits_of(out.logprobs), bits_of(wanted[1]))


@pytest.mark.long
def test_no_batch_and_no_k_changes_what_a_sampled_row_leaves():
    """The sums from which `verify`'s raw, scaled and processed logprobs come."""
    x, _ = some_rows(3001, "float32")
    seeds = jnp.arange(MOST, dtype=jnp.uint32)

    @functools.partial(quick_compile.as_users, static_argnums=2)
    def call(x, seeds, k):
        one = jnp.ones(len(x), jnp.float32)
        filters = jnp.where(seeds % 2, 100, 0).astype(jnp.int32)
        sampling = Sampling(0.8 * one, filters, one, 0 * one, seeds)
        found = row_read.read_sampled_rows(GroupedRows.of(x), sampling, k)
        return found.groups, found.log_sum, found.largest, found.total, found.log_total

    whole = call(x, seeds, 20)
    for rows, k in (((5,), 0), ((9, 4, 31, 63), 20)):
        index = jnp.asarray(rows, jnp.int32)
        own = call(x[index], seeds[index], k)
        for one, other in zip(jax.tree.leaves(own), jax.tree.leaves(whole), strict=True):
            np.testing.assert_array_equal(bits_of(one), bits_of(other[index]))


def test_one_threads_work_stays_a_branch_once_compiled() -> None:
    def function(x: jax.Array) -> jax.Array:
        return jnp.exp(x) + 1

    x = jnp.arange(float(FEW_ROWS))
    assert is_small_batch(x)
    assert not is_small_batch(jnp.arange(FEW_ROWS + 1.0))
    program = jax.jit(lambda x: in_one_thread(function, x))
    chex.assert_trees_all_equal(program(x), jax.jit(function)(x))
    assert "conditional(" in (program.lower(x).compile().as_text() or "")
    assert "conditional(" not in (jax.jit(function).lower(x).compile().as_text() or "")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_loop_over_a_row_pads(dtype: str) -> None:
    def text(program, rows: int, width: int) -> str:
        given = jnp.zeros((rows, width), jnp.dtype(dtype)), jnp.zeros(rows, jnp.int32)
        return quick_compile.as_users(program).lower(*given).compile().as_text() or ""

    def pads(text: str) -> list[str]:
        """Of more than a group of tokens."""
        return re.findall(r"\[(?:\d+,)*\d{4,}\S* pad\(", text)

    def control(x: jax.Array, _: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, 255))).reshape(len(x), -1, 256).max(axis=2)

    ours = functools.partial(topk_logprobs, k=0)
    assert not pads(text(ours, 1, 32001) + text(ours, 9, 32001))
    assert pads(text(control, 9, 32001))
