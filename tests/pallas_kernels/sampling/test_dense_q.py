"""Drafts with a whole distribution: acceptance by its entry, then a draw from max(p - q, 0)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels.numbers.random_draws import RECOVER, Source, gumbel
from pallas_kernels.sampling import CompactQ, DenseQ, Drafts, Sampling, verify
from tests.support import quick_compile, shape_checks
from tests.support.expected_probs import expected_probs

B, S, V = 64, 3, 300


@functools.cache
def batch():
    """Slots of which about half refuse a draft, in either place; one is greedy, one q has NaN."""
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 2, (B, S, V)).astype(np.float32)
    probs = rng.dirichlet(np.full(V, 0.3), (B, S - 1)).astype(np.float32)
    probs[1, 0, 5], probs[1, 0, 6] = np.nan, -1
    ids = np.array([[rng.choice(V, p=np.nan_to_num(np.abs(q)) / np.nan_to_num(np.abs(q)).sum())
                     for q in slot] for slot in probs], np.int32)  # fmt: skip
    easy = rng.random((B, S - 1)) < 0.7  # drafts that the target likes
    ids = np.where(easy, logits[:, :-1].argmax(-1), ids).astype(np.int32)
    ids[2, 0] = V  # no token
    num = np.full(B, S - 1, np.int32)
    num[3] = 1
    kind = np.arange(B) % 3
    sampling = Sampling.of(
        B, temperature=np.r_[0, np.full(B - 1, 0.9)], top_k=np.where(kind == 1, 40, 0),
        top_p=np.where(kind == 2, 0.8, 1), seed=np.arange(B),
    )  # fmt: skip
    return logits, probs, ids, num, sampling


@quick_compile.jit
def verified(logits, probs, ids, num, sampling, rows=None, rows_of_q=None):
    q = DenseQ(probs, rows_of_q)
    return verify(logits, Drafts(ids, num, q), sampling, jnp.arange(B), row_ids=rows)[:2]


def expected_token(logits, probs, sampling, slot, place):
    """The best token of max(p - q, 0), with the noise of its position; p and q in float64."""
    options = (np.asarray(x)[slot] for x in sampling[:4])
    p = expected_probs(logits[slot, place], *options)
    q = np.where(probs[slot, place] > 0, probs[slot, place], 0)
    source = Source(sampling.seed[slot : slot + 1], jnp.int32([slot + place]))
    noise = np.asarray(gumbel(source, RECOVER, jnp.arange(V, dtype=jnp.int32)[None]))[0]
    with np.errstate(divide="ignore"):
        return int(np.argmax(np.log(np.maximum(p - q, 0)) + noise))


def test_it_accepts_as_a_compact_q_does_and_draws_from_what_is_left():
    logits, probs, ids, num, sampling = batch()
    token_ids, num_tokens = jax.device_get(verified(logits, probs, ids, num, sampling))
    own = np.take_along_axis(probs, np.minimum(ids, V - 1)[..., None], 2)
    with np.errstate(divide="ignore"):
        q = CompactQ(jnp.asarray(ids[..., None]), jnp.log(jnp.maximum(own, 0)))
    compact = quick_compile.jit(verify)(
        logits, Drafts(jnp.asarray(ids), jnp.asarray(num), q), sampling, jnp.arange(B)
    )
    np.testing.assert_array_equal(num_tokens, compact.num_tokens)
    a = num_tokens - 1
    refused = (a < num) & (np.arange(B) != 2)  # slot 2 proposed no token: nothing is refused
    refused[0] = False  # greedy
    assert 15 < refused.sum() < 50
    assert {0, 1} <= set(a[refused])
    for slot in range(B):
        got = token_ids[slot, a[slot]]
        if refused[slot]:
            assert got == expected_token(logits, probs, sampling, slot, a[slot]), slot
        else:
            assert got == compact.token_ids[slot, a[slot]], slot


def test_flat_probabilities_and_rows():
    logits, probs, ids, num, sampling = batch()
    want = verified(logits, probs, ids, num, sampling)
    rng = np.random.default_rng(1)
    place, of_q = rng.permutation(B * S + 9)[: B * S], rng.permutation(B * (S - 1) + 5)
    flat = np.full((B * S + 9, V), np.nan, np.float32)
    flat[place] = logits.reshape(-1, V)
    q = np.full((len(of_q), V), np.nan, np.float32)
    of_q = of_q[: B * (S - 1)]
    q[of_q] = probs.reshape(-1, V)
    rows, rows_of_q = (x.astype(np.int32).reshape(B, -1) for x in (place, of_q))
    got = verified(jnp.asarray(flat), jnp.asarray(q), ids, num, sampling, rows, rows_of_q)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("copies", [1, 2])
def test_on_shards_of_the_vocabulary_it_draws_the_same(copies):
    """Also where a shard is narrower than a group of 256."""
    logits, probs, ids, num, sampling = batch()
    logits = np.concatenate([logits] + [logits - 30] * (copies - 1), axis=-1)
    probs = np.concatenate([probs] + [probs * 0] * (copies - 1), axis=-1)
    mesh = jax.make_mesh((2,), ("v",), devices=jax.devices()[:2])

    def own(logits, probs):
        drafts = Drafts(jnp.asarray(ids), jnp.asarray(num), DenseQ(probs))
        return verify(logits, drafts, sampling, jnp.arange(B), axis_name="v")[:2]

    split = P(None, None, "v")
    call = jax.shard_map(own, mesh=mesh, in_specs=(split, split), out_specs=P())
    given = jax.device_put((logits, probs), jax.NamedSharding(mesh, split))
    got = quick_compile.jit(call)(*given)
    for x, y in zip(got, verified(logits, probs, ids, num, sampling), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(("probs", "rows", "complaint"), [
    (np.zeros((B, S - 1, V + 1), np.float32), None, r"\(64, 2, 301\) do not go with logits"),
    (np.zeros((B, S, V), np.float32), None, "or flat rows with row_ids"),
    (np.zeros((9, V), np.float32), np.zeros((B, S - 1), np.int32), "rows of V with flat logits"),
    (np.zeros((B, S - 1, V), np.float32), np.zeros((B, 1), np.int32), "the row of each draft"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused(probs, rows, complaint):
    logits, _, ids, num, sampling = batch()
    drafts = Drafts(jnp.asarray(ids), jnp.asarray(num), DenseQ(probs, rows))
    with pytest.raises(ValueError, match=complaint):
        shape_checks.as_users_run(verify)(logits, drafts, sampling, jnp.arange(B))
