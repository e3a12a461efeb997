"""Flat rows: what `verify` of ragged slots gives is what it gives of dense ones."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels import topk_logprobs
from pallas_kernels.sampling import (
    CompactQ,
    Drafts,
    Sampling,
    draw,
    emitted_logprobs,
    row_ids_of,
    verify,
)
from tests.support import quick_compile, shape_checks

B, S, V, N, K = 6, 4, 333, 32, 5
NUM = np.array([3, 0, 2, 3, 1, 3], np.int32)  # drafts of each slot; each has one row more


@functools.cache
def batch():
    """Dense logits, and the same rows among N: in another order, with anything between them."""
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 3, (B, S, V)).astype(np.float32)
    logits[3, 1, 7] = np.nan
    place = rng.permutation(N)[: B * S].reshape(B, S).astype(np.int32)
    row_ids = np.where(np.arange(S) <= NUM[:, None], place, -1)
    row_ids[1, 1] = N + 3  # no row either
    flat = np.full((N, V), np.nan, np.float32)
    flat[place.reshape(-1)] = logits.reshape(-1, V)
    drafts = logits[:, :-1].argmax(-1).astype(np.int32)
    drafts[5, 1] = 0
    q_ids = np.stack([drafts, (drafts + 1) % V, np.full_like(drafts, -1)], -1)
    log_q = np.log(np.broadcast_to(np.float32([0.75, 0.25, 1]), q_ids.shape)).astype(np.float32)
    log_q[..., 2] = -np.inf
    sampling = Sampling.of(
        B, temperature=[0, 0.7, 1, 1.3, 0, 1], top_k=[0, 0, 20, 0, 0, 0],
        top_p=[1, 0.9, 1, 1, 1, 0.5], seed=np.arange(B),
    )  # fmt: skip
    made = Drafts(
        jnp.asarray(drafts), jnp.asarray(NUM), CompactQ(jnp.asarray(q_ids), jnp.asarray(log_q))
    )
    return logits, jnp.asarray(flat), row_ids, made, sampling


@quick_compile.jit
def dense(logits, drafts, sampling, changes, extra):
    got = verify(logits, drafts, sampling, jnp.arange(B), k=K, **changes)
    return got, emitted_logprobs(logits, got.token_ids, got.read, extra_token_ids=extra)


@quick_compile.jit
def ragged(logits, row_ids, drafts, sampling, changes, extra):
    got = verify(logits, drafts, sampling, jnp.arange(B), row_ids=row_ids, k=K, **changes)
    found = emitted_logprobs(
        logits, got.token_ids, got.read, row_ids=row_ids, extra_token_ids=extra
    )
    without = verify(logits, drafts, sampling, jnp.arange(B), row_ids=row_ids, **changes)
    return got, found, without


def test_certain_drafts_change_no_token_of_flat_rows():
    logits, flat, row_ids, drafts, sampling = batch()
    drafts, extra = drafts._replace(q=None), jnp.full((B, 1), -1, jnp.int32)
    whole, _ = dense(logits, drafts, sampling, {}, extra)
    got, _, without = ragged(flat, row_ids, drafts, sampling, {}, extra)
    for found in (got, without):
        np.testing.assert_array_equal(found.num_tokens[2:], whole.num_tokens[2:])
        np.testing.assert_array_equal(found.token_ids[2:], whole.token_ids[2:])
    assert len(set(np.asarray(whole.num_tokens).tolist())) > 2


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("greedy", [False, True])
def test_flat_rows_give_what_dense_ones_do(greedy, changed):
    logits, flat, row_ids, drafts, sampling = batch()
    extra = jnp.tile(jnp.int32([[2, V, -1]]), (B, 1))
    if greedy:
        sampling = Sampling.greedy(B)
    every, of_rows = {}, {}
    if changed:  # every position in a way of its own, the drafts' tokens too
        rng = np.random.default_rng(0)
        bias_ids = rng.integers(0, V, (B, S, 3)).astype(np.int32)
        bias_ids[:, :-1, 0] = drafts.token_ids
        every = {
            "allowed": rng.integers(0, 2**32, (B, S, -(-V // 32)), np.uint32),
            "bias_token_ids": bias_ids,
            "bias": rng.normal(0, 3, bias_ids.shape).astype(np.float32),
        }
        has = (row_ids >= 0) & (row_ids < N)
        for name, x in every.items():
            of_rows[name] = np.zeros((N, x.shape[-1]), x.dtype)
            of_rows[name][row_ids[has]] = x[has]
    want, expected = jax.device_get(dense(logits, drafts, sampling, every, extra))
    got, found, without = jax.device_get(ragged(flat, row_ids, drafts, sampling, of_rows, extra))
    if changed:
        plain, _ = dense(logits, drafts, sampling, {}, extra)
        assert (np.asarray(plain.token_ids) != want.token_ids).any()
    np.testing.assert_array_equal(got.token_ids, want.token_ids)
    np.testing.assert_array_equal(got.num_tokens, want.num_tokens)
    np.testing.assert_array_equal(without.token_ids, want.token_ids)
    has = np.arange(S) <= NUM[:, None]
    for cut in got.cut, without.cut:
        chex.assert_trees_all_equal(*(jax.tree.map(lambda x: x[has], c) for c in (cut, want.cut)))
    for name in ("token_ids", "logprobs", "token_ranks", "extra_logprobs"):
        x, y = (getattr(one, name).reshape(B, S, -1) for one in (found, expected))
        np.testing.assert_array_equal(x[has], y[has], err_msg=name)
        none = -1 if name == "token_ids" else 0 if name == "token_ranks" else np.nan
        np.testing.assert_array_equal(x[~has], np.full_like(x[~has], none), err_msg=name)


def test_a_slot_without_a_row_for_it_gets_the_given_bonus_token_or_none():
    logits, flat, row_ids, drafts, _ = batch()
    rows = row_ids.copy()
    rows[np.arange(B), NUM] = -1  # of all slots, the row behind the last draft
    rows[4] = -1
    call = quick_compile.jit(
        lambda bonus: verify(
            flat, drafts, Sampling.greedy(B), jnp.zeros(B, jnp.int32), row_ids=jnp.asarray(rows),
            bonus_token_ids=bonus,
        )
    )  # fmt: skip
    got, none = jax.device_get((call(jnp.arange(100, 100 + B)), call(None)))
    ids = drafts.token_ids
    # Slot 3 has an invalid row, slot 4 none at all, and slot 5 refuses its second draft.
    invalid = int(np.nanargmax(logits[3, 1]))
    want = [[*ids[0], 100], [101, -1, -1, -1], [*ids[2, :2], 102, -1], [ids[3, 0], invalid, -1, -1],
            [-1] * 4, [ids[5, 0], logits[5, 1].argmax(), -1, -1]]  # fmt: skip
    np.testing.assert_array_equal(got.token_ids, np.array(want))
    np.testing.assert_array_equal(got.num_tokens, [4, 1, 3, 2, 0, 2])
    np.testing.assert_array_equal(none.num_tokens, [3, 0, 2, 2, 0, 2])
    assert (none.token_ids[[0, 1, 2], none.num_tokens[:3]] == -1).all()


@quick_compile.jit
def drawn(logits, sampling, row_ids=None):
    return draw(logits, sampling, jnp.arange(B) + 5, row_ids=row_ids)


@pytest.mark.parametrize("greedy", [False, True])
def test_drafts_are_drawn_of_flat_rows_as_of_dense_ones(greedy):
    """Also in shards of the vocabulary, and where several slots draw of one row."""
    _, flat, row_ids, _, sampling = batch()
    place = np.array([row_ids[0, 0], -1, row_ids[2, 1], row_ids[3, 0], N, row_ids[0, 0]], np.int32)
    has = (place >= 0) & (place < N)
    if greedy:  # a row with a NaN has its greedy draft as well
        sampling, flat = Sampling.greedy(B), flat.at[place[2], 3].set(jnp.nan)
    want = drawn(jnp.asarray(np.where(has[:, None], flat[place % N], 0))[:, None], sampling)
    mesh = jax.make_mesh((3,), ("v",), devices=jax.devices()[:3])

    def of_columns(x):
        return draw(x, sampling, jnp.arange(B) + 5, row_ids=jnp.asarray(place), axis_name="v")

    of_shards = jax.shard_map(of_columns, mesh=mesh, in_specs=P(None, "v"), out_specs=P())
    ways = (
        drawn(flat, sampling, place),
        draw(flat, sampling, jnp.arange(B) + 5, row_ids=jnp.asarray(place)),
        quick_compile.jit(of_shards)(jax.device_put(flat, jax.NamedSharding(mesh, P(None, "v")))),
    )
    assert len(set(np.asarray(want.token_ids[has]).ravel().tolist())) > 2
    for got in ways:
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(x[has], y[has])
        np.testing.assert_array_equal(got.num, has.astype(np.int32))
        assert (np.asarray(got.token_ids)[~has] == -1).all()


@quick_compile.jit
def with_prompt(logits, row_ids, drafts, sampling, prompt_rows, prompt_ids):
    """What is emitted, and the prompt's logprobs, of one flat batch."""
    emitted = verify(logits, drafts, sampling, jnp.arange(B), row_ids=row_ids)
    return emitted[:2], topk_logprobs(logits, prompt_ids, K, row_ids=prompt_rows)


