"""Drafts with a whole q: forms, dtypes, splits, edges; what it costs in memory."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from pallas_kernels.sampling import CompactQ, DenseQ, Drafts, Sampling, verify
from tests.support import quick_compile
from tests.support.lowered import array, temporaries

B, D, V = 24, 3, 700
RULES = ["token", "block"]


@functools.cache
def batch():
    """Slots of which many refuse a draft; slot 0 is greedy, slot 1 has fewer drafts."""
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 2, (B, D + 1, V)).astype(np.float32)
    draft_logits = logits[:, :-1] + rng.normal(0, 1, (B, D, V)).astype(np.float32)
    gumbels = rng.gumbel(size=draft_logits.shape)
    ids = (draft_logits + gumbels).argmax(-1).astype(np.int32)
    num = np.full(B, D, np.int32)
    num[1] = 1
    kind = np.arange(B) % 3
    sampling = Sampling.of(
        B, temperature=np.r_[0, np.full(B - 1, 0.9)], top_k=np.where(kind == 1, 40, 0),
        top_p=np.where(kind == 2, 0.8, 1), seed=np.arange(B),
    )  # fmt: skip
    log_q = np.asarray(jax.nn.log_softmax(draft_logits))
    return logits, draft_logits, log_q, ids, num, sampling


@functools.partial(quick_compile.jit, static_argnames="rule")
def verified(logits, q, ids, num, sampling, rule="token", row_ids=None, **changes):
    positions = jnp.arange(B, dtype=jnp.int32)
    drafts = Drafts(ids, num, q)
    return verify(logits, drafts, sampling, positions, row_ids=row_ids, rule=rule, **changes)[:2]


def assert_equal(found, expected):
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x, y)


def in_form(form):
    """The batch's q in another form; flat ones have rows that no draft names."""
    _, draft_logits, log_q, *_ = batch()
    rows = np.random.default_rng(1).permutation(B * D + 9)[: B * D].astype(np.int32)
    flat = np.full((B * D + 9, V), np.nan, np.float32)
    flat[rows] = log_q.reshape(-1, V)
    flat, named = jnp.asarray(flat), jnp.asarray(rows.reshape(B, D))
    if form == "logits":
        return DenseQ.of_logits(jnp.asarray(draft_logits * 0.5), jnp.full(B, 0.5))
    if form == "flat logprobs":
        return DenseQ(flat, named)
    if form == "flat probs":
        return DenseQ.of_probs(jnp.exp(flat), named)
    return DenseQ.of_probs(jnp.exp(jnp.asarray(log_q)))


@functools.cache
def with_logprobs(rule):
    logits, _, log_q, *others = batch()
    return jax.device_get(verified(logits, DenseQ(jnp.asarray(log_q)), *others, rule=rule))


@pytest.mark.long
@pytest.mark.parametrize(("rule", "form"), [
    ("token", "flat probs"), ("block", "logits"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("token", "logits"), ("token", "flat logprobs"), ("token", "probs"),
        ("block", "flat probs"),
    )),
])  # fmt: skip
def test_forms_of_one_q_emit_the_same(rule, form):
    """Up to roundings of q, which this batch does not meet."""
    logits, _, _, *others = batch()
    want = with_logprobs(rule)
    assert_equal(verified(logits, in_form(form), *others, rule=rule), want)
    assert 1 < want[1].mean() < D


@pytest.mark.long
def test_drafts_are_accepted_as_with_a_compact_q():
    """One that has the drafted tokens alone, with their own probabilities."""
    logits, _, log_q, ids, *others = batch()
    own = np.take_along_axis(log_q, ids[..., None], 2)
    compact = CompactQ(jnp.asarray(ids[..., None]), jnp.asarray(own))
    found = verified(logits, compact, ids, *others)
    np.testing.assert_array_equal(found[1], with_logprobs("token")[1])


@pytest.mark.long
@pytest.mark.parametrize("rule", ["token", pytest.param("block", marks=pytest.mark.slow)])
def test_flat_logits_and_drafts_of_lengths(rule):
    logits, _, log_q, ids, num, sampling = batch()
    want = with_logprobs(rule)
    there = np.arange(D)[None] < num[:, None]
    drafts = Drafts.of_flat(
        ids[there], num, D, DenseQ(jnp.asarray(np.r_[log_q[there], np.full((4, V), np.nan)]))
    )
    row_ids = np.arange(B * (D + 1), dtype=np.int32).reshape(B, D + 1)
    flat = jnp.asarray(logits.reshape(-1, V))
    found = verified(flat, drafts.q, drafts.token_ids, drafts.num, sampling, rule, row_ids)
    assert_equal(found, want)


