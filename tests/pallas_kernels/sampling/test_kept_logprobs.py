"""The learner's logprobs over kept sets, their gradients and their memory, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from ipc.wire import KEPT_ALL, KEPT_MANY
from jax_specdec.device import kept_logprobs, learner_logprobs
from jax_specdec.kept_sets import KeptSets, PaddedKept
from pallas_kernels import topk_logprobs
from pallas_kernels.sampling import rollout_logprobs
from tests.support import quick_compile
from tests.support.collectives import collectives
from tests.support.lowered import array, temporaries
from tests.support.shards import P, mesh_of

pytestmark = pytest.mark.fast

V = 50
logprobs = quick_compile.jit(kept_logprobs)


def gradients_of(function):
    def gradients(logits, token_ids, kept, temperatures, weights):
        def total(logits, temperatures):
            found = function(logits, token_ids, kept, temperatures)
            # A row without a slope may be -inf.
            return jnp.where(jnp.isfinite(found), found * weights, 0.0).sum()

        return jax.grad(total, argnums=(0, 1))(logits, temperatures)

    return quick_compile.jit(gradients)


gradients = gradients_of(kept_logprobs)


def of_states(logits, *rest):
    """`learner_logprobs` of states and a head whose product is exactly these logits."""
    rows = logits.shape[:-1]
    states = jnp.eye(np.prod(rows), dtype=logits.dtype)
    head = logits.reshape(-1, logits.shape[-1]).T
    return learner_logprobs(states.reshape(*rows, -1), head, *rest)


# By logits, and by hidden states: each row's part of the head is its logits.
WAYS = {
    "logits": (logprobs, gradients),
    "states": (quick_compile.jit(of_states), gradients_of(of_states)),
}


def a_batch(dtype="float32", seed=0):
    """Rows [3, 4]: sets of every size and mark, one row with no token, one with a foreign token."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.normal(0, 3, (3, 4, V)), dtype)
    counts = [5, 1, KEPT_ALL, KEPT_MANY, 0, V, 12, 12, 3, KEPT_ALL, 2, 7]
    ids = [sorted(rng.choice(V, max(count, 0), replace=False).tolist()) for count in counts]
    token_ids = np.array([rng.choice(row) if row else rng.integers(V) for row in ids], np.int32)
    token_ids[7] = next(t for t in range(V) if t not in ids[7])
    masses = [-0.3 if count == KEPT_MANY else -0.1 * (count > 0) for count in counts]
    sets = KeptSets.of(np.int32(counts), np.float32(masses), np.int32(np.concatenate(ids)))
    temperatures = rng.uniform(0.5, 2, (3, 4)).astype(np.float32)
    temperatures[0, 1] = 0  # greedy: one token is kept
    return x, token_ids.reshape(3, 4), sets.padded(np.arange(12).reshape(3, 4)), temperatures


def by_hand(row, token, ids, count, log_kept, temperature):
    """The logprob in float64, its gradient by the logits [V] and by the temperature."""
    t = float(temperature) or 1.0
    if count == 0:
        return 0.0, np.zeros(len(row)), 0.0
    among = np.arange(len(row)) if count < 0 else np.array(ids[:count])
    if token not in among:
        return -np.inf, np.zeros(len(row)), 0.0
    row = row.astype(np.float64)
    z = (row - row[among].max()) / t
    total = np.log(np.exp(z[among]).sum())
    shares = np.zeros(len(row))
    shares[among] = np.exp(z[among] - total)
    slope = -shares / t
    slope[token] += 1 / t
    by_temperature = (shares[among] @ z[among] - z[token]) / t if temperature else 0.0
    return z[token] - total - (log_kept if count < 0 else 0), slope, by_temperature


def expected(x, token_ids, kept, temperatures):
    x = np.asarray(x.astype(jnp.float32))
    rows = [
        by_hand(x[at], token_ids[at], kept.token_ids[at], kept.counts[at], kept.log_kept[at],
                temperatures[at])
        for at in np.ndindex(token_ids.shape)
    ]  # fmt: skip
    return tuple(np.array(part).reshape(*token_ids.shape, -1) for part in zip(*rows, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_values_and_gradients_are_those_of_float64(dtype):
    x, token_ids, kept, temperatures = a_batch(dtype)
    values, slopes, by_temperature = expected(x, token_ids, kept, temperatures)
    found = logprobs(x, token_ids, kept, temperatures)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, values[..., 0], atol=1e-5)
    assert found[0, 1] == 0  # greedy, exactly
    assert np.isneginf(found[1, 3])
    assert found[1, 0] == 0
    weights = np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32)
    by_logits, by_t = gradients(x, token_ids, kept, temperatures, weights)
    assert by_logits.dtype == x.dtype
    slopes, tolerance = slopes * weights[..., None], 1e-5 if dtype == "float32" else 1e-2
    np.testing.assert_allclose(by_logits.astype(jnp.float32), slopes, atol=tolerance)
    np.testing.assert_allclose(by_t, by_temperature[..., 0] * weights, atol=1e-4)


