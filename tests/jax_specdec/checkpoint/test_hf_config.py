"""Configurations of Hugging Face checkpoints: every spelling is read, families' own fields as they
are written now and were; the unsupported is named.
"""

import dataclasses
import json

import pytest

from jax_specdec.checkpoint.hf_config import read_config
from jax_specdec.checkpoint.hf_names import open_model
from jax_specdec.checkpoint.model_config import CheckpointError
from jax_specdec.checkpoint.rope_scaling import RopeScaling
from tests.support import hf_files

CONFIG = hf_files.CONFIGS["llama"]


@pytest.fixture
def directory(tmp_path):
    return hf_files.write(tmp_path / "model", CONFIG)


def change_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_both_ways_to_write_a_configuration(tmp_path):
    """transformers 5 writes `rope_parameters` and `dtype`, earlier versions other names."""
    config = hf_files.CONFIGS["llama 3.1, tied"]
    fields = hf_files.hf_fields(config)
    rope = fields.pop("rope_scaling") | {"rope_theta": fields.pop("rope_theta")}
    new = fields | {"rope_parameters": rope, "dtype": fields.pop("torch_dtype")}
    (tmp_path / "config.json").write_text(json.dumps(new))
    assert read_config(tmp_path).model == config
    old_style = hf_files.hf_fields(config)
    old_style["rope_scaling"]["type"] = old_style["rope_scaling"].pop("rope_type")
    (tmp_path / "config.json").write_text(json.dumps(old_style))
    assert read_config(tmp_path).model == config


def test_what_config_json_may_leave_out(tmp_path):
    fields = hf_files.hf_fields(CONFIG)
    for name in ("num_key_value_heads", "head_dim", "rope_theta", "tie_word_embeddings",
                 "rms_norm_eps", "torch_dtype", "eos_token_id",
                 "max_position_embeddings"):  # fmt: skip
        del fields[name]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    found = read_config(tmp_path)
    assert found.model == dataclasses.replace(
        CONFIG, num_kv_heads=4, head_dim=4, rope_theta=10_000.0, norm_eps=1e-6
    )
    assert found.eos_token_ids == ()
    assert found.max_length is None