@pytest.mark.parametrize(("dtype", "rule"), [
    ("bfloat16", "token"), pytest.param("float16", "token", marks=pytest.mark.slow),
    pytest.param("bfloat16", "block", marks=pytest.mark.slow),
])  # fmt: skip
def test_narrow_types_are_read_as_they_are(dtype, rule):
    logits, _, log_q, *others = batch()
    narrow = jnp.asarray(log_q, dtype)
    found = verified(logits, DenseQ(narrow), *others, rule=rule)
    assert_equal(found, verified(logits, DenseQ(narrow.astype(jnp.float32)), *others, rule=rule))


@pytest.mark.chips
@pytest.mark.parametrize(("rule", "form", "shards"), [
    ("token", "logprobs", 2), ("block", "logits", 4),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in itertools.product(RULES, ("logprobs", "logits"), (2, 4, 8))
        if case not in (("token", "logprobs", 2), ("block", "logits", 4))
    ),
])  # fmt: skip
def test_shards_of_the_vocabulary_emit_the_same(rule, form, shards):
    """Groups of 256 end inside of a shard's columns; over 8, shards are narrower than a group."""
    logits, draft_logits, log_q, *others = batch()
    values = jnp.asarray(log_q if form == "logprobs" else draft_logits)
    q = DenseQ(values) if form == "logprobs" else DenseQ.of_logits(values, jnp.ones(B))
    want = verified(logits, q, *others, rule=rule)
    padding = -V % (8 * shards)
    logits, values = (
        jnp.pad(x, ((0, 0), (0, 0), (0, padding)), constant_values=3) for x in (logits, values)
    )
    mesh = jax.make_mesh((shards,), ("v",), devices=jax.devices()[:shards])

    def own(logits, values):
        drafts = Drafts(*map(jnp.asarray, others[:2]), dataclasses.replace(q, values=values))
        positions = jnp.arange(B, dtype=jnp.int32)
        return verify(logits, drafts, others[2], positions, axis_name="v", vocab_size=V, rule=rule)[
            :2
        ]

    split = PartitionSpec(None, None, "v")
    call = jax.shard_map(own, mesh=mesh, in_specs=(split, split), out_specs=PartitionSpec())
    given = jax.device_put((logits, values), jax.NamedSharding(mesh, split))
    assert_equal(quick_compile.jit(call)(*given), want)


@pytest.mark.chips
@pytest.mark.parametrize(("axes", "is_flat"), [
    ("Auto", True), ("Explicit", False),
    pytest.param("Auto", False, marks=pytest.mark.slow),
    pytest.param("Explicit", True, marks=pytest.mark.slow),
])  # fmt: skip
def test_slots_and_columns_of_a_mesh_emit_the_same(axes, is_flat):
    logits, _, log_q, *others = batch()
    logits, log_q = (x[..., :512] for x in (logits, log_q))
    ids = np.minimum(others[0], 511)
    want = verified(logits, DenseQ(jnp.asarray(log_q)), ids, *others[1:])
    kind = getattr(jax.sharding.AxisType, axes)
    mesh = jax.make_mesh((2, 2), ("r", "v"), axis_types=(kind, kind), devices=jax.devices()[:4])

    def put(x, *spec):
        return jax.device_put(x, jax.NamedSharding(mesh, PartitionSpec(*spec)))

    q = DenseQ(put(log_q, "r", None, "v"))
    if is_flat:
        rows = jnp.arange(B * D, dtype=jnp.int32).reshape(B, D)
        q = DenseQ(put(log_q.reshape(-1, 512), None, "v"), put(rows))
    sampling = jax.tree.map(put, others[2])
    found = verified(put(logits, "r", None, "v"), q, put(ids), put(others[1]), sampling)
    assert_equal(jax.device_get(found), want)


