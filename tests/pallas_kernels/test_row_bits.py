"""A row's bits are its own: no other row, no place, no K and no other output changes them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import topk_logprobs
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


def some_rows(vocabulary, dtype):
    """Rows [64, V] with a few likely tokens far above a long tail, and a token of each."""
    rng = np.random.default_rng(vocabulary)
    tail = -1.8 * np.log(np.arange(1, vocabulary + 1)) + rng.normal(0, 0.3, (MOST, vocabulary))
    x = jnp.asarray(rng.permuted(tail, axis=1), jnp.dtype(dtype))
    return x, jnp.asarray(rng.integers(0, vocabulary, MOST), jnp.int32)


def bits_of(x):
    return np.asarray(x).view(np.uint32)


@functools.cache
def compiled(k, option, listed, extra):
    def call(x, ids, row_ids, num_rows):
        return topk_logprobs(
            x,
            ids,
            k,
            row_ids=row_ids if listed else None,
            num_rows=num_rows if listed else None,
            extra_token_ids=jnp.zeros((len(ids), extra), jnp.int32) if extra else None,
            **OPTIONS[option],
        )

    return quick_compile.as_users(call)


def differences(vocabulary, dtype, cases):
    """The cases of which some row's logprobs have other bits than among all 64, with K = 100."""
    x, ids = some_rows(vocabulary, dtype)
    whole = programs.topk_logprobs(x, ids, 100)
    found = []
    for number, k, option, listed in cases:
        place = (np.arange(number) * 7 + 3) % MOST
        row_ids = jnp.asarray(place, jnp.int32)
        given = x if listed else x[row_ids]
        call = compiled(k, option, listed, extra=number % 2)
        out = call(given, ids[row_ids], row_ids, jnp.int32(number))
        wanted = np.asarray(whole.logprobs)[place, : k + 1]
        if not np.array_equal(bits_of(out.logprobs), bits_of(wanted)):
            found.append((number, k, option, listed))
    return found


FEW = ((1, 0, 0, False), (5, 40, 2, True))
MORE = ((3, 20, 1, False), (64, 1, 3, False))


@pytest.mark.parametrize(
    ("vocabulary", "dtype", "cases"),
    [(3001, "float32", FEW), pytest.param(5000, "bfloat16", MORE, marks=pytest.mark.slow)],
)
def test_no_batch_and_no_option_changes_a_rows_logprobs(vocabulary, dtype, cases):
    assert not differences(vocabulary, dtype, cases)


def test_no_batch_and_no_k_changes_what_a_sampled_row_leaves():
    """The sums from which `verify`'s raw, scaled and processed logprobs come."""
    x, _ = some_rows(3001, "float32")
    seeds = jnp.arange(MOST, dtype=jnp.uint32)

    @functools.partial(quick_compile.as_users, static_argnums=2)
    def call(x, seeds, k):
        one = jnp.ones(len(x), jnp.float32)
        filters = jnp.where(seeds % 2, 100, 0).astype(jnp.int32)
        sampling = Sampling(0.8 * one, filters, one, 0 * one, seeds)
        found = row_read.read(GroupedRows.of(x), sampling, k)
        return found.groups, found.log_sum, found.largest, found.total, found.log_total

    whole = call(x, seeds, 20)
    for rows, k in (((5,), 0), ((9, 4, 31, 63), 20)):
        index = jnp.asarray(rows, jnp.int32)
        own = call(x[index], seeds[index], k)
        for one, other in zip(jax.tree.leaves(own), jax.tree.leaves(whole), strict=True):
            np.testing.assert_array_equal(bits_of(one), bits_of(other[index]))