def flat_batch():
    """Rows [12] of `a_batch`, without the one whose set the token is not in."""
    x, token_ids, kept, temperatures = a_batch()
    which = np.array([0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11])
    rows = jax.tree.map(lambda y: y.reshape(12, *y.shape[2:])[which], (token_ids, kept))
    return x.reshape(12, V)[which], *rows, temperatures.reshape(12)[which]


@pytest.mark.long
def test_a_rollouts_logprobs_have_the_gradient_of_kept_ones():
    batch, weights = flat_batch(), np.arange(11, dtype=np.float32)
    of_rollout = gradients_of(rollout_logprobs)(*batch, weights)
    of_kept = gradients(*batch, weights)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5), of_rollout, of_kept)
    assert np.abs(of_rollout[0]).max() > 1
    eager = jax.grad(lambda x: rollout_logprobs(x, *batch[1:]).sum())(batch[0])
    assert np.isfinite(eager).all()


def test_a_rollout_without_temperatures_is_one_at_1():
    x, token_ids, kept, _ = flat_batch()
    scored = quick_compile.jit(rollout_logprobs)(x, token_ids, kept)
    np.testing.assert_allclose(scored, logprobs(x, token_ids, kept, 1.0), atol=1e-5)
    assert (scored[np.array([0, 5, 6])] < -0.01).all()  # no greedy rows


def far_from_zero(offset, seed=0):
    """Rows [4, 5], of each temperature: likely tokens and any, of sets and of marks."""
    rng = np.random.default_rng(seed)
    temperatures = np.tile(np.float32([1e-4, 1e-3, 0.1, 1.0, 100.0]), (4, 1))
    spread = np.minimum(5, 5 * temperatures)[..., None]
    spread[1] = 5
    x = (offset + rng.normal(size=(4, 5, V)) * spread).astype(np.float32)
    ids = np.sort(rng.permuted(np.tile(np.arange(V, dtype=np.int32), (20, 1)), axis=1)[:, :12])
    counts = np.repeat(np.int32([12, 12, KEPT_ALL, KEPT_MANY]), 5)
    log_kept = np.where(counts == KEPT_MANY, np.float32(-0.2), np.float32(0))
    kept = PaddedKept(*(y.reshape(4, 5, *y.shape[1:]) for y in (ids, counts, log_kept)))
    return x, np.ascontiguousarray(kept.token_ids[..., 3]), kept, temperatures


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("offset", [-300.0, 0.0, 20.0, 300.0])
def test_digits_are_kept_far_from_zero(offset, way):
    """Errors and ratios to float64, and gradients by what a temperature makes of them."""
    logprobs, gradients = WAYS[way]
    arrays = far_from_zero(offset)
    x, _, _, temperatures = arrays
    values, slopes, by_temperature = (y.squeeze() for y in expected(jnp.asarray(x), *arrays[1:]))
    found = np.asarray(logprobs(*arrays), np.float64)
    assert (np.abs(found - values) <= 1e-5 + 2e-7 * np.abs(values)).all()
    likely = values > -20
    assert likely.sum() >= 15
    np.testing.assert_allclose(np.exp((found - values)[likely]), 1, atol=1e-5)
    by_logits, by_t = gradients(*arrays, np.ones((4, 5), np.float32))
    t = temperatures[..., None]
    np.testing.assert_allclose(by_logits * t, slopes * t, atol=1e-5)
    np.testing.assert_allclose(by_t * t[..., 0], by_temperature * t[..., 0], 1e-5, 1e-5)


def test_learner_logprobs_are_those_of_the_products_logits():
    """In values and in gradients, by states, head and temperatures, with a soft cap."""
    _, *rest, temperatures = a_batch()
    rng = np.random.default_rng(1)
    given = rng.normal(size=(3, 4, 8)), rng.normal(size=(V, 8)), temperatures
    given = [np.float32(x) for x in given]
    weights = np.arange(12, dtype=np.float32).reshape(3, 4)

    def by_logits(hidden, head, *rest):
        return kept_logprobs(3 * jnp.tanh(hidden @ head.T / 3), *rest)

    def with_gradients(function):
        def total(hidden, head, temperatures):
            found = function(hidden, head, *rest, temperatures)
            return jnp.where(jnp.isfinite(found), found * weights, 0.0).sum(), found

        return quick_compile.jit(jax.grad(total, (0, 1, 2), has_aux=True))(*given)

    found = with_gradients(functools.partial(learner_logprobs, soft_cap=3.0))
    expected = with_gradients(by_logits)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-4), found, expected)
    assert all(np.isfinite(slope).all() for slope in found[0])
    assert (found[1][1, 0], found[1][1, 3]) == (0, -np.inf)


