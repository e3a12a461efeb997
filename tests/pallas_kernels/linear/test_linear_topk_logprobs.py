"""`linear_topk_logprobs`: its logits' definition, and what it finds in them block by block."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import linear_topk_logprobs
from pallas_kernels.backends.xla.selection import top_k
from pallas_kernels.linear import candidates, read_columns
from pallas_kernels.linear.types import Definition
from pallas_kernels.testing import oracle
from tests.support import linear_cases, programs, quick_compile

V, K = 333, 5


def way(name, rows, width=V):
    return linear_cases.ways(rows, width)[name]


READS = {
    **{
        name: functools.partial(linear_cases.run, schedule)
        for name, schedule in linear_cases.ways(11, V).items()
    },
    **{
        f"tiles of {tile}": functools.partial(linear_topk_logprobs, row_tile=tile)
        for tile in (1, 3, 64)
    },
}


@pytest.mark.parametrize("name", READS)
def test_every_edge_in_blocks_and_in_tiles(name):
    """Ties over blocks, invalid rows, rows and ids that are skipped, every kind of temperature."""
    logits = oracle.edge_rows(V, np.float32, 8).astype(np.float64)
    hidden, head = linear_cases.factors(logits)
    rng = np.random.default_rng(0)
    token_ids = rng.integers(0, V, 11).astype(np.int32)
    token_ids[9] = V
    given = {
        "row_ids": np.int32([0, 1, 2, 3, 4, 5, 6, -1, 7, 1, 0]),
        "temperatures": np.float32([1, 0.5, 2, 1, 1, 1, 1, 1, 1, 0, -1]),
        "extra_token_ids": rng.integers(-1, V + 1, (11, 3)).astype(np.int32),
        "num_rows": np.int32(10),
    }
    found = READS[name](hidden, head, token_ids, K, **given)
    oracle.assert_matches(found, oracle.topk_logprobs(logits, token_ids, K, **given))


def in_order(order):
    """Logits [7, 1000]: rising ones are all candidates of every part, falling ones of the first."""
    x = np.round(np.random.default_rng(1).normal(0, 30, (7, 1000)))
    if order == "crowded":  # late in the rows, and more than there is room for
        x[:, 800:808] = 300 + np.arange(8)
        x[1, 870::8], x[2, -60:], x[3, 740:756] = 400, 500, 290 + np.arange(16)
    if order == "nothing":
        x[:, 64:], x[0] = -np.inf, -np.inf
    return {"rising": np.sort(x), "falling": -np.sort(x), "equal": np.zeros_like(x)}.get(order, x)


@pytest.mark.parametrize("k", [1, 40])
@pytest.mark.parametrize("order", ["rising", "falling", "random", "equal", "crowded", "nothing"])
def test_the_top_k_whatever_the_vocabularys_order(order, k):
    x, ids = in_order(order), np.random.default_rng(1).integers(0, 1000, 7).astype(np.int32)
    found = linear_cases.run(way("columns", 7), *linear_cases.factors(x), ids, k)
    oracle.assert_matches(found, oracle.topk_logprobs(x, ids, k))


def random_case(dtype, seed=0, rows=24, width=1000, size=64):
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(dtype)
    hidden = rng.normal(size=(rows, size)).astype(dtype)
    head = (rng.normal(size=(width, size)) * 0.4).astype(dtype)
    bias = rng.normal(size=width).astype(np.float32)
    ids = rng.integers(0, width, rows).astype(np.int32)
    return hidden, head, bias, ids


@pytest.mark.parametrize(("name", "soft_cap"), [("one block", None), ("columns", 6.0)])
def test_the_definition_in_float64(name, soft_cap):
    """Scale, bias and soft cap; log-sum-exp and entropy too. Ids differ at near-ties alone."""
    hidden, head, bias, ids = random_case(jnp.float32)
    definition = Definition(0.7, soft_cap)
    x = 0.7 * np.float64(hidden) @ np.float64(head).T + bias
    x = x if soft_cap is None else soft_cap * np.tanh(x / soft_cap)
    t = np.linspace(0.5, 2, len(x)).astype(np.float32)
    found = linear_cases.run(
        way(name, 24, 1000), hidden, head, ids, K, bias=bias, temperatures=t,
        entropy=True, definition=definition,
    )  # fmt: skip
    y = x / t[:, None]
    log_sum_exp = np.log(np.exp(y).sum(1))
    logprobs = y - log_sum_exp[:, None]
    best = np.take_along_axis(x, np.asarray(found.token_ids[:, 1:]), 1)
    np.testing.assert_allclose(best, -np.sort(-x)[:, :K], atol=1e-5)
    np.testing.assert_allclose(
        found.logprobs, np.take_along_axis(logprobs, np.asarray(found.token_ids), 1), atol=2e-5
    )
    np.testing.assert_allclose(found.log_sum_exp, log_sum_exp, atol=2e-5)
    np.testing.assert_allclose(found.entropy, -(np.exp(logprobs) * logprobs).sum(1), atol=2e-5)


def test_ids_and_ranks_are_those_of_the_whole_products_logits():
    """Where other blocks add in another order, what differs is a near-tie; here none is seen.

    A rounded logit may then fall on the other side: one unit in the last place of bfloat16.
    """
    hidden, head, bias, ids = random_case("bfloat16", rows=48, width=2000)
    definition = Definition(logits_dtype="bfloat16")
    logits = quick_compile.jit(definition.logits)(hidden, head, bias)
    expected = programs.topk_logprobs(logits, ids, 20)
    found = linear_cases.run(
        way("columns", 48, 2000), hidden, head, ids, 20, bias=bias, definition=definition,
    )  # fmt: skip
    x = np.asarray(logits, np.float64)
    expected, found = jax.device_get((expected, found))
    there, here = (np.take_along_axis(x, f.token_ids, 1) for f in (expected, found))
    margin = np.abs(there - here).max(initial=0, where=there != here)
    differ = np.count_nonzero(expected.token_ids != found.token_ids)
    others = np.count_nonzero(expected.token_ranks != found.token_ranks)
    assert margin <= 2**-7 * np.abs(x).max(), f"{differ} ids differ, by up to {margin}"
    assert differ <= 0.01 * there.size, f"{differ} ids differ"
    assert others <= 2, f"{others} ranks differ"


def test_ranks_are_right_where_the_given_logit_was_guessed_wrong(monkeypatch):
    hidden, head, bias, ids = random_case(jnp.float32)

    def of(name, **compiler):
        return linear_cases.run(way(name, 24, 1000), hidden, head, ids, 0, bias=bias, **compiler)

    def own():  # a compiler whose programs no other test gets
        return {"compiler": functools.partial(quick_compile.jit)}

    expected = of("one block")
    monkeypatch.setattr(read_columns, "given_logits", lambda *a: jnp.full(24, 3.0, jnp.float32))
    found = of("columns", **own())
    np.testing.assert_array_equal(found.token_ranks, expected.token_ranks)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)
    # Negative control: without the second count, they would be those of the guess.
    monkeypatch.setattr(read_columns, "recount", lambda *a: jnp.zeros(24, jnp.int32))
    assert np.any(of("columns", **own()).token_ranks != expected.token_ranks)


def test_the_guess_has_the_bits_of_the_block():
    """So that the second count is rare: a number's bits do not depend on the columns beside it."""
    hidden, head, bias, ids = random_case(jnp.float32, rows=100)
    definition = Definition(0.5, 5.0)

    def both(hidden, head, bias, ids):
        product = read_columns.Product(hidden, head, bias, jnp.int32(1000))
        guess = read_columns.given_logits(definition, product, ids)
        starts = jnp.asarray([*range(0, 936, 64), 936], jnp.int32)
        parts = [
            read_columns.column_logits(definition, product, start, jnp.int32(0), 64)
            for start in starts
        ]
        at = jnp.minimum(ids // 64, 15)
        column = ids - starts[at]
        return guess, jnp.stack(parts)[at, jnp.arange(100, dtype=jnp.int32), column]

    guess, real = quick_compile.as_users(both)(hidden, head, bias, ids)
    assert np.count_nonzero(np.asarray(guess) != np.asarray(real)) <= 1


def test_the_door():
    """The call as users make it, of the sizes that a test can afford, with padding in the head."""
    hidden, head, bias, ids = random_case(jnp.bfloat16)
    padded = np.concatenate([head, np.full((24, 64), np.nan, head.dtype)])
    bias = np.concatenate([bias, np.zeros(24, np.float32)])
    found = programs.linear_topk_logprobs(
        hidden, padded, ids, K, bias=bias, vocab_size=1000, logits_dtype="bfloat16", num_rows=20
    )
    definition = Definition(logits_dtype="bfloat16")
    logits = quick_compile.as_users(definition.logits)(hidden, head, bias[:1000])
    expected = programs.topk_logprobs(logits, ids, K, num_rows=20)
    np.testing.assert_array_equal(found.token_ids, expected.token_ids)
    np.testing.assert_array_equal(found.token_ranks, expected.token_ranks)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)
    nothing = linear_topk_logprobs(hidden[:0], head, ids[:0], K)
    assert nothing.token_ids.shape == (0, K + 1)


