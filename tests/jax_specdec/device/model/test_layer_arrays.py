"""A CPU's decoder with an array for each layer's matrix: the same numbers, and no copy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.device.model import llama
from jax_specdec.device.model.arithmetic import weight_product
from jax_specdec.device.model.layer_arrays import MATRICES, with_array_a_layer
from jax_specdec.device.model.layer_weights import ArrayALayer, OfLayer
from jax_specdec.device.model.own_model import in_tiles
from jax_specdec.device.model.params import init_cache, init_params
from tests.support import hf_files

V, T = 32, 24
PLAIN = ModelConfig.tiny(V, num_layers=3, num_mtp_layers=0)
SHAPES = {
    "plain": PLAIN,
    "every bias and norm": ModelConfig.tiny(
        V, num_mtp_layers=0, qk_norm=True, qkv_bias=True, output_bias=True, tie_embeddings=False
    ),
    "an MTP head": ModelConfig.tiny(V, num_mtp_layers=1),
    "experts": ModelConfig.tiny(V, num_mtp_layers=0, num_experts=5, experts_per_token=2),
    "some layers slide": ModelConfig.tiny(
        V, num_mtp_layers=0, num_layers=3, sliding_window=4, sliding_layers=(0, 2)
    ),
    "bfloat16": ModelConfig.tiny(V, num_mtp_layers=0, dtype="bfloat16"),
    "tiles": in_tiles(PLAIN, 8),
}


def run(config, params, slots, positions):
    """Logits of a prompt's rows and of the next ones, and the cache."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, V, (slots, positions), np.int32))
    places = jnp.tile(jnp.arange(positions, dtype=jnp.int32), (slots, 1))

    @jax.jit
    def steps(params, tokens, places, cache):
        for places_of_step in (places, places + positions):
            hidden, cache = llama.forward(params, config, tokens, places_of_step, cache)
        return llama.logits(params, config, hidden), cache

    return steps(params, tokens, places, init_cache(config, slots, T))


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("slots", "positions"), [(1, 1), (3, 4)])
def test_layers_of_arrays_have_the_same_logits(shape, slots, positions):
    config = SHAPES[shape]
    params = hf_files.random_params(config)
    arrays = with_array_a_layer(params)
    expected, actual = (run(config, x, slots, positions) for x in (params, arrays))
    tolerance = 2e-2 if config.dtype == "bfloat16" else 2e-5
    for x, y in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        np.testing.assert_allclose(np.float32(y), np.float32(x), atol=tolerance, rtol=0)
    chosen = {name: getattr(arrays.layers, name) for name in MATRICES}
    assert all(len(x.arrays) == config.num_layers for x in chosen.values())
    assert isinstance(arrays.layers.attention_norm, jax.Array)


def copies(params):
    """Instructions of a compiled step that make a whole matrix of a layer."""
    tokens, cache = jnp.zeros((2, 1), jnp.int32), init_cache(PLAIN, 2, T)
    step = jax.jit(llama.forward, static_argnums=1)
    text = step.lower(params, PLAIN, tokens, tokens, cache).compile().as_text()
    e, f = PLAIN.hidden_size, PLAIN.intermediate_size
    shapes = [f"f32[{lead}{a},{b}]" for lead in ("", "1,") for a, b in ((e, f), (f, e))]
    made = [line.split(" = ")[1] for line in text.splitlines() if " = " in line]
    return [
        line
        for line in made
        if line.startswith(tuple(shapes))
        and not any(word in line for word in (" parameter(", " get-tuple-element(", " bitcast("))
    ]


def test_no_matrix_of_a_layer_is_copied_before_its_product():
    params = init_params(PLAIN, jax.random.key(0))
    assert copies(params)  # the stack's are
    assert copies(with_array_a_layer(params)) == []


def test_arrays_are_views_and_stay_as_they_are():
    params = init_params(ModelConfig.tiny(V, hidden_size=64, head_dim=16), jax.random.key(0))
    arrays = with_array_a_layer(params)
    stack = np.asarray(params.layers.gate)
    for layer, array in enumerate(arrays.layers.gate.arrays):
        assert np.shares_memory(np.asarray(array), stack[layer])
    again = with_array_a_layer(arrays)
    assert again.layers.gate.arrays[0] is arrays.layers.gate.arrays[0]


def test_shapes_alone_have_shapes():
    """Programs are compiled from them, while weights are read."""
    params = init_params(PLAIN, jax.random.key(0))
    shapes = jax.eval_shape(lambda: init_params(PLAIN, jax.random.key(0)))
    expected = jax.tree.map(lambda x: (x.shape, x.dtype), with_array_a_layer(params))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), with_array_a_layer(shapes)) == expected


def test_a_draft_models_layers_are_arrays_too():
    params = init_params(PLAIN, jax.random.key(0))
    both = with_array_a_layer(params.__class__(**{**vars(params), "draft": params}))
    assert isinstance(both.draft.layers.gate, ArrayALayer)


def test_a_product_takes_the_weight_of_its_layer():
    weights = tuple(jnp.full((2, 3), x, jnp.float32) for x in (1, 2, 3))
    x = jnp.ones((4, 2), jnp.float32)

    @jax.jit
    def call(layer):
        return weight_product("rn,nm->rm", x, OfLayer(weights, layer))

    for layer in range(3):
        np.testing.assert_array_equal(call(jnp.int32(layer)), np.full((4, 3), 2 * (layer + 1)))
