"""Files of Hugging Face checkpoints: what is missing, damaged or does not fit is named."""

import json

import numpy as np
import pytest

from jax_specdec.checkpoint.hf_names import open_model
from jax_specdec.checkpoint.model_config import CheckpointError
from tests.support import hf_files

pytestmark = pytest.mark.fast

CONFIG = hf_files.CONFIGS["llama"]


def test_files_that_are_missing_or_damaged_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no config.json: name a directory"):
        open_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json is not JSON"):
        open_model(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config.json holds a list"):
        open_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(hf_files.hf_fields(CONFIG)))
    with pytest.raises(FileNotFoundError, match=r"neither model.safetensors nor model.safet"):
        open_model(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"pytorch_model.bin is a pickle file"):
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
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    weight_map["model.norm.weight"] = next(
        file for file in set(weight_map.values()) if file != weight_map["model.norm.weight"]
    )
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"lacks model.norm.weight, which .*index.json says"):
        open_model(tmp_path)
    index.write_text(json.dumps({"weight_map": {"x": "../../etc/passwd"}}))
    with pytest.raises(CheckpointError, match="not a plain file name"):
        open_model(tmp_path)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="has no weight_map"):
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
