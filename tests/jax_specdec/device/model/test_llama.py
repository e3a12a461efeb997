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
from jax_specdec.checkpoint.rope_scaling import RopeScaling, yarn_attention_factor
from jax_specdec.device.model import experts, llama, mtp, prefill
from jax_specdec.device.model.params import (
    KVCache,
    init_cache,
    init_mtp_cache,
    init_params,
    named_arrays,
)
from tests.support import hf_files, quick_compile, reference_model
from tests.support.shape_checks import as_users_run

close = functools.partial(np.testing.assert_allclose, atol=1e-4, rtol=0)
B, T, V = 3, 24, 32
S = 4  # rows of a step: nearly all tests share this shape, and so one program a configuration
CONFIG = ModelConfig.tiny(V)
# Wavelengths of 6 to 630 positions: one frequency is kept, one blended, two are slowed.
LLAMA3 = RopeScaling("llama3", 8.0, original_length=60)
YARN = RopeScaling("yarn", 4.0, 0.25, 8.0, 64, attention_factor=1.25)  # as above
SHAPES = {
    "tied": CONFIG,
    "untied, one kv head, three layers, Qwen2's biases, stretched": ModelConfig.tiny(
        V, tie_embeddings=False, num_kv_heads=1, num_layers=3, qkv_bias=True, rope_theta=500.0,
        rope_scaling=LLAMA3,
    ),
    "no grouping, normed heads, every bias (Qwen3), stretched evenly": ModelConfig.tiny(
        V, num_kv_heads=4, qk_norm=True, qkv_bias=True, output_bias=True,
        rope_scaling=RopeScaling("linear", 4.0),
    ),
    "all layers slide, yarn": ModelConfig.tiny(
        V, num_mtp_layers=0, sliding_window=5, sliding_layers=(0, 1), rope_theta=500.0,
        rope_scaling=YARN,
    ),
    "some layers slide, all of Gemma, yarn": ModelConfig.tiny(
        V, num_mtp_layers=0, num_layers=3, sliding_window=4, sliding_layers=(0, 2), qk_norm=True,
        rope_theta=500.0, sliding_rope_theta=50.0, attention_softcap=1.5, logit_softcap=2.0,
        rope_scaling=YARN, **hf_files.GEMMA,
    ),
    "experts": ModelConfig.tiny(
        V, num_mtp_layers=0, num_experts=5, experts_per_token=2, renormalize_experts=False
    ),
}  # fmt: skip
params_of = functools.cache(hf_files.random_params)


def weights_of(config):
    return {name: np.asarray(x) for name, x in named_arrays(params_of(config)).items()}


def random_ids(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, V, shape).astype(np.int32)


def expected(config, ids):
    return reference_model.logits(weights_of(config), config.to_dict(), ids)


@functools.partial(quick_compile.jit, static_argnums=1)
def step(params, config, tokens, positions, cache, hidden=None):
    """Logits [B, S, V], hidden states [B, S, E] and the cache; with `hidden`, of the MTP head."""
    if hidden is None:
        out, cache = llama.forward(params, config, tokens, positions, cache)
    else:
        out, cache = mtp.mtp_forward(params, config, hidden, tokens, positions, cache)
    return llama.logits(params, config, out), out, cache


def span(first, size):
    return np.tile(np.arange(first, first + size, dtype=np.int32), (B, 1))


def decode(config, ids, cache, first=0, *, hidden=None):
    """Logits [B, N, V] and hidden states of ids [B, N] from position `first` on, and the cache.

    They go through in steps of S rows; the last one may end in padding. With `hidden`
    [B, N, E], through the MTP head.
    """
    out, states = [], []
    for at in range(0, ids.shape[1], S):
        here = ids[:, at : at + S]
        tokens, positions = np.zeros((B, S), np.int32), np.full((B, S), -1, np.int32)
        tokens[:, : here.shape[1]] = here
        positions[:, : here.shape[1]] = span(first + at, here.shape[1])
        rows = hidden if hidden is None else hidden[:, at : at + S]
        if rows is not None:
            rows = np.pad(rows, ((0, 0), (0, S - rows.shape[1]), (0, 0)))
        x, h, cache = step(params_of(config), config, tokens, positions, cache, rows)
        out.append(x)
        states.append(h)
    return *(np.concatenate(x, axis=1)[:, : ids.shape[1]] for x in (out, states)), cache