def test_ids_that_end_a_text(directory):
    assert read_config(directory).eos_token_ids == (2,)
    (directory / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert read_config(directory).eos_token_ids == (7, 9)
    (directory / "generation_config.json").write_text("{}")
    assert read_config(directory).eos_token_ids == (2,)
    change_json(directory / "config.json", eos_token_id="</s>")
    with pytest.raises(CheckpointError, match="eos_token_id = '</s>' is neither"):
        read_config(directory)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]},
         r"'MambaForCausalLM' is not supported; supported are LlamaForCausalLM, .*Qwen3.*Gemma3"),
        ({"architectures": None}, "architecture None is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported, only silu"),
        ({"mlp_bias": True}, "mlp_bias = True is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window = True is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types = "),
        ({"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4} is not supp"),
        ({"rope_scaling": {"type": "longrope", "factor": 4.0}},
         "type 'longrope' are not supported; supported are default, linear, llama3 and yarn"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_slower": 2}},
         "have a field beta_slower = 2, which is not known"),
        ({"rope_parameters": {"full_attention": {}}}, "a field full_attention = {}, which is not"),
        ({"rope_scaling": {"type": "linear"}}, "lacks 'factor'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
        ({"num_attention_heads": 3, "head_dim": None}, "16 is not a multiple of num_attention"),
        ({"num_hidden_layers": 2**31}, "num_hidden_layers = 2147483648 may be 65536 at most"),
        ({"num_hidden_layers": 999}, "tensors are too few for 999 layers"),
        ({"rms_norm_eps": 10**400}, "int too large"),
        ({"rope_theta": 10**400}, "int too large"),
        ({"max_position_embeddings": []}, "int.. argument must be"),
        ({"rope_scaling": "yarn"}, "rope_scaling = 'yarn' must be an object"),
        ({"vocab_size": "many"}, "vocab_size must be a positive integer, not 'many'"),
    ],
)  # fmt: skip
def test_configurations_that_are_not_supported_are_named(changes, message, directory):
    change_json(directory / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        open_model(directory)


def test_a_type_that_is_not_served_is_refused(directory):
    with pytest.raises(CheckpointError, match="dtype 'int8' is not one of bfloat16, float32"):
        open_model(directory, dtype="int8")


FULL, SLIDING = "full_attention", "sliding_attention"


def read(tmp_path, name, drop=(), **changes):
    """The configuration of a family with some fields changed or left out."""
    fields = hf_files.hf_fields(hf_files.CONFIGS[name]) | changes
    kept = {field: value for field, value in fields.items() if field not in drop}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    return read_config(tmp_path).model


def test_gemma_3_in_both_spellings(tmp_path):
    """The sizes of the pattern and both rotary bases, and what the file leaves out."""
    drop = ("layer_types", "rope_theta", "rope_local_base_freq", "head_dim", "num_key_value_heads",
            "query_pre_attn_scalar", "tie_word_embeddings", "rms_norm_eps")  # fmt: skip
    old = read(tmp_path, "gemma 3", drop, num_hidden_layers=7, sliding_window_pattern=3,
               num_attention_heads=8)  # fmt: skip
    assert old.sliding_layers == (0, 1, 3, 4, 6)
    assert (old.rope_theta, old.sliding_rope_theta) == (1e6, 1e4)
    assert (old.head_dim, old.num_kv_heads, old.attention_scale) == (256, 4, 1 / 16)
    assert old.tie_embeddings
    six = read(tmp_path, "gemma 3", drop, num_hidden_layers=7, num_attention_heads=8)
    assert six.sliding_layers == (0, 1, 2, 3, 4, 6)
    rope = {
        FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
        SLIDING: {"rope_type": "default", "rope_theta": 5e3},
    }
    new = read(tmp_path, "gemma 3", drop, rope_parameters=rope, num_attention_heads=8)
    assert (new.rope_theta, new.sliding_rope_theta) == (5e5, 5e3)
    assert new.rope_scaling == RopeScaling("linear", 8.0)


def test_which_layers_slide(tmp_path):
    def layers(name, **changes):
        found = read(tmp_path, name, **changes)
        return found.sliding_window, found.sliding_layers

    assert layers("mistral, sliding, yarn", sliding_window=None) == (None, ())
    assert read(tmp_path, "mistral, sliding, yarn", ("sliding_window",)).sliding_window == 4096
    upper = {"sliding_window": 9, "max_window_layers": 1}
    assert layers("qwen2", **upper) == (None, ())
    assert layers("qwen2", **upper, use_sliding_window=True) == (9, (1,))
    types = [SLIDING, FULL]
    assert layers("qwen2", **upper, use_sliding_window=True, layer_types=types) == (9, (0,))
    assert layers("qwen3 moe", **upper) == (None, ())
    assert layers("qwen3 moe", **upper, use_sliding_window=True) == (9, (0, 1))
    assert layers("mixtral", sliding_window=3, layer_types=[SLIDING] * 2) == (3, (0, 1))


def test_yarn_as_files_have_it(tmp_path):
    """Qwen's model cards give three fields; the paper's values are the others'."""
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    found = read(tmp_path, "qwen2", rope_scaling=rope)
    attention = found.rope_scaling.attention_factor
    assert attention == pytest.approx(1.1386294)
    assert found.rope_scaling == RopeScaling("yarn", 4.0, 1.0, 32.0, 32768, attention)
    implicit = read(tmp_path, "qwen2", rope_scaling=rope | {"factor": None},
                    max_position_embeddings=65536)  # fmt: skip
    assert implicit.rope_scaling.factor == 2


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mistral, sliding, yarn", {"layer_types": [FULL, FULL]}, "layer_types = .* is not supp"),
        ("gemma 2", {"layer_types": [FULL]}, r"it needs 3 times full_attention or sliding"),
        ("gemma 3", {"layer_types": [FULL, SLIDING, "chunked"]}, "chunked.* is not supported"),
        ("gemma 3", {"sliding_window": None}, "layer_types = .* is not supported"),
        ("gemma 3", {"attn_logit_softcapping": 50.0}, "only null with Gemma 3"),
        ("gemma 3", {"hidden_activation": "gelu"}, "only gelu_pytorch_tanh"),
        ("gemma 3", {"use_bidirectional_attention": True}, "only false"),
        ("gemma 3", {"rope_parameters": {FULL: {}, SLIDING: {"rope_type": "linear", "factor": 2}}},
         "rotary positions of sliding layers must be default, not 'linear'"),
        ("gemma 3", {"rope_parameters": {FULL: {}, "chunked": {}}}, "'chunked' are not supported"),
        ("qwen3 moe", {"mlp_only_layers": [1]}, r"mlp_only_layers = \[1\] is not supported"),
        ("qwen3 moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2 is not supported"),
        ("qwen3 moe", {"num_local_experts": 1}, "experts_per_token=2 must be from 0 to num_exp"),
        ("mimo", {"use_sliding_window": True}, "use_sliding_window = True is not supported"),
    ],
)  # fmt: skip
def test_what_a_family_does_not_have_is_named(name, changes, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, name, **changes)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("gemma 3", "model.layers.3.eh_proj.weight"),
        ("mimo", "model.mtp_layers.1.input_proj.weight"),
    ],
)
def test_heads_that_a_family_does_not_have_are_refused(name, tensor, tmp_path):
    config = hf_files.CONFIGS[name]
    tensors = hf_files.hf_tensors(config, hf_files.random_params(config))
    tensors[tensor] = tensors["model.norm.weight"]
    hf_files.write(tmp_path, config, tensors=tensors)
    with pytest.raises(CheckpointError, match=f"{tensor} has no place in a"):
        open_model(tmp_path)