def test_masked_and_invalid_logits():
    """-inf inside a set weighs nothing; a row with a NaN in its set is NaN, its neighbors not."""
    x = jnp.array([[0.0, -jnp.inf, 1.0, 2.0]] * 7)
    x = x.at[4:, 3].set(jnp.nan)
    ids = [[0, 1, 2], [0, 1, 2], [1, -1, -1], [-1, -1, -1], [0, 2, 3], [1, 2, 3], [-1, -1, -1]]
    counts = np.int32([3, 3, 1, KEPT_ALL, 3, 3, KEPT_ALL])
    kept = PaddedKept(np.int32(ids), counts, np.zeros(7, np.float32))
    token_ids = np.int32([2, 1, 1, 1, 0, 1, 1])
    found = logprobs(x, token_ids, kept, 1.0)
    np.testing.assert_allclose(found[0], 1 - np.log(1 + np.e), atol=1e-6)
    assert np.isneginf(found[1:4]).all()
    assert np.isnan(found[4:]).all()
    by_logits, by_t = gradients(x, token_ids, kept, np.ones(7, np.float32), np.ones(7, np.float32))
    assert np.isfinite(by_logits[0]).all()
    assert not np.concatenate([by_logits[1:4], by_t[1:4, None]], axis=1).any()


def test_an_unknown_token_is_nan_and_a_missing_one_is_not():
    x = jnp.zeros((3, V))
    nothing, counts = np.full((3, 1), -1, np.int32), np.int32([KEPT_ALL, KEPT_ALL, 0])
    kept = PaddedKept(nothing, counts, np.zeros(3, np.float32))
    found = logprobs(x, np.int32([V, -1, -1]), kept, 1.0)
    np.testing.assert_array_equal(found, [np.nan, np.nan, 0])


def test_kept_sets_of_other_rows_are_refused():
    x, token_ids, kept, _ = a_batch()
    wrong = kept._replace(counts=kept.counts[1:])
    states = np.zeros((3, 4, 8), np.float32), np.zeros((V, 8), np.float32)
    for call, given in ((kept_logprobs, (x,)), (learner_logprobs, states)):
        with pytest.raises(ValueError, match=r"do not go with token_ids"):
            call(*given, token_ids, wrong)


def test_no_temporary_has_the_vocabularys_size():
    """In float32 neither direction makes one; in bfloat16 the gradient may exist twice.

    Rows with a mark are read as `topk_logprobs` does, a block at a time.
    """
    rows, vocab, width = 32, 40_000, 16

    def needed(function, dtype):
        kept = PaddedKept(array((rows, width)), array((rows,)), array((rows,), "float32"))
        given = array((rows,)), kept, array((rows,), "float32")
        return temporaries(function, array((rows, vocab), dtype), *given)

    def total(*arguments):
        return kept_logprobs(*arguments).sum()

    def over_everything(x, token_ids, kept, t):
        """The plain way: a negative control."""
        scaled = jax.nn.log_softmax(x.astype(jnp.float32) / t[:, None])
        return jnp.take_along_axis(scaled, token_ids[:, None], axis=1).sum()

    def read(x, token_ids, kept, t):
        return topk_logprobs(x, token_ids, 1, temperatures=t)

    for dtype, itemsize in (("float32", 4), ("bfloat16", 2)):
        whole = rows * vocab * itemsize
        small = needed(read, dtype) + 64 * rows * width * 4
        assert needed(kept_logprobs, dtype) < small < whole / 2
        most = small if dtype == "float32" else whole + small
        assert needed(jax.grad(total), dtype) < most
        assert needed(jax.grad(over_everything), dtype) >= whole


def test_no_row_of_sharded_logits_travels():
    """Neither forward nor back, with automatic axes: what travels has the size of the sets."""
    rows, vocab, width = 8, 20_000, 4
    mesh, rng = mesh_of(2), np.random.default_rng(0)
    x = rng.normal(size=(rows, vocab)).astype(np.float32)
    there = jax.device_put(x, NamedSharding(mesh, P(None, "model")))
    ids = np.sort(rng.integers(0, vocab, (rows, width)).astype(np.int32), axis=1)
    ones = np.ones(rows, np.float32)
    kept = PaddedKept(ids, np.resize(np.int32([KEPT_ALL, width]), rows), np.zeros_like(ones))
    rest = ids[:, 1], kept, ones, ones
    for function, given in ((logprobs, rest[:3]), (gradients, rest)):
        compiled = function.lower(there, *given).compile()
        assert 0 < max(c.num_bytes for c in collectives(compiled)) < 4 * vocab
        found, expected = compiled(there, *given), function(x, *given)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)
    gathered = quick_compile.jit(
        lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P())) + 1
    )
    wrong = collectives(gathered.lower(there).compile())
    assert max(c.num_bytes for c in wrong) >= 4 * vocab  # the control