# Agreement with the reference ------------------------------------------------------------------


@pytest.mark.fast
@pytest.mark.parametrize("shape", SHAPES)
def test_decoder_and_head_agree_with_the_reference(shape):
    """The head's rows go through in two calls; the second finds the entries of the first."""
    config, weights, ids = SHAPES[shape], weights_of(SHAPES[shape]), random_ids(B, 14)
    sizes = config.to_dict()
    got, hidden, _ = decode(config, ids, init_cache(config, B, T))
    wants = [reference_model.logits(weights, sizes, row) for row in ids]
    assert np.std(wants) > 0.3  # not a constant
    close(got, wants)
    if config.num_mtp_layers:
        cache = init_mtp_cache(config, B, T)
        first, _, cache = decode(config, ids[:, 1:7], cache, hidden=hidden[:, :6])
        second, _, _ = decode(config, ids[:, 7:], cache, 6, hidden=hidden[:, 6:13])
        wants = [reference_model.mtp_logits(weights, sizes, row) for row in ids]
        close(np.concatenate([first, second], axis=1), wants)


def test_bfloat16_is_close_and_keeps_its_type():
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    ids = random_ids(B, 9)
    out, hidden, cache = decode(config, ids, init_cache(config, B, T))
    assert out.dtype == hidden.dtype == cache.k.dtype == jnp.bfloat16
    close(np.asarray(out[0], np.float64), expected(config, ids[0]), atol=0.3)


# Parts, by hand --------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [CONFIG, SHAPES["some layers slide, all of Gemma, yarn"]])
@pytest.mark.parametrize("tile", [4, 9, 99])
def test_a_cache_in_tiles_is_the_whole_cache(tile, config):
    """Tiles that overlap at the end, rows that see nothing of some, and bits that stay."""
    rng, length = np.random.default_rng(tile), 14
    first = np.array([[0, 0, 5], [0, 0, 0]], np.int32)
    last = np.array([[0, 7, 8], [13, 3, 4]], np.int32)
    h, g, dh = config.num_heads, config.num_kv_heads, config.head_dim
    q = rng.normal(size=(2, 3, h, dh)).astype(np.float32)
    k, v = rng.normal(size=(2, 2, 4, length, g, dh)).astype(np.float32)
    k[1, 2, 9:] = np.nan  # of the slot whose rows do not see it
    place, seen = (jnp.int32(1), jnp.int32(2)), llama.Seen(first, last)
    run = quick_compile.jit(llama.cached_attention, static_argnums=(0, 5))
    got = np.asarray(run(config, q, KVCache(k, v), place, seen, tile))
    index = np.arange(length)
    visible = (index >= first[..., None]) & (index <= last[..., None])
    whole = llama.attention(*map(jnp.asarray, (q, k[1, 2:], v[1, 2:], visible)), config)
    close(got, whole)
    shorter = llama.Seen(first, np.minimum(last, [[8], [4]]))
    alone = np.asarray(run(config, q, KVCache(k, v), place, shorter, tile))
    np.testing.assert_array_equal(alone[last <= [[8], [4]]], got[last <= [[8], [4]]])


def test_yarn_by_hand():
    """Qwen2.5 with 4 times its 32768 positions: 64 pairs, base 1e6."""
    # Pair i turns 32768 / (2 pi 1e6^(i/64)) times: 32 times at i = 23.6, once at 39.65.
    assert RopeScaling("yarn", 4.0, 1.0, 32.0, 32768).yarn_bounds(1e6, 128) == (23, 40)
    factors = [yarn_attention_factor(*x) for x in ((4.0,), (40.0, 1.0, 1.0), (1.0,))]
    assert factors == pytest.approx([0.1 * np.log(4) + 1, 1, 1])


