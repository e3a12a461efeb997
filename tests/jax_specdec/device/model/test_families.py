"""What Mistral, Gemma and models of experts add, against an independent float64 model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.checkpoint.rope_scaling import RopeScaling, yarn_attention_factor
from jax_specdec.device.model import experts, llama, rotary
from jax_specdec.device.model.params import init_cache, named_arrays
from tests.support import hf_files, quick_compile, reference_model

TOLERANCE = 1e-4
V, N, S = 32, 14, 7
# Of 4 pairs, the first is kept, one is blended, two are slowed.
YARN = RopeScaling("yarn", 4.0, 0.25, 8.0, 64, attention_factor=1.25)
SHAPES = {
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
NOTICED = {
    "all layers slide, yarn": [
        {"sliding_window": 4}, {"sliding_window": 6}, {"sliding_layers": (0,)},
        *({"rope_scaling": YARN.__dict__ | change} for change in (
            {"factor": 5.0}, {"low_frequency_factor": 1.0}, {"high_frequency_factor": 0.8},
            {"original_length": 200}, {"attention_factor": 1.2}, {"truncate": False},
        )),
    ],
    "some layers slide, all of Gemma, yarn": [
        {"sliding_layers": (0, 1)}, {"sliding_rope_theta": 60.0}, {"attention_softcap": 2.0},
        {"logit_softcap": 2.1}, {"activation": "silu"}, {"scale_embedding": False},
        {"post_norms": False}, {"norm_plus_one": False}, {"attention_scale": None},
    ],
    "experts": [{"experts_per_token": 3}, {"renormalize_experts": True}],
}  # fmt: skip


@functools.cache
def model(shape):
    config = SHAPES[shape]
    params = hf_files.random_params(config)
    return config, params, {name: np.asarray(x) for name, x in named_arrays(params).items()}


def ids_of(seed=0):
    return np.random.default_rng(seed).integers(0, V, N).astype(np.int32)


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_agree_with_the_reference_which_notices_each_option(shape):
    config, params, weights = model(shape)

    @quick_compile.jit
    def step(tokens, positions, cache):
        hidden, cache = llama.forward(params, config, tokens, positions, cache)
        return llama.logits(params, config, hidden), cache

    ids, cache, got = ids_of(), init_cache(config, 1, 20), []
    for at in range(0, N, S):
        rows = np.arange(at, at + S, dtype=np.int32)[None]
        out, cache = step(ids[None, at : at + S], rows, cache)
        got.append(np.asarray(out)[0])
    sizes = config.to_dict()
    want = reference_model.logits(weights, sizes, ids)
    assert want.std() > 0.3
    np.testing.assert_allclose(np.concatenate(got), want, atol=TOLERANCE, rtol=0)
    for change in NOTICED[shape]:
        other = reference_model.logits(weights, sizes | change, ids)
        assert np.abs(other - want).max() > 10 * TOLERANCE, change


def test_the_window_is_that_of_a_plain_mask():
    last, window = np.array([[0, 3, 9]], np.int32), 4
    plain = [[[0 <= row - entry < window for entry in range(10)] for row in last[0]]]
    np.testing.assert_array_equal(llama.in_window(jnp.asarray(last), 10, window), plain)
    everything = llama.in_window(jnp.asarray(last), 10, 10)
    np.testing.assert_array_equal(everything, np.arange(10) <= last[..., None])


def test_yarn_by_hand():
    """Qwen2.5 with 4 times its 32768 positions: 64 pairs, base 1e6."""
    config = ModelConfig.tiny(
        head_dim=128, rope_theta=1e6, rope_scaling=RopeScaling("yarn", 4.0, 1.0, 32.0, 32768)
    )
    # Pair i turns 32768 / (2 pi 1e6^(i/64)) times: 32 times at i = 23.6, once at 39.65.
    assert config.rope_scaling.yarn_bounds(1e6, 128) == (23, 40)
    got = np.asarray(rotary.rotary_frequencies(config), np.float64)
    plain = 1e6 ** (-np.arange(64) / 64)
    np.testing.assert_allclose(got[:24], plain[:24], rtol=1e-6)
    np.testing.assert_allclose(got[40:], plain[40:] / 4, rtol=1e-6)
    np.testing.assert_allclose(got[30], plain[30] * (10 / 17 + 7 / 17 / 4), rtol=1e-6)
    assert yarn_attention_factor(4.0) == pytest.approx(0.1 * np.log(4) + 1)
    assert yarn_attention_factor(40.0, 1.0, 1.0) == 1
    assert yarn_attention_factor(1.0) == 1


def test_shares_of_experts_by_hand():
    x = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05], [0.1, 0.4, 0.1, 0.4]]))
    shares = functools.partial(experts.routed, x, jnp.eye(4))
    np.testing.assert_allclose(shares(2, False), [[0.5, 0.3, 0, 0], [0, 0.4, 0, 0.4]], rtol=1e-6)
    np.testing.assert_allclose(shares(2, True), [[0.625, 0.375, 0, 0], [0, 0.5, 0, 0.5]], rtol=1e-6)
    # Of equal ones, the first.
    np.testing.assert_array_equal(np.asarray(shares(3, False))[1] > 0, [True, True, False, True])


def test_an_overflow_in_an_expert_that_was_not_chosen_stays_there():
    config, params, _ = model("experts")
    layer = jax.tree.map(lambda leaf: leaf[0], params.layers)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, 4, config.hidden_size)), jnp.float32)
    route = quick_compile.jit(experts.routed, static_argnums=(2, 3))
    chosen = np.asarray(route(x, layer.router, 2, False))[0] > 0
    spoilt = type(layer)(**{**layer.__dict__, "gate": layer.gate.at[3].set(jnp.inf)})
    run = quick_compile.jit(experts.experts, static_argnums=1)
    out, want = (np.asarray(run(one, config, x))[0] for one in (spoilt, layer))
    assert 0 < chosen[:, 3].sum() < 4
    np.testing.assert_array_equal(out[~chosen[:, 3]], want[~chosen[:, 3]])
    assert not np.isfinite(out[chosen[:, 3]]).any()
    nan = run(layer, config, x.at[0, 0, 0].set(jnp.nan))  # and a row's own NaN shows
    assert np.isnan(nan[0, 0]).all()
    assert np.isfinite(nan[0, 1:]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_layers": (1, 0)}, r"ascending indices below num_layers=2, not \(1, 0\)"),
        ({"sliding_layers": (2,)}, "ascending indices"),
        ({"sliding_layers": (0,)}, "a sliding_window of 1 or more, not None"),
        ({"num_experts": 4}, "4 experts need experts_per_token of 1 or more"),
        ({"num_experts": 4, "experts_per_token": 5}, "experts_per_token=5 must be from 0 to"),
        ({"activation": "relu"}, "activation must be one of silu, gelu_tanh, not 'relu'"),
        ({"logit_softcap": 0.0}, "logit_softcap must be positive and finite, or None, not 0.0"),
    ],
)
def test_options_that_cannot_be_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.tiny(**change)
