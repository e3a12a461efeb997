"""Flat rows: what `verify` of ragged slots gives is what it gives of dense ones."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import topk_logprobs, use_implementation
from pallas_kernels.sampling import (
    CompactQ,
    Drafts,
    Sampling,
    draw,
    logprobs_of_read,
    row_ids_of,
    verify,
)
from tests.support import quick_compile, shape_checks
from tests.support.lowered import array, kernels_of, temporaries
from tests.support.shards import P, mesh_of

B, S, V, N, K = 6, 4, 333, 32, 5
NUM = np.array([3, 0, 2, 3, 1, 3], np.int32)  # drafts of each slot; each has one row more
EXTRA = np.tile(np.int32([[2, V, -1]]), (B, 1))


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
    made = Drafts(drafts, NUM, CompactQ(q_ids, log_q))
    return logits, jnp.asarray(flat), row_ids, jax.tree.map(jnp.asarray, made), sampling


@quick_compile.jit
def dense(logits, drafts, sampling, changes, extra):
    got = verify(logits, drafts, sampling, jnp.arange(B), k=K, **changes)
    return got, logprobs_of_read(logits, got.token_ids, got.read, extra_token_ids=extra)


@functools.partial(quick_compile.jit, static_argnums=6)
def ragged(logits, row_ids, drafts, sampling, changes, extra, k=K):
    got = verify(logits, drafts, sampling, jnp.arange(B), row_ids=row_ids, k=k, **changes)
    named = {"row_ids": row_ids, "extra_token_ids": extra}
    return got, logprobs_of_read(logits, got.token_ids, got.read, **named) if k else None


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "changed"),
    [*itertools.product(("sampled", "greedy"), (False, True)), ("certain", False)],
)
def test_flat_rows_give_what_dense_ones_do(kind, changed):
    logits, flat, row_ids, drafts, sampling = batch()
    sampling = Sampling.greedy(B) if kind == "greedy" else sampling
    drafts = drafts._replace(q=None) if kind == "certain" else drafts
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
    want, expected = jax.device_get(dense(logits, drafts, sampling, every, EXTRA))
    arrays = flat, row_ids, drafts, sampling, of_rows, EXTRA
    got, found = jax.device_get(ragged(*arrays))
    all_got = [got]
    if kind == "sampled" and not changed:
        all_got.append(jax.device_get(ragged(*arrays, None)[0]))
    if changed:
        plain, _ = dense(logits, drafts, sampling, {}, EXTRA)
        assert (np.asarray(plain.token_ids) != want.token_ids).any()
    else:
        assert len(set(want.num_tokens.tolist())) > 2
    has = np.arange(S) <= NUM[:, None]
    for got in all_got:
        chex.assert_trees_all_equal(got[:2], want[:2])
        cuts = (jax.tree.map(lambda x: x[has], one.cut) for one in (got, want))
        chex.assert_trees_all_equal(*cuts)
    for name in ("token_ids", "logprobs", "token_ranks", "extra_logprobs"):
        x, y = (getattr(one, name).reshape(B, S, -1) for one in (found, expected))
        np.testing.assert_array_equal(x[has], y[has], err_msg=name)
        none = -1 if name == "token_ids" else 0 if name == "token_ranks" else np.nan
        np.testing.assert_array_equal(x[~has], np.full_like(x[~has], none), err_msg=name)


@pytest.mark.long
def test_a_slot_without_a_row_for_it_gets_no_bonus_token():
    logits, flat, row_ids, drafts, _ = batch()
    rows = row_ids.copy()
    rows[np.arange(B), NUM] = -1  # of all slots, the row behind the last draft
    rows[4] = -1
    got, _ = jax.device_get(ragged(flat, rows, drafts, Sampling.greedy(B), {}, EXTRA, None))
    ids = drafts.token_ids
    # Slot 3 has an invalid row, slot 4 none at all, and slot 5 refuses its second draft.
    invalid = int(np.nanargmax(logits[3, 1]))
    want = [[*ids[0], -1], [-1] * 4, [*ids[2, :2], -1, -1], [ids[3, 0], invalid, -1, -1],
            [-1] * 4, [ids[5, 0], logits[5, 1].argmax(), -1, -1]]  # fmt: skip
    np.testing.assert_array_equal(got.token_ids, np.array(want))
    np.testing.assert_array_equal(got.num_tokens, [3, 0, 2, 2, 0, 2])


@quick_compile.jit
def drawn(logits, sampling, row_ids=None):
    return draw(logits, sampling, jnp.arange(B) + 5, row_ids=row_ids)


@quick_compile.jit
def drawn_on_shards(logits, sampling, row_ids):
    def of_columns(x, sampling, row_ids):
        return draw(x, sampling, jnp.arange(B) + 5, row_ids=row_ids, axis_name="model")

    given = P(None, "model"), P(), P()
    of_shards = jax.shard_map(of_columns, mesh=mesh_of(3), in_specs=given, out_specs=P())
    return of_shards(logits, sampling, row_ids)


@pytest.mark.parametrize("greedy", [False, True])
def test_drafts_are_drawn_of_flat_rows_as_of_dense_ones(greedy):
    """Also in shards of the vocabulary, and where several slots draw of one row."""
    _, flat, row_ids, _, sampling = batch()
    place = np.array([row_ids[0, 0], -1, row_ids[2, 1], row_ids[3, 0], N, row_ids[0, 0]], np.int32)
    has = (place >= 0) & (place < N)
    if greedy:  # a row with a NaN has its greedy draft as well
        sampling, flat = Sampling.greedy(B), flat.at[place[2], 3].set(jnp.nan)
    want = drawn(jnp.asarray(np.where(has[:, None], flat[place % N], 0))[:, None], sampling)
    ways = [drawn(flat, sampling, place), drawn_on_shards(flat, sampling, place)]
    if greedy:
        ways.append(draw(flat, sampling, jnp.arange(B) + 5, row_ids=jnp.asarray(place)))
    assert len(set(np.asarray(want.token_ids[has]).ravel().tolist())) > 2
    for got in ways:
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(x[has], y[has])
        np.testing.assert_array_equal(got.num, has.astype(np.int32))
        assert (np.asarray(got.token_ids)[~has] == -1).all()


def with_prompt(logits, row_ids, drafts, sampling, prompt_rows, prompt_ids):
    """What is emitted, and the prompt's logprobs, of one flat batch."""
    emitted = verify(logits, drafts, sampling, jnp.arange(B), row_ids=row_ids)
    return emitted[:2], topk_logprobs(logits, prompt_ids, K, row_ids=prompt_rows)