routed = quick_compile.jit(experts.routed, static_argnums=(2, 3))


def test_shares_of_experts_by_hand():
    x = np.log(np.float32([[0.5, 0.3, 0.15, 0.05], [0.1, 0.4, 0.1, 0.4]]))
    shares = functools.partial(routed, x, np.eye(4, dtype=np.float32))
    np.testing.assert_allclose(shares(2, False), [[0.5, 0.3, 0, 0], [0, 0.4, 0, 0.4]], rtol=1e-6)
    np.testing.assert_allclose(shares(2, True), [[0.625, 0.375, 0, 0], [0, 0.5, 0, 0.5]], rtol=1e-6)
    # Of equal ones, the first.
    np.testing.assert_array_equal(np.asarray(shares(3, False))[1] > 0, [True, True, False, True])


def test_an_overflow_in_an_unused_expert_stays_there():
    config = SHAPES["experts"]
    layer = jax.tree.map(lambda leaf: leaf[0], params_of(config).layers)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, 4, config.hidden_size)), jnp.float32)
    chosen = np.asarray(routed(x, layer.router, 2, False))[0, :, 3] > 0
    spoilt = dataclasses.replace(layer, gate=layer.gate.at[3].set(jnp.inf))
    run = quick_compile.jit(experts.experts, static_argnums=1)
    out, want = (np.asarray(run(one, config, x))[0] for one in (spoilt, layer))
    assert 0 < chosen.sum() < 4
    np.testing.assert_array_equal(out[~chosen], want[~chosen])
    assert not np.isfinite(out[chosen]).any()
    nan = run(layer, config, x.at[0, 0, 0].set(jnp.nan))  # and a row's own NaN shows
    assert np.isnan(nan[0]).all(axis=1).tolist() == [True, False, False, False]


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


@pytest.mark.fast
@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1))
def test_rejected_drafts_padding_and_other_slots_leave_no_trace(seed):
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
        np.testing.assert_array_equal(np.stack(got[b]), decode_plainly(tuple(ids[b])))


def test_a_nan_reaches_the_rows_that_see_it_and_no_others():
    """Slot 0 meets a NaN in row 2 of 4; then a new request takes the slot."""
    params = params_of(CONFIG)
    embedding = params.embedding.at[5].set(jnp.nan)
    spoilt = dataclasses.replace(params, embedding=embedding, head=params.embedding.T)
    ids = random_ids(B, S, seed=11)
    ids[ids == 5] = 6
    bad = ids.copy()
    bad[0, 2] = 5
    out, _, cache = step(spoilt, CONFIG, bad, span(0, S), init_cache(CONFIG, B, T))
    first = np.where(span(0, S) == 0, 0, -1).astype(np.int32)
    again, _, _ = step(spoilt, CONFIG, ids, first, cache)
    assert np.isnan(out[0, 2:]).all()
    want = [expected(CONFIG, row) for row in ids]
    close(out[0, :2], want[0][:2])
    close(out[1:], want[1:])
    close(again[0, 0], want[0][0])


def test_an_id_beyond_the_vocabulary_gives_an_invalid_row():
    tokens = np.array([[V], [V - 1], [2**31 - 1]], np.int32)
    out, _, _ = decode(CONFIG, tokens, init_cache(CONFIG, B, T))
    assert np.isnan(out).all(axis=(1, 2)).tolist() == [True, False, True]


# Prefill ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("slot", [-1, B])
def test_prefill_of_no_slot_writes_nothing(slot):
    *_, before = decode(CONFIG, random_ids(B, 8, seed=8), init_cache(CONFIG, B, T))
    run = quick_compile.jit(prefill.prefill, static_argnums=1)
    hidden, after = run(params_of(CONFIG), CONFIG, random_ids(11), 8, 11, slot, before)
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert np.isnan(hidden).all()


# Refusals --------------------------------------------------------------------------------------


