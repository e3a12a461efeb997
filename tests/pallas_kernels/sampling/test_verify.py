"""Verification: hand-made cases, and the emitted distribution."""

import functools
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from pallas_kernels.numbers.random_draws import ACCEPT, RECOVER
from pallas_kernels.sampling import drafts as drawing
from pallas_kernels.sampling.parameters import Sampling
from pallas_kernels.sampling.types import CompactQ, Drafts
from pallas_kernels.sampling.verification import accepted_by_ratio, verify
from tests.support import quick_compile


def rows_choosing(ids, vocab=5):
    """Logits [B, S, V] whose largest are `ids` [B, S]."""
    return jax.nn.one_hot(jnp.asarray(ids), vocab) * 3.0


VERIFY = quick_compile.jit(verify)

# Target ids, drafts, how many of them are proposed. The slots emit: all drafts and the bonus token;
# one and the recovered token; none and that; one of one and the bonus; the bonus alone.
RAGGED = [
    ([1, 2, 3], [1, 2], 2),
    ([1, 2, 3], [1, 4], 2),
    ([1, 2, 3], [4, 2], 2),
    ([1, 2, 3], [1, 2], 1),
    ([1, 2, 3], [1, 2], 0),
]
INVALID = [([1, 2, 3], [1, 2], 2)] * 4


@functools.cache
def greedily(with_jit, **known):
    """Ids and counts of the ragged and the invalid slots, in one batch."""
    target, drafts, proposed = map(np.array, zip(*RAGGED, *INVALID, strict=True))
    logits = np.array(rows_choosing(target))
    invalid = logits[len(RAGGED) :]
    invalid[0, 1] = [np.nan, -1, 2, 2, 0]  # lowest id among the largest that are not NaN
    invalid[1, 0, 4] = np.inf
    invalid[2, 1] = -np.inf
    invalid[3, 1] = np.nan
    batch = len(logits)
    call = functools.partial(verify, **known)
    got = (quick_compile.jit(call) if with_jit else call)(
        jnp.asarray(logits),
        Drafts(jnp.asarray(drafts, jnp.int32), jnp.asarray(proposed, jnp.int32), None),
        Sampling.greedy(batch),
        jnp.zeros(batch, jnp.int32),
    )
    return np.asarray(got.token_ids), np.asarray(got.num_tokens)


both = pytest.mark.parametrize("with_jit", [True, pytest.param(False, marks=pytest.mark.slow)])


@pytest.mark.fast
@both
def test_ragged_acceptance(with_jit):
    ids, num = (x[: len(RAGGED)] for x in greedily(with_jit))
    np.testing.assert_array_equal(num, [3, 2, 1, 2, 1])
    np.testing.assert_array_equal(
        ids, [[1, 2, 3], [1, 2, -1], [1, -1, -1], [1, 2, -1], [1, -1, -1]]
    )


@pytest.mark.fast
def test_what_is_known_to_be_greedy_needs_nothing_of_sampling():
    for found, expected in zip(greedily(True, all_greedy=True), greedily(True), strict=True):
        np.testing.assert_array_equal(found, expected)
    given = rows_choosing([[1, 2]]), Drafts(jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32))
    more = Sampling.of(1, temperature=1.0), jnp.zeros(1, jnp.int32)
    for k in (None, 2):
        programs = [
            jax.jit(functools.partial(verify, all_greedy=known, k=k)).lower(*given, *more).as_text()
            for known in (True, False)
        ]
        assert ["466688986" in text for text in programs] == [False, True]  # of Threefry
    found = verify(*given, *more, all_greedy=True)
    np.testing.assert_array_equal(found.token_ids, [[1, -1]])


@pytest.mark.fast
@both
def test_verification_stops_at_an_invalid_row(with_jit):
    ids, num = (x[len(RAGGED) :] for x in greedily(with_jit))
    np.testing.assert_array_equal(num, [2, 1, 2, 2])
    np.testing.assert_array_equal(ids, [[1, 2, -1], [4, -1, -1], [1, 0, -1], [1, 0, -1]])


