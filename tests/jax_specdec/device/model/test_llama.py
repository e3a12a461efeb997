"""The decoder and the MTP head against an independent float64 model without a cache."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.checkpoint.rope_scaling import RopeScaling
from jax_specdec.device.model import llama, mtp, prefill
from jax_specdec.device.model.params import (
    KVCache,
    init_cache,
    init_mtp_cache,
    init_params,
    named_arrays,
)
from tests.support import quick_compile, reference_model
from tests.support.shape_checks import as_users_run

TOLERANCE = 1e-4
B, T, V = 3, 24, 32
S = 4  # rows of a step: nearly all tests share this shape, and so one program a configuration
CONFIG = ModelConfig.tiny(V)
SHAPES = {
    "tied": CONFIG,
    "untied, one kv head": ModelConfig.tiny(
        V, tie_embeddings=False, num_kv_heads=1, rope_theta=500.0
    ),
    "no grouping, three layers": ModelConfig.tiny(V, num_kv_heads=4, num_layers=3),
    "biases (Qwen2)": ModelConfig.tiny(V, qkv_bias=True),
    "normed heads, every bias (Qwen3)": ModelConfig.tiny(
        V, qk_norm=True, qkv_bias=True, output_bias=True
    ),
    # Wavelengths of 6 to 630 positions: one frequency is kept, one blended, two are slowed.
    "stretched (Llama 3.1)": ModelConfig.tiny(
        V, rope_theta=500.0, rope_scaling=RopeScaling("llama3", 8.0, original_length=60)
    ),
    "stretched evenly": ModelConfig.tiny(V, rope_scaling=RopeScaling("linear", 4.0)),
}


@functools.cache
def params_of(config):
    """Random weights; norms are not one, or a forgotten norm would not show."""
    rng = np.random.default_rng(1)

    def draw(path, x):
        if path[-1].name.endswith("norm"):
            values = rng.uniform(0.5, 1.5, x.shape)
        else:
            values = rng.normal(size=x.shape) / np.sqrt(x.shape[-2])
        return jnp.asarray(values, config.dtype)

    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    return jax.tree_util.tree_map_with_path(draw, shapes)


def weights_of(config):
    return {name: np.asarray(x) for name, x in named_arrays(params_of(config)).items()}


def random_ids(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, V, shape).astype(np.int32)


def expected(config, ids):
    return reference_model.logits(weights_of(config), config.to_dict(), ids)


@functools.partial(quick_compile.jit, static_argnums=1)
def step(params, config, tokens, positions, cache):
    """Logits [B, S, V], hidden states [B, S, E] and the cache."""
    hidden, cache = llama.forward(params, config, tokens, positions, cache)
    return llama.logits(params, config, hidden), hidden, cache


def span(first, size, slots=B):
    return np.tile(np.arange(first, first + size, dtype=np.int32), (slots, 1))


def decode(config, ids, cache, first=0, params=None):
    """Logits [B, N, V] and hidden states of ids [B, N] from position `first` on, and the cache.

    They go through in steps of S rows; the last one may end in padding.
    """
    params, out, hidden = params or params_of(config), [], []
    for at in range(0, ids.shape[1], S):
        tokens, positions = in_rows(ids[:, at : at + S], first + at)
        x, h, cache = step(params, config, tokens, positions, cache)
        out.append(x)
        hidden.append(h)
    return *(np.concatenate(x, axis=1)[:, : ids.shape[1]] for x in (out, hidden)), cache


def in_rows(ids, first):
    """A step of at most S ids a slot [B, n]: tokens and positions [B, S]."""
    tokens, positions = np.full((2, B, S), -1, np.int32)
    tokens[:, : ids.shape[1]] = ids
    positions[:, : ids.shape[1]] = span(first, ids.shape[1])
    return np.maximum(tokens, 0), positions


# Agreement with the reference ------------------------------------------------------------------


WAYS = [
    # configuration, sizes of the steps, jitted
    ("tied", (12,), True),
    ("tied", (1,) * 12, True),
    pytest.param("tied", (4, 4, 4), True, marks=pytest.mark.fast),
    ("tied", (4, 4, 4), False),
    ("untied, one kv head", (4, 4, 4), True),
    ("no grouping, three layers", (4, 4, 4), True),
    ("biases (Qwen2)", (4, 4, 4), True),
    pytest.param("normed heads, every bias (Qwen3)", (4, 4, 4), True, marks=pytest.mark.fast),
    pytest.param("stretched (Llama 3.1)", (4, 4, 4), True, marks=pytest.mark.fast),
    ("stretched evenly", (4, 4, 4), True),
]


@pytest.mark.parametrize(("shape", "sizes", "jitted"), WAYS, ids=str)
def test_whole_stepwise_and_chunked_agree_with_reference(shape, sizes, jitted):
    config = SHAPES[shape]
    run = step if jitted else step.__wrapped__
    ids = jnp.asarray(random_ids(B, 12))
    cache, got, at = init_cache(config, B, T), [], 0
    for size in sizes:
        tokens, positions = ids[:, at : at + size], jnp.asarray(span(at, size))
        out, _, cache = run(params_of(config), config, tokens, positions, cache)
        got.append(np.asarray(out))
        at += size
    got = np.concatenate(got, axis=1)
    assert got.dtype == np.float32
    for b in range(B):
        want = expected(config, ids[b])
        assert want.std() > 0.3  # not a constant
        np.testing.assert_allclose(got[b], want, atol=TOLERANCE, rtol=0)


NOTICED = {
    "tied": {"rope_theta": 9000.0, "norm_eps": 1e-3},
    "normed heads, every bias (Qwen3)": {},
    "stretched (Llama 3.1)": {
        "rope_scaling": {"factor": 7.0, "low_frequency_factor": 1.5, "high_frequency_factor": 5.0,
                         "original_length": 80, "kind": "linear"},
    },
}  # fmt: skip


@pytest.mark.parametrize("shape", NOTICED)
def test_the_reference_notices_a_model_that_is_wrong(shape):
    """Negative control: each part of the model moves its logits by more than the tolerance."""
    config, ids = SHAPES[shape], random_ids(13)
    sizes, weights = config.to_dict(), weights_of(config)
    want = reference_model.logits(weights, sizes, ids)
    others = {
        name: (weights | {name: value * 1.01}, sizes)
        for name, value in weights.items()
        if not name.startswith("mtp")
    }
    for name, value in NOTICED[shape].items():
        if isinstance(value, dict):
            for inner, other in value.items():
                others[inner] = (weights, sizes | {name: sizes[name] | {inner: other}})
        else:
            others[name] = (weights, sizes | {name: value})
    for name, (changed, other_sizes) in others.items():
        other = reference_model.logits(changed, other_sizes, ids)
        assert np.abs(other - want).max() > TOLERANCE, name


def test_bfloat16_is_close_and_keeps_its_type():
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    ids = random_ids(B, 9)
    out, hidden, cache = decode(config, ids, init_cache(config, B, T))
    assert out.dtype == hidden.dtype == cache.k.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(out[0], np.float64), expected(config, ids[0]), atol=0.15, rtol=0
    )


def test_a_billion_parameters_trace_with_the_same_code():
    config = ModelConfig.llama_1b(num_mtp_layers=1)
    assert ModelConfig.llama_1b().num_parameters == 1_235_814_400  # Llama 3.2 1B
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    assert sum(x.size for x in jax.tree.leaves(params)) == config.num_parameters
    cache = jax.eval_shape(lambda: init_cache(config, 8, 4096))
    rows = jax.ShapeDtypeStruct((8, 4), jnp.int32)
    out, _, new_cache = jax.eval_shape(
        lambda p, t, c: step.__wrapped__(p, config, t, t, c), params, rows, cache
    )
    assert (out.shape, out.dtype) == ((8, 4, 128_256), jnp.bfloat16)
    assert new_cache == cache


# Rows, slots, padding --------------------------------------------------------------------------


@functools.cache
def decode_plainly(ids):
    """Logits [N, V] of ids [N] in slot 1, one token a step in [B, S] steps full of padding."""
    cache, rows = init_cache(CONFIG, B, T), []
    for at in range(len(ids)):
        tokens, positions = np.zeros((B, S), np.int32), np.full((B, S), -1, np.int32)
        tokens[1, 0], positions[1, 0] = ids[at], at
        out, _, cache = step(params_of(CONFIG), CONFIG, tokens, positions, cache)
        rows.append(np.asarray(out)[1, 0])
    return np.stack(rows)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1))
def test_rejected_drafts_and_padding_leave_no_trace(seed):
    """Every way of speculating gives, row for row, the bits of plain decoding in the same shape."""
    total, rng = 12, np.random.default_rng(seed)
    ids = [random_ids(total, seed=seed) for seed in (3, 4, 5)]
    cache, done, got = init_cache(CONFIG, B, T), [0] * B, [[] for _ in range(B)]
    while min(done) < total:
        tokens, positions = np.full((B, S), 9, np.int32), np.zeros((B, S), np.int32)
        accepted = []
        for b in range(B):
            rows = rng.integers(0, min(S, total - done[b]) + 1)
            accepted.append(rng.integers(min(rows, 1), rows + 1))
            true = ids[b][done[b] : done[b] + rows]
            tokens[b, :rows] = np.where(np.arange(rows) < accepted[b], true, (true + 7) % V)
            positions[b, :rows] = done[b] + np.arange(rows)
            positions[b, rows:] = rng.choice([-1, -T, T, T + 3])
        out, _, cache = step(params_of(CONFIG), CONFIG, tokens, positions, cache)
        for b in range(B):
            got[b].extend(np.asarray(out)[b, : accepted[b]])
            done[b] += accepted[b]
    for b in range(B):
        np.testing.assert_allclose(np.stack(got[b]), expected(CONFIG, ids[b]), atol=TOLERANCE)
        np.testing.assert_array_equal(np.stack(got[b]), decode_plainly(tuple(ids[b])))


@pytest.mark.fast
def test_other_rows_and_slots_change_no_bit():
    rng = np.random.default_rng(6)
    base, _ = filled_cache()
    tokens, positions = random_ids(B, 4, seed=7), span(8, 4)
    want = np.asarray(step(params_of(CONFIG), CONFIG, tokens, positions, base)[0])
    for _ in range(5):
        others = rng.integers(0, V, (B, 4)).astype(np.int32)
        others[1, :2] = tokens[1, :2]
        moved = positions.copy()
        moved[0], moved[2, 1:] = rng.integers(-2, T + 2), -1
        moved[0, 1:] = -1
        out = np.asarray(step(params_of(CONFIG), CONFIG, others, moved, base)[0])
        np.testing.assert_array_equal(out[1, :2], want[1, :2])
        assert np.abs(out[0, 0] - want[0, 0]).max() > TOLERANCE  # negative control


def filled_cache(length=8):
    """A cache with `length` random tokens in every slot, and the tokens."""
    ids = random_ids(B, length, seed=8)
    return decode(CONFIG, ids, init_cache(CONFIG, B, T))[-1], ids


def test_entries_beyond_a_row_are_invisible():
    cache, _ = filled_cache()
    tokens = random_ids(B, 2, seed=9)
    want, _, _ = decode(CONFIG, tokens, cache, 8)
    k, v = np.array(cache.k), np.array(cache.v)
    for spoilt in (1e30, np.nan):
        k[:, :, 10:], v[:, :, 10:] = spoilt, 3.0
        out, _, _ = decode(CONFIG, tokens, KVCache(k, v), 8)
        np.testing.assert_array_equal(out, want)
    v[:, :, 7] += 1  # negative control: an entry that is seen
    out, _, _ = decode(CONFIG, tokens, KVCache(k, v), 8)
    assert np.abs(out - want).max() > TOLERANCE


def test_the_last_position_is_right_and_the_next_is_dropped():
    ids = random_ids(T, seed=10)
    _, _, before = decode(CONFIG, np.tile(ids[:-2], (B, 1)), init_cache(CONFIG, B, T))
    tokens = np.tile(np.append(ids[-2:], [3, 4]).astype(np.int32), (B, 1))
    beyond = span(T - 2, S)  # T and T + 1 too
    out, _, cache = step(params_of(CONFIG), CONFIG, tokens, beyond, before)
    np.testing.assert_allclose(out[0, :2], expected(CONFIG, ids)[-2:], atol=TOLERANCE, rtol=0)
    only_two, _, alone = step(
        params_of(CONFIG), CONFIG, tokens, np.where(beyond < T, beyond, -1), before
    )
    np.testing.assert_array_equal(out[:, :2], only_two[:, :2])
    jax.tree.map(np.testing.assert_array_equal, cache, alone)
    assert np.isfinite(out).all()


def poisoned():
    """Weights in which token 5 has a NaN embedding; the head has none."""
    config = SHAPES["untied, one kv head"]
    params = params_of(config)
    return config, dataclasses.replace(params, embedding=params.embedding.at[5].set(jnp.nan))


def run_with_a_nan(config, params):
    """Slot 0 meets the NaN in row 2 of 4; then a new request takes the slot."""
    ids = np.where(random_ids(B, 4, seed=11) == 5, 6, random_ids(B, 4, seed=11))
    bad = ids.copy()
    bad[0, 2] = 5
    # A new function each time: jit would reuse what it traced before a monkeypatch.
    run = quick_compile.jit(lambda *args: step.__wrapped__(params, config, *args))
    out, _, cache = run(bad, span(0, 4), init_cache(config, B, T))
    again, _, _ = run(ids, np.where(span(0, 4) == 0, 0, -1).astype(np.int32), cache)
    return ids, np.asarray(out), np.asarray(again)


def test_a_nan_reaches_the_rows_that_see_it_and_no_others():
    config, params = poisoned()
    ids, out, again = run_with_a_nan(config, params)
    assert np.isnan(out[0, 2:]).all()
    for b, rows in [(0, 2), (1, 4), (2, 4)]:
        want = expected(config, ids[b])[:rows]
        np.testing.assert_allclose(out[b, :rows], want, atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(again[0, 0], expected(config, ids[0])[0], atol=TOLERANCE, rtol=0)


@pytest.mark.slow
def test_without_containment_a_nan_spreads(monkeypatch):
    """Negative control of the test above."""
    monkeypatch.setattr(llama, "_contain_non_finite", lambda k, v: (k, v))
    config, params = poisoned()
    _, out, again = run_with_a_nan(config, params)
    assert np.isnan(out[0, 0]).all()
    assert np.isnan(again[0, 0]).all()


def test_an_id_beyond_the_vocabulary_gives_an_invalid_row():
    tokens = np.array([[V], [V - 1], [2**31 - 1]], np.int32)
    out, _, _ = decode(CONFIG, tokens, init_cache(CONFIG, B, T))
    assert np.isnan(out).all(axis=(1, 2)).tolist() == [True, False, True]


# Prefill ---------------------------------------------------------------------------------------

CHUNK = 11
run_prefill = quick_compile.jit(prefill.prefill, static_argnums=1)
run_mtp_prefill = quick_compile.jit(prefill.mtp_prefill, static_argnums=1)


def bucket(values):
    """Up to CHUNK values, padded with 13: a real id, where they are ids."""
    padded = np.full((CHUNK, *values.shape[1:]), 13, values.dtype)
    padded[: len(values)] = values
    return padded


@pytest.mark.fast
@pytest.mark.parametrize("chunks", [(11,), (8, 3), (1, 8, 2)], ids=str)
def test_prefill_in_chunks_fills_one_slot(chunks):
    before, _ = filled_cache()
    ids = random_ids(11, seed=12)
    cache, at, hidden = before, 0, []
    for size in chunks:
        tokens = bucket(ids[at : at + size])
        out, cache = run_prefill(params_of(CONFIG), CONFIG, tokens, at, size, 2, cache)
        hidden.append(np.asarray(out)[:size])
        at += size
    want = reference_model.hidden_states(weights_of(CONFIG), CONFIG.to_dict(), ids)
    np.testing.assert_allclose(np.concatenate(hidden), want, atol=TOLERANCE, rtol=0)
    for new, old in [(cache.k, before.k), (cache.v, before.v)]:
        new, old = np.asarray(new), np.asarray(old)
        np.testing.assert_array_equal(new[:, :2], old[:, :2])
        assert (new[:, 2, 11:] == 0).all()  # padding wrote nothing
    out, _, _ = decode(CONFIG, np.full((B, 1), 4, np.int32), cache, 11)
    want = expected(CONFIG, np.append(ids, 4))[-1]
    np.testing.assert_allclose(out[2, 0], want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("slot", [-1, B])
def test_prefill_of_no_slot_writes_nothing(slot):
    before, _ = filled_cache()
    ids = random_ids(CHUNK)
    hidden, after = run_prefill(params_of(CONFIG), CONFIG, ids, 8, CHUNK, slot, before)
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert np.isnan(hidden).all()


# MTP head --------------------------------------------------------------------------------------


@functools.partial(quick_compile.jit, static_argnums=1)
def mtp_step(params, config, hidden, next_tokens, positions, cache):
    """Logits [B, S, V], hidden states [B, S, E] and the cache."""
    out, cache = mtp.mtp_forward(params, config, hidden, next_tokens, positions, cache)
    return llama.logits(params, config, out), out, cache


def run_mtp(config, hidden, next_ids, cache, first=0):
    """Logits and hidden states of N rows from position `first` on, and the cache; see `decode`."""
    out, states = [], []
    for at in range(0, next_ids.shape[1], S):
        tokens, positions = in_rows(next_ids[:, at : at + S], first + at)
        rows = hidden[:, at : at + S]
        rows = np.pad(rows, ((0, 0), (0, S - rows.shape[1]), (0, 0)))
        x, h, cache = mtp_step(params_of(config), config, rows, tokens, positions, cache)
        out.append(x)
        states.append(h)
    return *(np.concatenate(x, axis=1)[:, : next_ids.shape[1]] for x in (out, states)), cache


@pytest.mark.fast
@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_mtp_head_agrees_with_reference(config):
    """The rows go through in two calls, and the second one finds the entries of the first."""
    ids = random_ids(B, 12, seed=13)
    _, hidden, _ = decode(config, ids, init_cache(config, B, T))
    cache = init_mtp_cache(config, B, T)
    first, _, cache = run_mtp(config, hidden[:, :6], ids[:, 1:7], cache)
    second, _, _ = run_mtp(config, hidden[:, 6:11], ids[:, 7:], cache, 6)
    got = np.concatenate([first, second], axis=1)
    for b in range(B):
        want = reference_model.mtp_logits(weights_of(config), config.to_dict(), ids[b])
        np.testing.assert_allclose(got[b], want, atol=TOLERANCE, rtol=0)


@pytest.mark.fast
def test_drafting_further_feeds_the_head_its_own_output():
    """Three drafts are rejected; the true states overwrite their entries, and drafting goes on."""
    sizes = CONFIG.to_dict()
    ids = random_ids(B, 12, seed=14)
    _, true, _ = decode(CONFIG, ids, init_cache(CONFIG, B, T))
    out, state, cache = run_mtp(CONFIG, true[:, :7], ids[:, 1:8], init_mtp_cache(CONFIG, B, T))
    for begin in (7, 9):  # positions below `begin` are made from the decoder's states
        out, state = out[:, -1:], state[:, -1:]
        chain = true[1, :begin]
        fed = [*ids[1, 1 : begin + 1]]
        rejected = cache
        for depth in range(3):
            token = out.argmax(axis=-1).astype(np.int32)
            chain = np.concatenate([chain, state[1]])
            fed.append(int(token[1, 0]))
            out, state, rejected = run_mtp(CONFIG, state, token, rejected, begin + depth)
            want = reference_model.mtp_hidden(weights_of(CONFIG), sizes, chain, fed)[-1]
            np.testing.assert_allclose(state[1, 0], want, atol=TOLERANCE, rtol=0)
        out, state, cache = run_mtp(CONFIG, true[:, 7:9], ids[:, 8:10], rejected, 7)


def test_mtp_prefill_equals_mtp_forward_in_its_slot():
    params, ids = params_of(CONFIG), random_ids(9, seed=15)
    hidden, _ = run_prefill(params, CONFIG, bucket(ids), 0, 9, 1, init_cache(CONFIG, B, T))
    hidden = np.asarray(hidden)[:9]
    cache = init_mtp_cache(CONFIG, B, T)
    next_ids = np.append(ids[1:], 3).astype(np.int32)
    got = []
    for start, end in ((0, 5), (5, 9)):
        chunk = bucket(hidden[start:end]), bucket(next_ids[start:end])
        out, cache = run_mtp_prefill(params, CONFIG, *chunk, start, end - start, 1, cache)
        got.append(np.asarray(out)[: end - start])
    want = reference_model.mtp_hidden(weights_of(CONFIG), CONFIG.to_dict(), hidden, next_ids)
    np.testing.assert_allclose(np.concatenate(got), want, atol=TOLERANCE, rtol=0)
    k = np.asarray(cache.k)
    assert (k[:, 0] == 0).all()
    assert (k[:, 1, :9] != 0).any(axis=(0, 2, 3)).all()


# Refusals --------------------------------------------------------------------------------------


@pytest.mark.fast
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers must be a positive integer, not 0"),
        ({"vocab_size": 32.0}, "vocab_size must be a positive integer"),
        ({"hidden_size": True}, "hidden_size must be a positive integer"),
        ({"num_kv_heads": 3}, "num_kv_heads=3 must divide num_heads=4"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"rope_theta": 0.0}, "rope_theta must be positive"),
        ({"norm_eps": float("nan")}, "norm_eps must be positive"),
        ({"num_mtp_layers": 2}, "num_mtp_layers must be 0 or 1, not 2"),
        ({"dtype": "int8"}, "dtype must be one of float32, bfloat16, float16, not 'int8'"),
    ],
)
def test_configurations_that_cannot_be_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.tiny(**change)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("ntk", 2.0), "rope scaling must be one of linear, llama3, yarn, not 'ntk'"),
        (("yarn", 2.0, 1.0, 32.0, 64, 0.0), "attention_factor must be positive and finite, not 0"),
        (("linear", 2.0, 1.0, 4.0, 8192, 1.5), "attention_factor and truncate are yarn's, not li"),
        (("linear", 0.5), "factor must be at least 1, not 0.5"),
        (("llama3", 8.0, 4.0, 4.0), "0 < low_frequency_factor < high_frequency_factor"),
        (("llama3", 8.0, 1.0, 4.0, 0), "original_length must be positive, not 0"),
    ],
)
def test_rope_scalings_that_cannot_be_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        RopeScaling(*values)


def test_shapes_that_do_not_fit_are_refused():
    params, cache, mtp_cache = (
        params_of(CONFIG), init_cache(CONFIG, B, T), init_mtp_cache(CONFIG, B, T)
    )  # fmt: skip
    forward, mtp_forward, run = map(as_users_run, (llama.forward, mtp.mtp_forward, prefill.prefill))
    ids = random_ids(B, 2)
    with pytest.raises(ValueError, match=r"tokens and positions must both be \[B, S\]"):
        forward(params, CONFIG, ids, span(0, 3), cache)
    with pytest.raises(ValueError, match="the cache must be"):
        forward(params, CONFIG, ids[:2], span(0, 2)[:2], cache)
    with pytest.raises(ValueError, match="the cache must be"):  # the MTP head's cache
        forward(params, CONFIG, ids, span(0, 2), mtp_cache)
    with pytest.raises(ValueError, match=r"hidden must be \[B, S, E\]"):
        mtp_forward(params, CONFIG, np.zeros((B, 2, 15)), ids, span(0, 2), mtp_cache)
    with pytest.raises(ValueError, match=r"chunk must be \[P\]"):
        run(params, CONFIG, ids, 0, 2, 0, cache)
    with pytest.raises(ValueError, match="at least one slot"):
        init_cache(CONFIG, 0, T)


def test_a_model_without_mtp_head_says_so():
    config = ModelConfig.tiny(V, num_mtp_layers=0)
    params = params_of(config)
    assert params.mtp is None
    with pytest.raises(ValueError, match="no MTP head"):
        init_mtp_cache(config, B, T)
    hidden, ids = jnp.zeros((B, 1, config.hidden_size)), jnp.zeros((B, 1), jnp.int32)
    with pytest.raises(ValueError, match="no MTP head"):
        mtp.mtp_forward(params, config, hidden, ids, ids, init_cache(config, B, T))


@pytest.mark.fast
def test_a_configuration_survives_json():
    for config in SHAPES.values():
        assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(TypeError, match="num_shared_experts"):
        ModelConfig.from_dict(CONFIG.to_dict() | {"num_shared_experts": 8})


def test_initial_weights():
    for config in SHAPES.values():
        shapes = jax.eval_shape(lambda config=config: init_params(config, jax.random.key(0)))
        assert sum(x.size for x in jax.tree.leaves(shapes)) == config.num_parameters
    config = dataclasses.replace(CONFIG, hidden_size=64)
    init = quick_compile.jit(init_params, static_argnums=0)
    params, again, other = (init(config, jax.random.key(seed)) for seed in (3, 3, 4))
    jax.tree.map(np.testing.assert_array_equal, params, again)
    assert np.abs(np.asarray(params.embedding) - np.asarray(other.embedding)).max() > 0.1
    np.testing.assert_allclose(np.std(params.layers.query), 64**-0.5, rtol=0.1)
    np.testing.assert_allclose(np.std(params.layers.down), (24 * 2 * 2) ** -0.5, rtol=0.1)
    assert (np.asarray(params.layers.mlp_norm) == 1).all()
