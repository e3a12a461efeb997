"""Configurations of Hugging Face checkpoints: every spelling is read, the unsupported is named."""

import dataclasses
import json

import pytest

from jax_specdec.checkpoint.hf_config import read_config
from jax_specdec.checkpoint.hf_names import open_model
from jax_specdec.checkpoint.model_config import CheckpointError
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
        ({"vocab_size": "many"}, "vocab_size must be a positive integer, not 'many'"),
        ({"num_key_value_heads": 3}, "num_kv_heads=3 must divide num_heads=4"),
    ],
)  # fmt: skip
def test_configurations_that_are_not_supported_are_named(changes, message, directory):
    change_json(directory / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        open_model(directory)


def test_a_type_that_is_not_served_is_refused(directory):
    with pytest.raises(CheckpointError, match="dtype 'int8' is not one of bfloat16, float32"):
        open_model(directory, dtype="int8")