@pytest.mark.long
@pytest.mark.parametrize("rule", ["token", pytest.param("block", marks=pytest.mark.slow)])
def test_edges(rule):
    """NaN of q is nothing, q = p accepts all, a draft without q refuses none, T = 0 is certain."""
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 1, (B, D + 1, V)).astype(np.float32)
    _, _, _, _, num, sampling = batch()
    sampling = Sampling.of(B, seed=np.arange(B))
    ids = (logits[:, :-1] + rng.gumbel(size=(B, D, V))).argmax(-1).astype(np.int32)
    same = DenseQ.of_logits(jnp.asarray(logits[:, :-1]), 1.0)
    counts = np.asarray(verified(logits, same, ids, num, sampling, rule)[1])
    np.testing.assert_array_equal(counts, num + 1)
    # A slot whose drafts were certain, and another q elsewhere that is not looked at.
    certain = DenseQ.of_logits(jnp.asarray(logits[:, :-1] * 3), jnp.zeros(B))
    one_hot = CompactQ(jnp.asarray(ids[..., None]), jnp.zeros((B, D, 1)))
    found = verified(logits, certain, ids, num, sampling, rule)
    want = verified(logits, one_hot, ids, num, sampling, rule)
    np.testing.assert_array_equal(found[1], want[1])
    slot = np.arange(B)
    last = np.asarray(found[1]) - 1
    refused = last < num
    assert refused.sum() > 5
    at = np.minimum(last, D - 1)
    assert (found[0][slot, last] != ids[slot, at])[refused].all()  # p - q has it not
    holes = np.asarray(jax.nn.log_softmax(logits[:, :-1] + 1)).copy()
    holes[:, :, ::2] = np.nan
    nothing = np.where(np.isnan(holes), -np.inf, holes)
    found = [verified(logits, DenseQ(jnp.asarray(x)), ids, num, sampling, rule)
             for x in (holes, nothing)]  # fmt: skip
    assert_equal(*found)
    assert (np.asarray(found[0][1]) > 0).all()


def test_rounded_logprobs_are_another_q_by_a_bounded_distance():
    """logprobs rounded to bfloat16 after the draw: each probability is another.

    The emitted token's law is then off by less than the rounding moves q: docs say how far.
    """
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.full(50, 0.3), (2, 200))
    rounded = np.exp(np.asarray(jnp.asarray(np.log(q), jnp.bfloat16), np.float64))
    accept = np.minimum(1, p / rounded)
    stays = (q * accept).sum(axis=1, keepdims=True)
    left = np.maximum(p - rounded, 0)
    law = q * accept + (1 - stays) * left / left.sum(axis=1, keepdims=True)
    distance = np.abs(law - p).sum(axis=1) / 2
    moved = np.abs(rounded - q).sum(axis=1) / 2
    assert (distance <= 2 * moved + 1e-12).all()
    assert 1e-4 < distance.max() < 0.02


def of_slots(slots, vocab, q, dtype, rule):
    def call(x, ids, num, q):
        sampling = Sampling.of(slots, temperature=0.8, top_p=0.9)
        positions = jnp.zeros(slots, jnp.int32)
        return verify(x, Drafts(ids, num, q), sampling, positions, rule=rule)[:2]

    logits = array((slots, 5, vocab), dtype)
    return temporaries(call, logits, array((slots, 4)), array((slots,)), q)


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "rule", "form"), [
    ("bfloat16", "block", "logprobs"),
    pytest.param("float32", "block", "logprobs", marks=pytest.mark.slow),
    pytest.param("bfloat16", "block", "logits", marks=pytest.mark.slow),
    pytest.param("float32", "token", "probs", marks=pytest.mark.slow),
    pytest.param("bfloat16", "token", "probs", marks=pytest.mark.slow),
    pytest.param("float32", "token", "logits", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_whole_q_needs_no_further_array_of_rows(dtype, rule, form):
    """XLA's temporaries: less than two rows of float32 more than a compact q's; q has 64."""
    slots, vocab = 16, 151_936
    compact = CompactQ(array((slots, 4, 64)), array((slots, 4, 64), "float32"))
    temperature = array((slots,), "float32") if form == "logits" else None
    dense = DenseQ(array((slots, 4, vocab), dtype), None, temperature, form)
    least = of_slots(slots, vocab, compact, dtype, rule)
    assert of_slots(slots, vocab, dense, dtype, rule) <= least + 2 * 4 * vocab


@pytest.mark.parametrize("of", [
    DenseQ.of_probs, pytest.param(lambda q: DenseQ(jnp.log(q)), marks=pytest.mark.long),
])  # fmt: skip
def test_a_known_q_may_stand_in_a_traced_program(of):
    """It is looked at while the program is traced, and refused there too."""
    logits = jax.random.normal(jax.random.key(0), (2, 2, 8))
    probs = jax.nn.softmax(logits[:, :1] + 1)
    sampling, zeros = Sampling.of(2, seed=jnp.arange(2)), jnp.zeros(2, jnp.int32)

    def verified(q):
        drafts = Drafts(jnp.ones((2, 1), jnp.int32), zeros + 1, of(q))
        return jax.jit(lambda x: verify(x, drafts, sampling, zeros).token_ids)(logits)

    drafts = Drafts(jnp.ones((2, 1), jnp.int32), zeros + 1, of(probs))
    expected = verify(logits, drafts, sampling, zeros).token_ids
    np.testing.assert_array_equal(verified(probs), expected)
    with pytest.raises(ValueError, match="of a distribution"):
        verified(probs * 3)