MODELS = (
    ({"num_layers": 0}, "num_layers must be a positive integer, not 0"),
    ({"vocab_size": 32.0}, "vocab_size must be a positive integer"),
    ({"hidden_size": True}, "hidden_size must be a positive integer"),
    ({"num_kv_heads": 3}, "num_kv_heads=3 must divide num_heads=4"),
    ({"head_dim": 7}, "head_dim=7 must be even"),
    ({"rope_theta": 0.0}, "rope_theta must be positive"),
    ({"norm_eps": float("nan")}, "norm_eps must be positive"),
    ({"num_mtp_layers": 2}, "num_mtp_layers must be 0 or 1, not 2"),
    ({"dtype": "int8"}, "dtype must be one of float32, bfloat16, float16, not 'int8'"),
    ({"sliding_layers": (1, 0)}, r"indices below num_layers=2, not \(1, 0\)"),
    ({"sliding_layers": (2,)}, "ascending indices"),
    ({"sliding_layers": (0,)}, "a sliding_window of 1 or more, not None"),
    ({"num_experts": 4}, "4 experts need experts_per_token of 1 or more"),
    ({"num_experts": 4, "experts_per_token": 5}, "experts_per_token=5 must be from 0 to"),
    ({"activation": "relu"}, "activation must be one of silu, gelu_tanh, not 'relu'"),
    ({"logit_softcap": 0.0}, "logit_softcap must be positive and finite, or None, not 0"),
)
SCALINGS = (
    ({"kind": "ntk"}, "rope scaling must be one of linear, llama3, yarn, not 'ntk'"),
    ({"kind": "yarn", "attention_factor": 0.0}, "must be positive and finite, not 0"),
    ({"attention_factor": 1.5}, "attention_factor and truncate are yarn's, not li"),
    ({"factor": 0.5}, "factor must be at least 1, not 0.5"),
    ({"kind": "llama3", "low_frequency_factor": 4.0}, "0 < low_frequency_factor < high"),
    ({"kind": "llama3", "original_length": 0}, "original_length must be positive, not 0"),
)
scaling = functools.partial(RopeScaling, kind="linear", factor=2.0)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [*((ModelConfig.tiny, *one) for one in MODELS), *((scaling, *one) for one in SCALINGS)],
)
def test_configurations_that_cannot_be_are_refused(kind, change, message):
    with pytest.raises(ValueError, match=message):
        kind(**change)


def test_shapes_that_do_not_fit_are_refused():
    params, plain = params_of(CONFIG), ModelConfig.tiny(V, num_mtp_layers=0)
    cache, mtp_cache = init_cache(CONFIG, B, T), init_mtp_cache(CONFIG, B, T)
    ids, rows, hidden = random_ids(B, 2), span(0, 2), np.zeros((B, 2, CONFIG.hidden_size))
    forward, head = llama.forward, mtp.mtp_forward
    for function, arguments, message in (
        (forward, (params, CONFIG, ids, span(0, 3), cache), r"must both be \[B, S\]"),
        (forward, (params, CONFIG, ids[:2], rows[:2], cache), "the cache must be"),
        (forward, (params, CONFIG, ids, rows, mtp_cache), "the cache must be"),
        (head, (params, CONFIG, hidden[..., :15], ids, rows, mtp_cache), r"must be \[B, S, E\]"),
        (head, (params_of(plain), plain, hidden, ids, rows, mtp_cache), "no MTP head"),
        (prefill.prefill, (params, CONFIG, ids, 0, 2, 0, cache), r"chunk must be \[P\]"),
        (init_cache, (CONFIG, 0, T), "at least one slot"),
        (init_mtp_cache, (plain, B, T), "no MTP head"),
    ):
        with pytest.raises(ValueError, match=message):
            as_users_run(function)(*arguments)


@pytest.mark.fast
def test_a_configuration_survives_json():
    for config in SHAPES.values():
        assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(TypeError, match="num_shared_experts"):
        ModelConfig.from_dict(CONFIG.to_dict() | {"num_shared_experts": 8})


def test_initial_weights():
    llama_1b = ModelConfig(128_256, 2048, 16, 32, 8, 64, 8192)  # Llama 3.2 1B
    assert llama_1b.num_parameters == 1_235_814_400
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
