"""MiMo's own MTP head, from files with its names, against its modelling code in float64 NumPy.

The reference: https://github.com/XiaomiMiMo/MiMo, modeling_mimo.py (Qwen2's layers, and
`MiMoMTPLayers`); and vLLM's mimo.py and mimo_mtp.py, also by Xiaomi, for what the head is fed:
hidden states before the decoder's final norm, and embeddings of the next tokens. It reads the
tensors by their names in the file.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jax_specdec.device.model import llama, mtp
from jax_specdec.device.model.checkpoint import load_model
from jax_specdec.device.model.params import init_cache, init_mtp_cache
from tests.support import hf_files, quick_compile, reference_model

TOLERANCE = 1e-4
CONFIG = hf_files.CONFIGS["mimo"]
SIZES = CONFIG.to_dict()
IDS = np.random.default_rng(3).integers(0, CONFIG.vocab_size, 11).astype(np.int32)
LAYER = {
    "attention_norm": "input_layernorm.weight", "mlp_norm": "post_attention_layernorm.weight",
    "query": "self_attn.q_proj.weight", "query_bias": "self_attn.q_proj.bias",
    "key": "self_attn.k_proj.weight", "key_bias": "self_attn.k_proj.bias",
    "value": "self_attn.v_proj.weight", "value_bias": "self_attn.v_proj.bias",
    "output": "self_attn.o_proj.weight", "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight", "down": "mlp.down_proj.weight",
}  # fmt: skip
HEAD = {
    "hidden_norm": "hidden_layernorm.weight", "token_norm": "token_layernorm.weight",
    "projection": "input_proj.weight", "final_norm": "final_layernorm.weight",
}  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return hf_files.write(tmp_path_factory.mktemp("mimo"), CONFIG)


@pytest.fixture(scope="module")
def weights(directory):
    """By the names of `reference_model`."""
    tensors = load_file(directory / "model.safetensors")
    get = {name: value.astype(np.float64).T for name, value in tensors.items()}
    layers, head = range(CONFIG.num_layers), "model.mtp_layers.0"
    return {
        "embedding": get["model.embed_tokens.weight"].T,
        "final_norm": get["model.norm.weight"],
        "head": get["lm_head.weight"],
        **{f"layers.{leaf}": np.stack([get[f"model.layers.{at}.{name}"] for at in layers])
           for leaf, name in LAYER.items()},
        **{f"mtp.layers.{leaf}": get[f"{head}.{name}"][None] for leaf, name in LAYER.items()},
        **{f"mtp.{leaf}": get[f"{head}.{name}"] for leaf, name in HEAD.items()},
    }  # fmt: skip


def body_of(weights, ids):
    """The hidden states before the final norm, and behind it."""
    x = weights["embedding"][ids]
    for index in range(CONFIG.num_layers):
        x = reference_model._layer(weights, "layers.", index, SIZES, x)
    return x, reference_model.hidden_states(weights, SIZES, ids)


@pytest.mark.fast
def test_decoder_and_head_agree_with_the_reference(directory, weights):
    params, config = load_model(directory)
    assert config == CONFIG

    @quick_compile.jit
    def run(ids, rows):
        hidden, _ = llama.forward(params, config, ids, rows, init_cache(config, 1, 16))
        out, _ = mtp.mtp_forward(
            params, config, hidden[:, :-1], ids[:, 1:], rows[:, :-1], init_mtp_cache(config, 1, 16)
        )
        return llama.logits(params, config, hidden)[0], llama.project(params, config, out)[0]

    rows = jnp.arange(len(IDS), dtype=jnp.int32)[None]
    target, drafts = map(np.asarray, run(jnp.asarray(IDS)[None], rows))
    want = reference_model.logits(weights, SIZES, IDS)
    np.testing.assert_allclose(target, want, atol=TOLERANCE, rtol=0)
    body, normed = body_of(weights, IDS)

    def said(hidden, next_ids):
        return reference_model.mtp_hidden(weights, SIZES, hidden, next_ids) @ weights["head"]

    want = said(body[:-1], IDS[1:])
    np.testing.assert_allclose(drafts, want, atol=TOLERANCE, rtol=0)
    # Negative controls: what the head would say if it were fed otherwise.
    for fed, tokens in ((normed[:-1], IDS[1:]), (body[:-1], IDS[:-1])):
        assert np.abs(said(fed, tokens) - want).max() > 100 * TOLERANCE