def test_no_drafts_is_a_normal_case():
    got = VERIFY(
        rows_choosing([[1], [2]]),
        Drafts(jnp.zeros((2, 0), jnp.int32), jnp.zeros(2, jnp.int32), None),
        Sampling.greedy(2),
        jnp.zeros(2, jnp.int32),
    )
    np.testing.assert_array_equal(got.token_ids, [[1], [2]])


@pytest.mark.slow
def test_under_vmap_and_in_a_loss():
    """`vmap` gives what calls give one by one; a loss over tokens has its own gradient alone."""
    x = jnp.asarray(np.random.default_rng(2).normal(0, 2, (2, 3, 2, 40)), jnp.float32)
    drafts = Drafts(jnp.argmax(x[0, :, :1], axis=-1).astype(jnp.int32), jnp.ones(3, jnp.int32))
    sampling = Sampling.greedy(3)._replace(
        temperature=jnp.array([0.0, 0.7, 1.0]), top_k=jnp.array([0, 5, 0], jnp.int32)
    )

    def tokens(x):
        return verify(x, drafts, sampling, jnp.zeros(3, jnp.int32)).token_ids

    def loss(x, ids=None):
        ids = tokens(x) if ids is None else ids
        logprobs = jax.nn.log_softmax(x, axis=-1)
        return jnp.take_along_axis(logprobs, jnp.maximum(ids, 0)[..., None], axis=-1).sum()

    one_by_one = jnp.stack([quick_compile.jit(tokens)(one) for one in x])
    chex.assert_trees_all_equal(quick_compile.jit(jax.vmap(tokens))(x), one_by_one)
    found = quick_compile.jit(jax.grad(loss))(x[0])
    chex.assert_trees_all_close(found, jax.grad(loss)(x[0], one_by_one[0]), atol=1e-6)


@pytest.mark.fast
def test_shapes_that_do_not_fit_are_refused():
    message = r"drafts \(1, 3\) do not go .* \(1, 3, 4\): B slots of S rows verify .* = \(1, 2\) dr"
    with pytest.raises(ValueError, match=message):
        verify(
            jnp.zeros((1, 3, 4)),
            Drafts(jnp.zeros((1, 3), jnp.int32), jnp.zeros(1, jnp.int32), None),
            Sampling.greedy(1),
            jnp.zeros(1, jnp.int32),
        )


@pytest.mark.fast
def test_a_token_of_probability_zero_is_never_accepted():
    u = jnp.array([0.0, 0.0, 0.999, 0.5, 0.5])
    p = jnp.array([0.0, 0.2, 0.2, 0.2, 0.0])
    q = jnp.array([0.3, 0.3, 0.2, 0.5, 0.0])
    np.testing.assert_array_equal(accepted_by_ratio(u, p, q), [False, True, True, False, False])


P = np.array([[0.45, 0.25, 0.2, 0.1, 0.0], [0.1, 0.1, 0.6, 0.1, 0.1], [0.2] * 5])
Q = np.array([[0.1, 0.2, 0.3, 0.15, 0.25], [0.05, 0.6, 0.15, 0.1, 0.1]])
ROWS = 30_000


@quick_compile.jit
def verify_by_a_rule(logits, drafts, sampling, positions, broken):
    """Verify by the usual rule, or by a `broken` one in which q plays no part."""

    def accept(u, p, q):
        return jnp.where(broken, p > 0, u * q < p)

    return verify(logits, drafts, sampling, positions, accept=accept)


def emitted(drafts, q, temperature=1.0, broken=False):
    """Tokens [N, 3] and counts [N] of N independent slots with the same rows."""
    sampling = Sampling.greedy(ROWS)._replace(
        temperature=jnp.asarray(np.broadcast_to(np.float32(temperature), ROWS)),
        seed=jnp.arange(ROWS, dtype=jnp.uint32),
    )
    logits = np.broadcast_to(np.log(P, where=P > 0, out=np.full_like(P, -np.inf)), (ROWS, 3, 5))
    got = verify_by_a_rule(
        jnp.asarray(logits, jnp.float32),
        Drafts(jnp.asarray(drafts), jnp.full(ROWS, 2, jnp.int32), q),
        sampling,
        jnp.zeros(ROWS, jnp.int32),
        broken,
    )
    return np.asarray(got.token_ids), np.asarray(got.num_tokens)


