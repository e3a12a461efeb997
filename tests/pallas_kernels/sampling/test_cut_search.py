"""Cuts that candidates cannot hold: searches of rows that are long enough for a guess."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backends import exact_sums
from pallas_kernels.meshes.placement import WHOLE
from pallas_kernels.sampling import row_read, truncation
from pallas_kernels.sampling.cuts import search, search_keys, searched_rows
from pallas_kernels.sampling.parameters import of_each_row
from pallas_kernels.sampling.rows import GroupedRows
from tests.support import quick_compile
from tests.support.expected_probs import kept_by_sorting
from tests.support.shards import P, on_shards
from tests.support.truncation_checks import kept_tokens, sampling_of

V = 5003  # more than `search_keys.SMALLEST_SAMPLED`, no multiple of a run
KINDS = ("plain", "flat", "ties", "equal", "masked", "ascending", "misled", "zeros", "far", "steep")


def rows_of(kind, vocab, dtype, seed=0):
    """Rows [2, vocab] with one kind of difficulty."""
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 2, (2, vocab))
    sampled = np.arange(vocab) % search_keys.RUN < search_keys.SAMPLED
    made = {
        "flat": x * 0.01,
        "ties": np.round(x),
        "equal": np.ones_like(x),
        "masked": np.where(rng.random(x.shape) < 0.8, -np.inf, x),
        "ascending": np.sort(x, axis=1),
        "misled": np.where(sampled, x - 5, x),  # the sample says too little
        "zeros": np.where(x < 1, np.where(x < 0, 0.0, -0.0), x),
        "far": x + 3000,
        "steep": x * 40,
    }
    return made.get(kind, x).astype(dtype)


FILTERS = {  # of a slot each: top-k, top-p, min-p
    "top-p": ([0, 0], [0.95, 0.5], 0.0),
    "nearly all": ([0, 0], [1 - 1e-4, 0.9999], 0.0),
    "top-k": ([300, 4000], 1.0, 0.0),
    "all but one": ([V - 1, V + 5], 1.0, 0.0),
    "top-k and top-p": ([2000, 300], [0.9, 0.99], 0.0),
    "top-k, top-p and min-p": ([3000, 1500], [0.99, 0.9], [1e-4, 0.3]),
    "min-p": ([0, 0], 1.0, [1e-3, 0.02]),
}


@quick_compile.jit
def cut_of(rows, sampling):
    return truncation(rows, sampling)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_searched_cuts_are_those_of_sorting(dtype):
    compared = total = 0
    for number, kind in enumerate(KINDS):
        rows = rows_of(kind, V, jnp.dtype(dtype), number)[:, None]
        for temperature in ([1.0, 0.7], [0.3, 1e3]):
            for top_k, top_p, min_p in FILTERS.values():
                sampling = sampling_of(temperature, top_k, top_p, min_p)
                compared += check(rows, sampling, cut_of(rows, sampling))
                total += 2
    assert compared > 0.8 * total


def check(rows, sampling, cut):
    """Compare the kept tokens; returns how many rows were no matter of rounding."""
    kept, log_kept = jax.device_get((kept_tokens(cut, rows), cut.log_kept))
    columns = [np.asarray(field).tolist() for field in sampling[:4]]
    compared = 0
    for slot, row in enumerate(rows[:, 0]):
        expected, exact, near = kept_by_sorting(row, *(column[slot] for column in columns))
        if near:
            continue
        compared += 1
        finite = ~np.isneginf(row.astype(np.float32))
        np.testing.assert_array_equal(kept[slot, 0] & finite, expected)
        assert abs(log_kept[slot, 0] - exact) <= 2e-6
    return compared


@pytest.mark.chips
def test_no_shard_changes_a_bit_of_a_searched_cut():
    """Of ragged shards that have a guess each, and where equal tokens lie on several of them."""
    shards, vocab = 3, 3 * 4200 - 5
    rows = np.stack([rows_of(kind, vocab, jnp.float32)[0] for kind in KINDS])[:, None]
    top_k = [0, 0, 300, 2000, 0, 0, 9000, 0, 5000, 0]
    top_p = [0.95, 0.9, 1.0, 0.7, 0.95, 0.9999, 0.9, 0.95, 1.0, 1.0]
    asked = sampling_of([1.0] * len(KINDS), top_k, top_p, [0.0] * 9 + [1e-12])
    cut = on_shards(lambda x, shard: truncation(x, asked, shard=shard), shards, rows, vocab, P())
    chex.assert_trees_all_equal(cut, quick_compile.jit(lambda x: truncation(x, asked))(rows))


def reads_of(x, sampling, monkeypatch):
    """How often a search reads its rows, and what is kept."""
    reads = []
    sums_above, sums_above_run = searched_rows.sums_above, searched_rows.sums_above_run

    def counted(rows, keys, by_mass):
        jax.debug.callback(lambda _: reads.append(keys.shape[1]), by_mass, ordered=True)
        return sums_above(rows, keys, by_mass)

    def counted_run(rows, top, number, by_mass):
        jax.debug.callback(lambda _: reads.append(number), by_mass, ordered=True)
        return sums_above_run(rows, top, number, by_mass)

    monkeypatch.setattr(search, "sums_above", counted)
    monkeypatch.setattr(search, "sums_above_run", counted_run)

    @quick_compile.jit
    def searched(x):
        each = of_each_row(sampling, x.shape[:1])
        scale = row_read.read_sampled_rows(GroupedRows.of(x), each).scale
        return search.searched(x, each, scale, WHOLE)

    jax.block_until_ready(searched(x))
    jax.effects_barrier()
    return [number for number in reads if number > 1]


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [0.5, 3])
def test_a_wide_nucleus_takes_few_reads(dtype, width, monkeypatch):
    """Of numbers without an order, as a guess expects them; each read more is a fifth of a step."""
    x = np.random.default_rng(1).normal(0, width, (8, 65_536)).astype(jnp.dtype(dtype))
    sampling = sampling_of([1.0] * 8, top_p=0.95)
    assert 1 <= len(reads_of(x, sampling, monkeypatch)) <= 3


def test_a_misled_search_ends_soon(monkeypatch):
    """The worst case: the guess is of no use, and the keys of float32 are divided evenly."""
    x = rows_of("misled", 8192, jnp.float32)
    sampling = sampling_of([1.0] * 2, top_p=0.95)
    assert 2 <= len(reads_of(x, sampling, monkeypatch)) <= 14


@pytest.mark.parametrize("by_mass", [True, False])
@pytest.mark.parametrize(("kind", "vocab"), [("ties", 8192), ("misled", 8229), ("ties", 101)])
def test_counted_tokens_weigh_what_they_do_one_by_one(kind, vocab, by_mass):
    """Sums above keys side by side are those of `sums_above`, to the bit."""
    x = jnp.asarray(rows_of(kind, vocab, jnp.bfloat16))
    each = of_each_row(sampling_of([1.0, 0.5]), (2,))
    scale = row_read.read_sampled_rows(GroupedRows.of(x), each).scale
    rows = searched_rows.SearchedRows(x, scale, WHOLE)
    top = jnp.sort(rows.keys, axis=1)[:, -100].astype(jnp.int32)
    keys, sums = searched_rows.sums_above_run(rows, top, 40, jnp.bool_(by_mass))
    chex.assert_trees_all_equal(keys[:, 0], top)
    chex.assert_trees_all_equal(keys[:, 1:], keys[:, :-1] - 1)
    chex.assert_trees_all_equal(sums, searched_rows.sums_above(rows, keys, jnp.bool_(by_mass)))
    assert any(len(np.unique(digit[0])) > 1 for digit in sums)  # some of these keys have tokens


def test_weights_are_added_up_once_for_all_keys():
    """The sums above keys are those of the weights, whole numbers of any dtype and order."""
    x = rows_of("ties", V, jnp.float32)
    sampling = of_each_row(sampling_of([1.0, 0.5]), (2,))
    scale = row_read.read_sampled_rows(GroupedRows.of(jnp.asarray(x)), sampling).scale
    rows = searched_rows.SearchedRows(jnp.asarray(x), scale, WHOLE)
    keys = rows.keys[:, :5]
    sums = searched_rows.sums_above(rows, keys, jnp.bool_(True))
    weights = rows.weights(rows.logits)
    for i in range(5):
        above = jnp.where(rows.keys > keys[:, i, None], weights, 0)
        expected = exact_sums.mass(above, V)
        chex.assert_trees_all_equal(tuple(x[:, i] for x in sums), expected)


@pytest.mark.parametrize("vocab", [2, 200, 300, 50_257, 2**20])
def test_tokens_weights_have_the_digits_of_any_weights(vocab):
    tiny = np.float32(2.0) ** -np.arange(0, 150, dtype=np.float32)
    some = np.random.default_rng(0).uniform(0, 1, 1000).astype(np.float32)
    weights = jnp.asarray(np.concatenate([[0, 1], 1 - tiny[:24], tiny, some, some**9]))
    expected = jax.jit(exact_sums.digits, static_argnums=1)(weights, vocab)
    of_tokens = jax.jit(exact_sums.digits_of_tokens, static_argnums=1)(weights, vocab)
    chex.assert_trees_all_equal(of_tokens, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_search_of_rows_without_an_answer_ends(dtype):
    x = rows_of("ties", 8192, jnp.dtype(dtype))
    x = jnp.concatenate([jnp.asarray(x)] * 2).at[0, 5].set(jnp.nan).at[1, 7].set(jnp.inf)
    each = of_each_row(sampling_of([1.0] * 4, top_k=3000, top_p=0.9), (4,))
    scale = row_read.read_sampled_rows(GroupedRows.of(x), each).scale
    scale = scale._replace(inverse=scale.inverse.at[2].set(jnp.nan).at[3].set(jnp.inf))
    rows = searched_rows.SearchedRows(x, scale, WHOLE)
    assert (rows.as_limits(rows.keys[:, :1]) == jnp.iinfo(rows.keys.dtype).max).all()
    cut = quick_compile.jit(lambda x: search.searched(x, each, scale, WHOLE))(x)
    assert jax.block_until_ready(cut).cut_logit.shape == (4,)


@pytest.mark.long
def test_a_search_runs_without_jit():
    x = jnp.asarray(rows_of("plain", 300, np.float32))[:, None]
    sampling = sampling_of([1.0] * 2, top_k=200, top_p=0.9)
    with jax.disable_jit():
        cut = truncation(x, sampling)
    chex.assert_trees_all_equal(cut, truncation(x, sampling))
