"""Verification: cases by hand, the emitted distribution, transformations."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax import export

from pallas_kernels.sampling import CompactQ, Drafts, Sampling, logprobs_of_read, verify
from pallas_kernels.sampling.verification import accepted_by_ratio
from pallas_kernels.testing import checks
from pallas_kernels.testing.shapes import Shape
from tests.support import quick_compile


def rows_choosing(ids, vocab=5):
    """Logits [B, S, V] whose largest are `ids` [B, S]."""
    return jax.nn.one_hot(jnp.asarray(ids), vocab) * 3.0


VERIFY = quick_compile.jit(verify)

# Target ids, drafts, how many of them are proposed, what is emitted: all drafts and the bonus
# token; one and the recovered token; none and that; one of one and the bonus; the bonus alone. Then
# slots whose first or second row is invalid.
RAGGED = [
    ([1, 2, 3], [1, 2], 2, [1, 2, 3]),
    ([1, 2, 3], [1, 4], 2, [1, 2]),
    ([1, 2, 3], [4, 2], 2, [1]),
    ([1, 2, 3], [1, 2], 1, [1, 2]),
    ([1, 2, 3], [1, 2], 0, [1]),
    *(([1, 2, 3], [1, 2], 2, ids) for ids in ([1, 2], [4], [1, 0], [1, 0])),
]


@functools.cache
def greedily(**known):
    """Ids and counts of the ragged slots, in one batch."""
    target, drafts, proposed = (np.array([one[i] for one in RAGGED]) for i in range(3))
    logits = np.array(rows_choosing(target))
    invalid = logits[-4:]
    invalid[0, 1] = [np.nan, -1, 2, 2, 0]  # lowest id among the largest that are not NaN
    invalid[1, 0, 4] = np.inf
    invalid[2, 1] = -np.inf
    invalid[3, 1] = np.nan
    batch = len(logits)
    given = logits, Drafts(np.int32(drafts), np.int32(proposed)), Sampling.greedy(batch)
    got = quick_compile.jit(functools.partial(verify, **known))(*given, np.zeros(batch, np.int32))
    return np.asarray(got.token_ids), np.asarray(got.num_tokens)


@pytest.mark.fast
def test_ragged_acceptance():
    expected = [one[3] for one in RAGGED]
    ids, num = greedily()
    assert num.tolist() == [*map(len, expected)]
    assert ids.tolist() == [row + [-1] * (3 - len(row)) for row in expected]


@pytest.mark.fast
def test_what_is_known_to_be_greedy_needs_nothing_of_sampling():
    for found, expected in zip(greedily(all_greedy=True), greedily(), strict=True):
        np.testing.assert_array_equal(found, expected)
    given = rows_choosing([[1, 2]]), Drafts(jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32))
    more = Sampling.of(1, temperature=1.0), jnp.zeros(1, jnp.int32)
    for k, known in ((2, False), (2, True), (None, True)):
        program = quick_compile.jit(functools.partial(verify, all_greedy=known, k=k))
        assert ("466688986" in program.lower(*given, *more).as_text()) != known  # of Threefry
    found = program(*given, *more)
    np.testing.assert_array_equal(found.token_ids, [[1, -1]])


@pytest.mark.fast
def test_a_token_of_probability_zero_is_never_accepted():
    u = jnp.array([0.0, 0.0, 0.999, 0.5, 0.5])
    p = jnp.array([0.0, 0.2, 0.2, 0.2, 0.0])
    q = jnp.array([0.3, 0.3, 0.2, 0.5, 0.0])
    np.testing.assert_array_equal(accepted_by_ratio(u, p, q), [False, True, True, False, False])


P = np.array([[0.45, 0.25, 0.2, 0.1, 0.0], [0.1, 0.1, 0.6, 0.1, 0.1], [0.2] * 5])
Q = np.array([[0.1, 0.2, 0.3, 0.15, 0.25], [0.05, 0.6, 0.15, 0.1, 0.1]])
ROWS, MANY = 4000, 30_000


@quick_compile.jit
def verify_by_a_rule(logits, drafts, sampling, positions, broken):
    """Verify by the usual rule, or by a `broken` one in which q plays no part."""

    def accept(u, p, q):
        return jnp.where(broken, p > 0, u * q < p)

    return verify(logits, drafts, sampling, positions, accept=accept)


def emitted(drafts, q, broken=False):
    """Tokens [N, 3] and counts [N] of N independent slots with the same rows."""
    n, log_p = len(drafts), np.log(P, where=P > 0, out=np.full_like(P, -np.inf))
    logits = np.broadcast_to(np.float32(log_p), (n, 3, 5))
    given = Drafts(drafts, np.full(n, 2, np.int32), q), Sampling.of(n, seed=np.arange(n))
    got = verify_by_a_rule(logits, *given, np.zeros(n, np.int32), broken)
    return np.asarray(got.token_ids), np.asarray(got.num_tokens)


def p_value(ids, probs):
    kept = np.asarray(probs) > 0
    observed = np.bincount(ids, minlength=5)
    if observed[~kept].any():
        return 0.0
    return scipy.stats.chisquare(observed[kept], len(ids) * np.asarray(probs)[kept]).pvalue


def sampled_drafts(count=ROWS):
    random = np.random.default_rng(0)
    drafts = np.stack([random.choice(5, count, p=q) for q in Q], axis=1).astype(np.int32)
    ids = np.broadcast_to(np.arange(5, dtype=np.int32), (count, 2, 5))
    return drafts, CompactQ(ids, np.broadcast_to(np.float32(np.log(Q)), (count, 2, 5)))


@pytest.mark.parametrize("count", [ROWS, pytest.param(MANY, marks=pytest.mark.slow)])
def test_emitted_tokens_follow_the_target_whatever_was_drafted(count):
    certain = np.tile([2, 1], (count, 1)).astype(np.int32), None
    for drafts, q in (sampled_drafts(count), certain):
        ids, num = emitted(drafts, q)
        for j in range(3):
            assert p_value(ids[num > j, j], P[j]) > 1e-3
        assert {1, 2, 3} == set(num.tolist())
    ids, _ = emitted(*sampled_drafts(count), broken=True)  # the control
    assert p_value(ids[:, 0], P[0]) < 1e-9


@pytest.mark.parametrize("certain", [True, False])
def test_each_position_has_noise_of_its_own(certain):
    """What comes behind accepted drafts is what a call that begins there draws: to the token.

    The chance to accept, a recovered token and the one behind all drafts; of few kept and of all.
    """
    drafts, q = sampled_drafts()
    drafts, q = (np.full_like(drafts, 2), None) if certain else (drafts, q)
    sampling = Sampling.of(ROWS, top_k=np.where(np.arange(ROWS) % 2, 3, 0), seed=np.arange(ROWS))
    logits = np.broadcast_to(np.log(np.maximum(P, 1e-9)).astype(np.float32), (ROWS, 3, 5))

    def behind(count, position):
        """Ids and counts where the first rows are left out; the last ones have no meaning."""
        rows, ids, compact = jax.tree.map(
            functools.partial(np.roll, shift=-count, axis=1), (logits, drafts, q)
        )
        given = rows, Drafts(ids, np.full(ROWS, 2 - count, np.int32), compact), sampling
        got = verify_by_a_rule(*given, np.full(ROWS, position, np.int32), False)
        return np.asarray(got.token_ids), np.asarray(got.num_tokens)

    ids, num = behind(0, 7)
    outcomes = set()
    for count in (1, 2):
        later, later_num = behind(count, 7 + count)
        reached = num > count
        np.testing.assert_array_equal(later_num[reached], num[reached] - count)
        np.testing.assert_array_equal(later[reached, : 3 - count], ids[reached, count:])
        outcomes |= set(num[reached].tolist())
    assert outcomes == {2, 3}
    elsewhere, _ = behind(1, 7)  # the control
    assert (elsewhere[num > 1, 0] != ids[num > 1, 1]).mean() > 0.1


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
    sampling = Sampling.of(
        6, temperature=[1, 0.7, 1.3, 1, 0, 1], top_k=[0, 300, 0, 20, 5, 0],
        top_p=[1, 1, 0.9, 0.8, 1, 1], min_p=[0, 0, 0, 0, 0, 0.02], seed=np.arange(6),
    )  # fmt: skip
    positions = np.arange(6, dtype=np.int32) * 10
    masks = rng.integers(0, 2**32, (6, POSITIONS, -(-WIDE // 32)), dtype=np.uint32)
    changes = {
        "allowed": masks | np.uint32(1),
        "bias_token_ids": rng.integers(0, WIDE, (6, POSITIONS, 2)).astype(np.int32),
        "bias": np.full((6, POSITIONS, 2), 3, np.float32),
    }
    nothing = Drafts(np.zeros((6, POSITIONS - 1), np.int32), np.zeros(6, np.int32))
    columns = []
    for j in range(POSITIONS):  # in the program that verifies, each column as the first
        x, own = jax.tree.map(functools.partial(np.roll, shift=-j, axis=1), (logits, changes))
        found = VERIFY(x, nothing, sampling, positions + j, **own)
        columns.append(np.asarray(found.token_ids)[:, 0])
    return logits, sampling, positions, changes, np.stack(columns, axis=1)


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


@pytest.mark.parametrize("bad", ["nan", "inf", "nothing"])
def test_a_sampled_slot_ends_greedily_at_an_invalid_row(bad):
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
    given = logits, Drafts(drafts, np.full(count, 2, np.int32))
    got = VERIFY(*given, Sampling.of(count, seed=np.arange(count)), np.zeros(count, np.int32))
    assert (np.asarray(got.num_tokens) == 2).all()
    np.testing.assert_array_equal(got.token_ids, np.tile([4, greedy_id, -1], (count, 1)))


def with_logprobs(logits, *given):
    found = verify(logits, *given, k=3)
    return found[:3], logprobs_of_read(logits, found.token_ids, found.read)[:4]


WITH_LOGPROBS = quick_compile.jit(with_logprobs)


def several():
    return checks.verification(Shape(8, 1300, 3, "float32"))


@pytest.mark.slow
def test_of_a_symbolic_number_of_slots():
    (slots,) = export.symbolic_shape("B")
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct((slots, *x.shape[1:]), x.dtype), several())
    exported = export.export(jax.jit(with_logprobs))(*types)
    chex.assert_trees_all_equal(exported.call(*several()), WITH_LOGPROBS(*several()))


@pytest.mark.slow
def test_of_several_batches():
    other = jax.tree.map(lambda x: x[::-1], several())
    two = jax.tree.map(lambda *x: jnp.stack(x), several(), other)
    found = quick_compile.jit(jax.vmap(with_logprobs))(*two)
    expected = [WITH_LOGPROBS(*one) for one in (several(), other)]
    chex.assert_trees_all_equal(found, jax.tree.map(lambda *x: jnp.stack(x), *expected))
