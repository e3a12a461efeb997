"""The cut of top-k, top-p and min-p, against sorting in float64, on one device and on shards."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.backends import exact_sums
from pallas_kernels.meshes.placement import WHOLE
from pallas_kernels.numbers.exponential import exponential
from pallas_kernels.numbers.random_draws import DRAFT, Source, gumbel
from pallas_kernels.sampling import kept_sets, truncation
from tests.support import quick_compile
from tests.support.processed_probs import processed_probs
from tests.support.shards import P, on_shards
from tests.support.truncation_checks import check, kept_tokens, sampling_of


@quick_compile.jit
def cut_and_probs(rows, sampling):
    return truncation(rows, sampling), processed_probs(rows, sampling)


def random_rows(rng, vocab, dtype, kind):
    """Rows [3, 2, V] with one kind of difficulty."""
    x, share = rng.normal(0, 3, (3, 2, vocab)), rng.random((3, 2, vocab))
    if kind == "invalid":
        x[0, 0, vocab // 2], x[1, 0, 0], x[2, 0] = np.nan, np.inf, -np.inf
    made = {
        "ties": np.round(x * 2) / 2,
        "masked": np.where(share < 0.7, -np.inf, x),
        "equal": np.ones_like(x),
        "zeros": np.where(share < 0.5, 0.0, -0.0),
        "wide": x * 1e4,
    }
    return made.get(kind, x).astype(dtype)


VOCAB = 131
FEW = [0.0, -0.0, 1.0, 2.0, -np.inf, np.nan, np.inf]
# Top-k beyond the read's candidates too, whose mass top-p takes its share of.
FILTERS = (1, 1.0, 0.0), (7, 0.83, 0.0), (0, 0.61, 0.02), (VOCAB, 0.97, 1.0), (130, 0.3, 0.0)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
def test_kept_tokens_are_those_of_sorting(dtype):
    rng = np.random.default_rng(0)
    compared = total = 0
    for kind in ("plain", "ties", "masked", "equal", "zeros", "invalid", "wide"):
        rows = random_rows(rng, VOCAB, dtype, kind)
        for temperature in ([0.7, 1.0, 1.9], [1e-4, 1e4, 0.0], [3e38, 0.3, 1.0]):
            for filters in FILTERS:
                sampling = sampling_of(temperature, *filters)
                compared += check(rows, sampling, *cut_and_probs(rows, sampling))
                total += 6
    assert compared > 0.9 * total


@given(
    row=st.lists(st.sampled_from(FEW) | st.floats(-9, 9, width=32), min_size=8, max_size=8),
    temperature=st.sampled_from([0.0, 1e-4, 0.5, 1.0, 1e4]),
    top_k=st.integers(0, 9),
    top_p=st.sampled_from([1e-7, 0.25, 0.5, 0.61, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.07, 0.33, 1.0]),
)
def test_any_row_and_any_filter(row, temperature, top_k, top_p, min_p):
    rows = np.array(row, np.float32)[None, None]
    sampling = sampling_of([temperature], top_k, top_p, min_p)
    check(rows, sampling, *cut_and_probs(rows, sampling))


def test_by_hand():
    row = jnp.array([[[1.0, 3.0, 3.0, 3.0, -0.0, 0.0, -jnp.inf, -jnp.inf]]])
    nothing_cut, share = (-np.inf, 7, 0), np.log(2 / (3 + np.exp(-2) + 2 * np.exp(-3)))
    for sampling, expected in (
        (sampling_of([1.0], top_k=2), (3, 2, share)),
        (sampling_of([1.0]), nothing_cut),
        (sampling_of([1.0], top_p=1.5), nothing_cut),
        (sampling_of([0.0], top_k=4, top_p=0.5), (np.inf, 1, 0)),
    ):
        found = [part.item() for part in cut_and_probs(row, sampling)[0]]
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_exponentials_are_the_same_in_every_program():
    rows = np.random.default_rng(7).normal(0, 3, (42, 301)).astype(np.float32)

    def both(exp):
        fused = jax.jit(lambda x: exp(x - x.max(-1, keepdims=True)))(rows)
        alone = jax.jit(exp)(rows - rows.max(-1, keepdims=True))
        return (np.asarray(fused) != np.asarray(alone)).sum()

    assert both(exponential) == 0
    if jax.default_backend() == "cpu":  # the reason for a function of our own
        assert both(jnp.exp) > 0


@pytest.mark.parametrize("vocab", [1, 2, 300, 32_000, 128_256, 262_144])
def test_fixed_point_sums_are_exact_enough(vocab):
    @quick_compile.jit
    def sums(weights):
        mass = exact_sums.mass(weights[None], vocab)
        got = exact_sums.to_float(mass, vocab)
        back, less = (exact_sums.at_least(got * share, vocab) for share in (1, 0.7))
        return mass, got, back, exact_sums.less(less, mass), exact_sums.less(mass, less)

    rng = np.random.default_rng(vocab)
    for weights in (
        np.ones(vocab, np.float32),
        rng.random(vocab, np.float32),
        np.exp(-30 * rng.random(vocab)).astype(np.float32),
        np.full(vocab, 2.0**-25 + 2.0**-44, np.float32),
    ):
        weights[0] = 1  # as the largest logit's always is
        found = jax.device_get(sums(weights))
        mass, got, back, is_less, is_more = jax.tree.map(lambda x: x.reshape(()), found)
        exact = weights.astype(np.float64).sum()
        bits = exact_sums.digit_bits(vocab)
        one = 2.0 ** (bits * len(mass))
        whole, again = (
            sum(int(d) << bits * i for i, d in enumerate(digits[::-1])) for digits in (mass, back)
        )
        assert abs(whole / one - exact) <= 2.0**-22
        assert abs(float(got) - whole / one) <= 2.0**-22 * whole / one
        assert again == round(float(got) * one)
        assert (is_less, is_more) == (True, False)


RAGGED = 301  # columns


@functools.cache
def rows_for_shards():
    rng = np.random.default_rng(5)
    kinds = ["plain", "zeros", "ties", "ties", "masked", "masked", "invalid"]
    rows = np.concatenate([random_rows(rng, RAGGED, np.float32, kind) for kind in kinds])
    temperature, top_k = [1.0, 0.3, 1e4, 1.0, 0.8, 0.0, 1.0] * 3, [0, 40, 0, 9, 7, 2, 0] * 3
    top_p = [0.9, 0.8, 0.5, 1.0, 1.0, 0.9, 1.0] * 3
    return rows, sampling_of(temperature, top_k, top_p, [0.01, 0, 0.1] * 7)


def on_shard(x, shard):
    _, sampling = rows_for_shards()
    return truncation(x, sampling, shard=shard), processed_probs(x, sampling, shard=shard)


@functools.cache
def of_one_device():
    """The results of one device, compiled with XLA's defaults: bits must not depend on that."""
    return jax.jit(lambda x: on_shard(x, WHOLE))(rows_for_shards()[0])