def test_no_row_of_prompts_or_drafts_is_copied():
    """What one program for both needs is a small share of the logits."""
    rows, vocabulary = 8192, 32_000
    of = jax.ShapeDtypeStruct
    logits, drafts = of((rows, vocabulary), jnp.bfloat16), Drafts(of((B, S - 1), "int32"), NUM)
    prompt = of((rows - B * S,), "int32")
    lowered = with_prompt.lower(
        logits,
        of((B, S), "int32"),
        drafts,
        jax.eval_shape(lambda: Sampling.greedy(B)),
        prompt,
        prompt,
    )
    temporary = lowered.compile().memory_analysis().temp_size_in_bytes
    assert temporary < logits.size * 2 / 8


def test_rows_and_drafts_from_lengths():
    num = np.array([2, 0, 3])
    np.testing.assert_array_equal(
        row_ids_of(num + 1, 4), [[0, 1, 2, -1], [3, -1, -1, -1], [4, 5, 6, 7]]
    )
    ids = np.arange(10, 17)
    q = CompactQ(np.stack([ids, ids + 1], 1), np.log(np.full((7, 2), 0.5)))
    made = Drafts.of_flat(ids, num, 3, q)
    np.testing.assert_array_equal(made.token_ids, [[10, 11, 0], [0, 0, 0], [12, 13, 14]])
    np.testing.assert_array_equal(made.num, num)
    np.testing.assert_array_equal(made.q.ids[2], [[12, 13], [13, 14], [14, 15]])
    assert made.q.logprobs.shape == (3, 3, 2)
    assert Drafts.of_flat(ids, num, 3).q is None