@pytest.mark.parametrize("name", [pytest.param("row blocks", marks=pytest.mark.slow), "columns"])
def test_a_head_whose_tokens_are_columns(name):
    """`head_axes` of "HV": the same results and gradients, as the products are exact here."""
    rng = np.random.default_rng(2)
    hidden, head = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((16, 24), (V, 24)))
    ids = rng.integers(-1, V + 1, 16).astype(np.int32)

    def loss(hidden, head, transposed):
        definition = Definition(0.25, transposed=transposed)
        found = linear_cases.run(
            way(name, 16), hidden, head, ids, K, definition=definition, entropy=True,
            compiler=lambda call: call,
        )  # fmt: skip
        return jnp.nansum(found.logprobs) + jnp.sum(found.entropy), found

    slopes = quick_compile.jit(jax.value_and_grad(loss, (0, 1), has_aux=True), static_argnums=2)
    (_, expected), (by_hidden, by_head) = slopes(hidden, head, False)
    (_, found), (hidden_too, head_too) = slopes(hidden, head.T, True)
    oracle.assert_matches(found, expected)
    np.testing.assert_allclose(hidden_too, by_hidden, atol=1e-5)
    np.testing.assert_allclose(head_too.T, by_head, atol=1e-5)


MOST, ROOM = 20, 64


@pytest.mark.parametrize("rows", [5, 300])
def test_wide_parts_of_many_rows(rows: int) -> None:
    """Parts are cut where they are wide, and rows where they are many: neither divides."""
    rng = np.random.default_rng(4)
    width = candidates.COLUMNS_AT_ONCE + 301
    x = jnp.asarray(np.round(rng.normal(0, 9, (rows, 2 * width))), jnp.float32)

    def call(x):
        def step(i, running):
            part = jax.lax.dynamic_slice_in_dim(x, i * width, width, 1)
            return candidates.appended(running, part, i * width, MOST)

        running = jax.lax.fori_loop(0, 2, step, candidates.empty(rows, MOST, ROOM))
        return candidates.ordered(running, MOST)

    found = quick_compile.jit(call)(x)
    chex.assert_trees_all_equal(tuple(found), top_k(x, MOST))