@pytest.mark.long
@pytest.mark.parametrize("shards", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_shards_give_the_same_bits(shards):
    """Ragged last shards are padded with NaN, which must not count."""
    out = (P(), P(None, None, "model"))
    cut, probs = on_shards(on_shard, shards, rows_for_shards()[0], RAGGED, out)
    whole_cut, whole_probs = of_one_device()
    chex.assert_trees_all_equal(cut, whole_cut)
    probs = np.asarray(probs)
    np.testing.assert_array_equal(probs[..., :RAGGED], whole_probs)
    assert (probs[..., RAGGED:] == 0).all()


def test_noise_belongs_to_source_and_token_and_is_gumbels():
    @quick_compile.jit
    def noises():
        source = Source(jnp.array([3], jnp.uint32), jnp.array([11], jnp.int32))
        every, last = jnp.arange(20_000, dtype=jnp.int32)[None], jnp.array([[7, 19_999]], jnp.int32)
        return gumbel(source, DRAFT, every)[0], gumbel(source, DRAFT, last)[0]

    noise, part = jax.device_get(noises())
    np.testing.assert_array_equal(part, noise[[7, 19_999]])
    assert scipy.stats.kstest(noise, "gumbel_r").pvalue > 1e-3
    assert scipy.stats.kstest(noise + 0.05, "gumbel_r").pvalue < 1e-3


# Rows of min-p that keep many tokens: more candidates, and a search of whole rows.
V = 1100  # five groups, the last one short; more than the read's candidates, and than 1,024
GAP_KINDS = ("flat", "ties", "masked", "one group", "equal", "zeros", "large", "peaked")
MIN_P = (0.02, 0.05, 1e-30, 0.9, 0.1, 0.5, 0.02, 0.2)


def rows_of(dtype):
    """Rows [8, 2, V], one kind a slot; of all but the last, min-p keeps more than 64 tokens."""
    rng = np.random.default_rng(11)
    x = rng.normal(0, 0.5, (len(GAP_KINDS), 2, V))
    x[1] = np.round(2 * x[1]) / 2
    x[2] = np.where(rng.random(x[2].shape) < 0.7, -np.inf, x[2])
    x[3] -= 9
    x[3, :, 256:512] = rng.normal(0, 0.01, (2, 256))
    x[4] = 1
    x[5] = np.where(rng.random(x[5].shape) < 0.5, 0.0, -0.0)
    x[6] += 1000  # a step of bfloat16 there is wider than the gap
    x[7] *= 20
    return x.astype(dtype)


def sampling(top_k=0, top_p=1.0):
    temperature = [1.0, 0.7, 1.9, 1.0, 1e4, 0.3, 1.0, 1.0]
    return sampling_of(temperature, top_k, top_p, np.float32(MIN_P))


def test_kept_tokens_of_a_gap_are_those_of_sorting():
    rows = rows_of(jnp.bfloat16)
    found = cut_and_probs(rows, sampling())
    assert check(rows, sampling(), *found) >= 12
    cut = jax.device_get(found[0])
    x = rows.astype(np.float32)
    tied = np.where(x == cut.cut_logit[..., None], np.arange(V), -1)
    np.testing.assert_array_equal(tied.max(axis=-1), cut.cut_id)  # the last of equal ones


@pytest.mark.parametrize("top_p", [0.0, -1.0, 1e-38, 1e-20])
def test_a_share_of_nothing_keeps_the_likeliest_token(top_p):
    """Beside every top-k: of candidates, of more of them, and of those that a search must cut."""
    rows, top_k = rows_of(jnp.bfloat16), [0, 1, 100, 300, 1024, 1025, V - 1, 2 * V]
    asked = sampling_of([1.0, 0.7, 1.9, 1.0, 1e4, 0.3, 1.0, 1.0], top_k, np.float32(top_p))
    for shift in range(0, 8, 3):  # each kind of rows has top-ks of three sorts
        x = np.roll(rows, shift, axis=0)
        cut, probs = jax.device_get(cut_and_probs(x, asked))
        likeliest = np.arange(V) == x.astype(np.float32).argmax(axis=2)[..., None]
        np.testing.assert_array_equal(kept_tokens(cut, x), likeliest)
        np.testing.assert_array_equal(probs, likeliest)


@pytest.mark.chips
def test_shards_cut_a_gap_alike():
    """Ragged shards are padded with NaN, and groups are split; one slot has more candidates."""
    asked, rows = sampling(top_p=[0.9] + [1.0] * 7), rows_of(jnp.float32)
    cut = on_shards(lambda x, shard: truncation(x, asked, shard=shard), 2, rows, V, P())
    chex.assert_trees_all_equal(cut, quick_compile.jit(lambda x: truncation(x, asked))(rows))


def test_numbers_that_are_missing_have_no_weight():
    """Top-k wants more than there are: a share is of these alone, also of lowest numbers."""
    x = np.full((2, 2049), -np.inf, np.float16)
    x[:, :617], x[1, 617:620] = 0, np.finfo(np.float16).min  # exp(-0.655), each
    cut = truncation(jnp.asarray(x), sampling_of([1e5, 1e5], top_k=2048, top_p=0.5))
    assert cut.cut_id.tolist() == [308, 309]


SUBNORMAL = 1e-40


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("k", [3, 100, 300, 1025])
def test_subnormal_logits_are_cut_in_their_order(k, dtype):
    """k - 1 logits of 3, then 1e-40 at a higher id than 0 and -1e-40: it alone is kept of these.

    By candidates, by more of them, and by the search; kept sets list the same. XLA takes a
    subnormal number for zero where it compares floats.
    """
    vocabulary = 2 * k + 40
    row = np.full(vocabulary, -5, np.float32)
    row[: k - 1] = 3
    row[k - 1], row[k], row[vocabulary - 2] = 0, -SUBNORMAL, SUBNORMAL
    x = jnp.asarray(row, dtype)[None]
    sampling = sampling_of([1.0], top_k=k)
    cut = jax.device_get(quick_compile.as_users(truncation)(x, sampling))
    assert cut.cut_id.tolist() == [vocabulary - 2]
    expected = [*range(k - 1), vocabulary - 2]
    ids = jnp.arange(vocabulary, dtype=jnp.int32)[None]
    keeps = quick_compile.as_users(lambda cut, x, ids: cut.keeps(x, ids))
    kept = np.asarray(keeps(cut, x.astype(jnp.float32), ids))[0]
    assert np.flatnonzero(kept).tolist() == expected
    if k <= 1024:
        sets = kept_sets(x, jnp.zeros(1, jnp.int32), 1, jax.tree.map(jnp.asarray, cut))
        assert np.asarray(sets.token_ids[0, : int(sets.counts[0])]).tolist() == expected