@pytest.mark.parametrize(("given", "complaint"), [
    ({"row_ids": np.zeros(4, np.int32)}, r"row_ids \(4,\): give the rows of each slot, \[B, S\]"),
    ({"row_ids": np.zeros((B, S + 1), np.int32)}, r"row_ids \(6, 5\)"),
    ({"bonus_token_ids": np.zeros(2, np.int32)}, r"bonus_token_ids \(2,\): give one token a slot"),
    ({"row_ids": None}, r"\[N, V\] need row_ids"),
    ({"row_ids": None, "logits": np.zeros((B, S, V), np.float32),
      "bonus_token_ids": np.zeros(B, np.int32)}, "bonus_token_ids go with row_ids alone"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused(given, complaint):
    _, flat, row_ids, drafts, sampling = batch()
    usual = {"logits": flat, "drafts": drafts, "positions": jnp.zeros(B, jnp.int32)}
    with pytest.raises(ValueError, match=complaint):
        shape_checks.as_users_run(verify)(**usual | {"row_ids": row_ids} | given, sampling=sampling)
    with pytest.raises(ValueError, match=r"row_ids \(6, 4\): give the rows of each slot, \[B\]"):
        shape_checks.as_users_run(draw)(flat, sampling, jnp.zeros(B, jnp.int32), row_ids=row_ids)