@pytest.mark.long
def test_no_row_of_prompts_or_drafts_is_copied():
    """What one program for both needs is a small share of the logits."""
    rows, vocabulary = 8192, 32_000
    logits, prompt = array((rows, vocabulary), "bfloat16"), array((rows - B * S,))
    sampling = jax.eval_shape(lambda: Sampling.greedy(B))
    given = array((B, S)), Drafts(array((B, S - 1)), NUM), sampling, prompt, prompt
    assert temporaries(with_prompt, logits, *given) < logits.size * 2 / 8


@pytest.mark.long
def test_changed_flat_rows_are_lowered_for_a_gpu():
    """There a mask changes logits as the groups' kernel reads them."""

    def verified(logits, row_ids, allowed):
        drafts = Drafts(row_ids[:, 1:], row_ids[:, 0])
        sampling = Sampling.of(B, temperature=0.5)
        return verify(logits, drafts, sampling, row_ids[:, 0], row_ids=row_ids, allowed=allowed)

    logits, allowed = array((40, 32_000), "bfloat16"), array((40, 1000))
    with use_implementation("mosaic_gpu"):
        assert kernels_of(verified, logits, array((B, S)), allowed) > 3


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
    ({"row_ids": None}, r"\[N, V\] need row_ids"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused(given, complaint):
    _, flat, row_ids, drafts, sampling = batch()
    usual = {"logits": flat, "drafts": drafts, "positions": jnp.zeros(B, jnp.int32)}
    with pytest.raises(ValueError, match=complaint):
        shape_checks.as_users_run(verify)(**usual | {"row_ids": row_ids} | given, sampling=sampling)
    with pytest.raises(ValueError, match=r"row_ids \(6, 4\): give the rows of each slot, \[B\]"):
        shape_checks.as_users_run(draw)(flat, sampling, jnp.zeros(B, jnp.int32), row_ids=row_ids)
