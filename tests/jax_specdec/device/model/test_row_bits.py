"""Rows have bits of their own at widths on both sides of what XLA decides by; a worker looks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.device.model import own_model, row_bits
from jax_specdec.device.model.arithmetic import rms_norm, sum_by_halves
from jax_specdec.device.model.params import init_params
from tests.support import quick_compile

LENGTH = 200


@functools.cache
def decoder(hidden, heads, dtype="float32", **changes):
    """A model in tiles of 32 rows and in smaller ones."""
    sizes = {"hidden_size": hidden, "num_heads": heads, "num_kv_heads": max(1, heads // 2)}
    sizes |= {"head_dim": 16, "intermediate_size": 2 * hidden, "num_mtp_layers": 0}
    config = own_model.in_tiles(ModelConfig.tiny(64, dtype=dtype, **sizes, **changes), 32)
    return init_params(config, jax.random.key(0)), config


@pytest.fixture(autouse=True)
def programs_are_those_of_users(monkeypatch):
    step = row_bits.run_step.__wrapped__
    monkeypatch.setattr(row_bits, "run_step", quick_compile.as_users(step, static_argnums=1))


@pytest.mark.parametrize("width", [16, 96, 100, 128, 200, 384, 512, 1024])
def test_norms_have_the_same_bits_beside_any_rows(width):
    rows = np.random.default_rng(width).normal(size=(40, width)).astype(np.float32)
    weight = np.ones(width, np.float32)
    norm = quick_compile.as_users(functools.partial(rms_norm, eps=1e-6, in_one_order=True))
    expected = np.asarray(norm(rows, weight))
    for count in (1, 3, 8, 16, 24, 32):
        np.testing.assert_array_equal(norm(rows[-count:], weight), expected[-count:])
    exact = rows / np.sqrt((rows.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(expected, exact, rtol=1e-6)


def test_sums_by_halves_add_every_number_once():
    for width in (1, 2, 3, 7, 96, 100):
        x = np.arange(3 * width, dtype=np.float32).reshape(3, width)
        np.testing.assert_array_equal(sum_by_halves(jnp.asarray(x))[:, 0], x.sum(axis=1))


@functools.cache
def differing_sizes(hidden, heads, dtype, slots):
    """How a model that was looked at gives other bits in sizes that the look had not."""
    params, config = decoder(hidden, heads, dtype)
    looked = row_bits.with_bits_of_their_own(params, config, slots, 4, LENGTH)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, 64), jnp.int32)
    expected = row_bits.row_bits_of(params, dataclasses.replace(looked, row_step=None), tokens, 64)
    sizes = (1, 5), (1, 13), (1, 40), (slots, 1), (slots, 3)
    return [
        (count, size)
        for count, size in sizes
        if (row_bits.row_bits_of(params, looked, tokens, size, count) != expected).any()
    ]


@pytest.mark.long
def test_a_model_that_was_looked_at_has_the_same_bits():
    assert differing_sizes(128, 4, "float32", 2) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("hidden", "heads", "slots"),
    [
        (16, 1, 1), (32, 2, 8), (64, 4, 2), (96, 6, 4), (128, 8, 4), (256, 1, 8),
        (256, 16, 3), (384, 4, 8), (512, 8, 5), (576, 9, 8), (768, 12, 2), (1024, 16, 8),
    ],
)  # fmt: skip
def test_a_wide_matrix_of_models_has_the_same_bits(hidden, heads, slots, dtype):
    assert differing_sizes(hidden, heads, dtype, slots) == []


def leaky(differs):
    """Rows of a model whose bits differ where `differs(model, size)`."""

    def rows_of(params, model, tokens, size, slots=1):
        return np.full((slots, len(tokens), 2), bool(differs(model, size)), np.uint32)

    return rows_of


def test_other_bits_of_small_tiles_make_them_whole(monkeypatch):
    params, config = decoder(16, 2)
    monkeypatch.setattr(
        row_bits, "row_bits_of", leaky(lambda model, size: model.row_step and size < 9)
    )
    looked = row_bits.with_bits_of_their_own(params, config, 4, 3, LENGTH)
    assert looked == dataclasses.replace(config, row_step=None)


def test_other_bits_of_whole_tiles_are_refused_by_name(monkeypatch):
    params, config = decoder(16, 2)
    monkeypatch.setattr(row_bits, "row_bits_of", leaky(lambda model, size: size == 3))
    with pytest.raises(ValueError, match="other bits in steps of 4 slots x 3 than in one of 64"):
        row_bits.with_bits_of_their_own(params, config, 4, 3, LENGTH)


def test_a_look_computes_layers_of_both_kinds():
    params, config = decoder(16, 2, sliding_window=8, num_layers=4, sliding_layers=(2, 3))
    small_params, small = row_bits.first_layers(params, config)
    assert (small.num_layers, small.sliding_layers) == (2, (1,))
    np.testing.assert_array_equal(small_params.layers.query, params.layers.query[np.array([0, 2])])