def p_value(ids, probs):
    kept = np.asarray(probs) > 0
    observed = np.bincount(ids, minlength=5)
    if observed[~kept].any():
        return 0.0
    return stats.chisquare(observed[kept], len(ids) * np.asarray(probs)[kept]).pvalue


def sampled_drafts():
    random = np.random.default_rng(0)
    drafts = np.stack([random.choice(5, ROWS, p=q) for q in Q], axis=1).astype(np.int32)
    ids = jnp.broadcast_to(jnp.arange(5, dtype=jnp.int32), (ROWS, 2, 5))
    q = CompactQ(ids, jnp.asarray(np.broadcast_to(np.log(Q), (ROWS, 2, 5)), jnp.float32))
    return drafts, q


def test_emitted_tokens_follow_the_target_whatever_was_drafted():
    certain = np.tile([2, 1], (ROWS, 1)).astype(np.int32), None
    for drafts, q in (sampled_drafts(), certain):
        ids, num = emitted(drafts, q)
        for j in range(3):
            assert p_value(ids[num > j, j], P[j]) > 1e-3
        assert {1, 2, 3} == set(num.tolist())


@pytest.mark.fast
@pytest.mark.parametrize("no_token", [-1, 5, 99])
@pytest.mark.parametrize("certain", [True, False])
def test_a_draft_that_is_no_token_is_never_emitted(no_token, certain):
    drafts, q = sampled_drafts()
    drafts[:, 1] = no_token
    ids, num = emitted(drafts, None if certain else q)
    if certain:  # nothing was drawn: the first tokens have their distribution
        assert p_value(ids[:, 0], P[0]) > 1e-3
    assert set(num.tolist()) == {1, 2}
    assert p_value(ids[num > 1, 1], P[1]) > 1e-3


WIDE, POSITIONS = 700, 4  # three groups of tokens, the last one short


