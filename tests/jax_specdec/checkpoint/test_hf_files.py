"""Files of Hugging Face checkpoints: what is missing, damaged or does not fit is named."""

import json

import numpy as np
import pytest

from jax_specdec.checkpoint.hf_names import open_model
from jax_specdec.checkpoint.model_config import CheckpointError
from tests.support import hf_files

CONFIG = hf_files.CONFIGS["llama"]


def test_files_that_are_missing_or_damaged_are_named(tmp_path):
    for name, content, error, said in (
        ("x", b"", FileNotFoundError, "has no config.json: name a directory"),
        ("config.json", b"{", CheckpointError, "config.json is not JSON"),
        ("config.json", b"[]", CheckpointError, "config.json holds a list"),
        ("config.json", json.dumps(hf_files.hf_fields(CONFIG)).encode(), FileNotFoundError,
         "neither model.safetensors nor model.safet"),
        ("pytorch_model.bin", b"", FileNotFoundError, "pytorch_model.bin is a pickle file"),
    ):  # fmt: skip
        (tmp_path / name).write_bytes(content)
        with pytest.raises(error, match=said):
            open_model(tmp_path)


def test_a_shard_that_is_missing_or_cut_off_is_named(tmp_path):
    hf_files.write(tmp_path, CONFIG, shards=3)
    shard = tmp_path / "model-00002-of-00003.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-10])
    with pytest.raises(CheckpointError, match=r"00002-of-00003.safetensors .* is cut off, damaged"):
        open_model(tmp_path)
    shard.unlink()
    message = r"00002-of-00003.safetensors is missing; it should hold model.* and \d+ more tensors"
    with pytest.raises(FileNotFoundError, match=message):
        open_model(tmp_path)


def test_an_index_that_does_not_fit_is_named(tmp_path):
    hf_files.write(tmp_path, CONFIG, shards=2)
    index, norm = tmp_path / "model.safetensors.index.json", "model.norm.weight"
    weight_map = json.loads(index.read_text())["weight_map"]
    other = next(file for file in weight_map.values() if file != weight_map[norm])
    for content, said in (
        ({"weight_map": weight_map | {norm: other}}, f"lacks {norm}, which .*index.json says"),
        ({"weight_map": {"x": "../../etc/passwd"}}, "not a plain file name"),
        ({}, "has no weight_map"),
    ):
        index.write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=said):
            open_model(tmp_path)


def test_tensors_that_do_not_fit_are_named(tmp_path):
    good = hf_files.hf_tensors(CONFIG, hf_files.random_params(CONFIG))
    name = "model.layers.1.mlp.up_proj.weight"

    def refused(message, **changes):
        tensors = {key: value for key, value in (good | changes).items() if value is not None}
        hf_files.write(tmp_path, CONFIG, tensors=tensors)
        with pytest.raises(CheckpointError, match=message):
            open_model(tmp_path)

    refused(r"it lacks model.layers.1.mlp.up_proj.weight \[24, 16\]$", **{name: None})
    refused(r"\[24, 16\] and 1 more tensors", **{name: None, "model.norm.weight": None})
    refused(
        r"model.safetensors: model.layers.1.mlp.up_proj.weight has shape \[16, 24\], but "
        r"config.json wants \[24, 16\]",
        **{name: good[name].T.copy()},
    )
    refused(
        r"model.layers.0.self_attn.q_proj.bias has no place in a LlamaForCausalLM",
        **{"model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32)},
    )
    refused(r"up_proj.weight is stored as I8; supported", **{name: good[name].astype(np.int8)})