@functools.cache
def plainly():
    """Rows [6, 4, V] of six ways to sample, their changes, and the tokens drawn one by one."""
    rng = np.random.default_rng(4)
    logits = rng.normal(0, 2, (6, POSITIONS, WIDE)).astype(np.float32)
    sampling = Sampling(
        temperature=np.array([1, 0.7, 1.3, 1, 0, 1], np.float32),
        top_k=np.array([0, 300, 0, 20, 5, 0], np.int32),
        top_p=np.array([1, 1, 0.9, 0.8, 1, 1], np.float32),
        min_p=np.array([0, 0, 0, 0, 0, 0.02], np.float32),
        seed=np.arange(6, dtype=np.uint32),
    )
    positions = np.arange(6, dtype=np.int32) * 10
    masks = rng.integers(0, 2**32, (6, POSITIONS, -(-WIDE // 32)), dtype=np.uint32)
    changes = {
        "allowed": masks | np.uint32(1),
        "bias_token_ids": rng.integers(0, WIDE, (6, POSITIONS, 2)).astype(np.int32),
        "bias": np.full((6, POSITIONS, 2), 3, np.float32),
    }
    nothing = Drafts(np.zeros((6, 0), np.int32), np.zeros(6, np.int32))
    columns = []
    for j in range(POSITIONS):
        own = {name: x[:, j : j + 1] for name, x in changes.items()}
        found = VERIFY(logits[:, j : j + 1], nothing, sampling, positions + j, **own)
        columns.append(np.asarray(found.token_ids))
    return logits, sampling, positions, changes, np.concatenate(columns, axis=1)


@settings(max_examples=25, deadline=None)
@given(
    right=hnp.arrays(np.bool_, (6, POSITIONS - 1)),
    num=hnp.arrays(np.int32, 6, elements=st.integers(0, POSITIONS - 1)),
    seed=st.integers(0, 99),
)
def test_certain_drafts_change_no_token(right, num, seed):
    """On equal logits the tokens are plain decoding's, and a draft is accepted where it is one."""
    logits, sampling, positions, changes, tokens = plainly()
    others = np.random.default_rng(seed).integers(0, WIDE, right.shape)
    ids = np.where(right, tokens[:, :-1], others).astype(np.int32)
    found = VERIFY(logits, Drafts(ids, num), sampling, positions, **changes)
    agrees = (ids == tokens[:, :-1]) & (np.arange(POSITIONS - 1) < num[:, None])
    accepted = np.cumprod(agrees, axis=1).sum(axis=1)
    np.testing.assert_array_equal(found.num_tokens, accepted + 1)
    emitted = np.arange(POSITIONS) <= accepted[:, None]
    np.testing.assert_array_equal(found.token_ids, np.where(emitted, tokens, -1))


@pytest.mark.fast
def test_a_broken_acceptance_rule_is_noticed():
    ids, _ = emitted(*sampled_drafts(), broken=True)
    assert p_value(ids[:, 0], P[0]) < 1e-9


MANY = 200_000


@functools.cache
def first_tokens():
    """A program: the first tokens of many slots whose drafts are drawn with keys of a purpose."""

    def call(purpose):
        seeds, position = jnp.arange(MANY, dtype=jnp.uint32), jnp.full(MANY, 7, jnp.int32)
        sampling = Sampling.greedy(MANY)._replace(temperature=jnp.ones(MANY), seed=seeds)
        target, draft = (
            quick_compile.unknown(
                jnp.broadcast_to(jnp.log(jnp.asarray(rows, jnp.float32)), (MANY, *rows.shape))
            )
            for rows in (P[:2], Q[:1])
        )
        with mock.patch.object(drawing, "DRAFT", purpose):
            # Else the drafts' program could not close over a traced purpose.
            drafts = drawing.draw(draft, sampling, position, axis_name=())
        return verify(target, drafts, sampling, position).token_ids[:, 0]

    return quick_compile.jit(call)


@pytest.mark.slow
def test_drafting_accepting_and_recovering_draw_independently():
    assert p_value(np.asarray(first_tokens()(drawing.DRAFT)), P[0]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("purpose", [ACCEPT, RECOVER])
def test_drafts_drawn_with_the_keys_of_verification_are_noticed(purpose):
    assert p_value(np.asarray(first_tokens()(purpose)), P[0]) < 1e-9


@pytest.mark.fast
def test_greedy_and_sampled_requests_share_a_batch():
    drafts, q = sampled_drafts()
    ids, num = emitted(drafts, q, temperature=np.arange(ROWS) % 2)
    assert (ids[::2, 0] == 0).all()  # greedy slots
    np.testing.assert_array_equal(
        num[::2], 1 + (drafts[::2, 0] == 0) + ((drafts[::2] == [0, 2]).all(1))
    )
    assert p_value(ids[1::2, 0], P[0]) > 1e-3


@pytest.mark.parametrize("bad", ["nan", "inf", "nothing"])
def test_a_sampled_slot_stops_at_an_invalid_row_with_its_greedy_token(bad):
    """An invalid row has no distribution to draw from, whatever the seed."""
    count, vocab = 64, 5
    logits = np.full((count, 3, vocab), -np.inf, np.float32)
    logits[:, 0, 4] = logits[:, 2, 4] = 0  # only token 4 is possible
    logits[:, 1] = [-1, 2, 0, 2, 1]
    logits[:, 1] = {"nan": np.where(np.arange(vocab) == 4, np.nan, logits[:, 1]),
                    "inf": np.where(np.arange(vocab) == 1, np.inf, logits[:, 1]),
                    "nothing": -np.inf}[bad]  # fmt: skip
    greedy_id = 0 if bad == "nothing" else 1
    # Half of the drafts at the invalid row are its greedy id: they are not accepted either.
    drafts = np.full((count, 2), 4, np.int32)
    drafts[::2, 1] = greedy_id
    greedy_sampling = Sampling.greedy(count)
    got = VERIFY(
        jnp.asarray(logits),
        Drafts(jnp.asarray(drafts), jnp.full(count, 2, jnp.int32), None),
        greedy_sampling._replace(
            temperature=jnp.ones(count), seed=jnp.arange(count, dtype=jnp.uint32)
        ),
        jnp.zeros(count, jnp.int32),
    )
    assert (np.asarray(got.num_tokens) == 2).all()
    np.testing.assert_array_equal(got.token_ids, np.tile([4, greedy_id, -1], (count, 1)))
