"""Checkpoints come back as they were written, and errors name what is wrong with a file."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jax_specdec.checkpoint.model_config import CheckpointError, ModelConfig
from jax_specdec.device.model import llama
from jax_specdec.device.model.checkpoint import (
    load_checkpoint,
    load_model,
    save_checkpoint,
    tiny_weights_path,
)
from jax_specdec.device.model.hf_weights import cache_bytes
from jax_specdec.device.model.memory import InsufficientMemory
from jax_specdec.device.model.params import init_cache, named_arrays
from tests.support import hf_files, quick_compile, reference_model

CONFIG = ModelConfig.tiny(32, tie_embeddings=False, norm_eps=3e-6)


@pytest.fixture(scope="module")
def params():
    return hf_files.random_params(CONFIG)


@pytest.fixture
def file(params, tmp_path):
    path = tmp_path / "model.safetensors"
    save_checkpoint(path, params, CONFIG, metadata={"note": "hello"})
    return path


def rewrite(path, change, **metadata):
    """Write a checkpoint again with other tensors or metadata."""
    with safe_open(path, framework="numpy") as opened:
        kept = dict(opened.metadata())
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, kept | metadata)


def test_round_trip(params, file):
    loaded, config, metadata = load_checkpoint(file)
    assert config == CONFIG
    assert metadata["note"] == "hello"
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
def test_stored_in_16_bits_computed_in_32(params, tmp_path, storage):
    path = tmp_path / "small.safetensors"
    save_checkpoint(path, params, CONFIG, storage_dtype=storage)
    assert path.stat().st_size < 2 * CONFIG.num_parameters + 4000
    loaded, _, _ = load_checkpoint(path)
    dtype = jnp.dtype(storage)
    rounded = jax.tree.map(lambda x: np.asarray(x).astype(dtype).astype(np.float32), params)
    jax.tree.map(np.testing.assert_array_equal, loaded, rounded)


def test_another_type_to_compute_in(file):
    loaded, config, _ = load_checkpoint(file, dtype="bfloat16")
    assert config == dataclasses.replace(CONFIG, dtype="bfloat16")
    assert {x.dtype for x in jax.tree.leaves(loaded)} == {jnp.dtype("bfloat16")}


def test_names_are_paths(params):
    names = list(named_arrays(params))
    assert {"embedding", "head", "layers.query", "mtp.projection", "mtp.layers.down"} < set(names)
    assert len(names) == len(jax.tree.leaves(params))


def test_wrong_files_are_refused(file, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*nowhere"):
        load_checkpoint(tmp_path / "nowhere")
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match="damaged"):
        load_checkpoint(file)
    file.write_bytes(b"not a checkpoint at all")
    with pytest.raises(CheckpointError, match="damaged"):
        load_checkpoint(file)
    save_file({"x": np.zeros(3, np.float32)}, file)
    with pytest.raises(CheckpointError, match="has format None"):
        load_checkpoint(file)


def test_tensors_that_do_not_fit_are_named(file):
    rewrite(file, lambda tensors: tensors.update(final_norm=np.ones(17, np.float32)))
    with pytest.raises(CheckpointError, match=r"final_norm has shape \(17,\).*wants \(16,\)"):
        load_checkpoint(file)
    rewrite(file, lambda tensors: tensors.pop("layers.up"))
    with pytest.raises(CheckpointError, match=r"lacks \['layers.up'\]"):
        load_checkpoint(file)


@pytest.mark.parametrize("config", ["{", "{}", json.dumps(CONFIG.to_dict() | {"num_layers": -1})])
def test_configurations_that_cannot_be_are_named(file, config):
    rewrite(file, lambda tensors: None, config=config)
    with pytest.raises(CheckpointError, match="no valid configuration"):
        load_checkpoint(file)


def test_reserved_metadata_is_refused(params, tmp_path):
    with pytest.raises(ValueError, match=r"\['config'\] are written by save_checkpoint"):
        save_checkpoint(tmp_path / "x", params, CONFIG, metadata={"config": "{}"})


def test_caches_that_do_not_fit_are_refused_before_they_are_made(file, monkeypatch):
    """The weights are in memory already: the free memory must hold the caches."""
    _, config = load_model(file)
    just_enough = cache_bytes(config, 4, 100)
    monkeypatch.setattr("jax_specdec.device.model.checkpoint.available_bytes", lambda: just_enough)
    assert load_model(file, num_slots=4, max_length=100)[1] == config
    with pytest.raises(InsufficientMemory, match="fewer slots or a smaller max_length"):
        load_model(file, num_slots=4, max_length=101)


def test_how_many_tensors_are_there_is_told(file):
    told = []
    params, _ = load_model(file, tell=lambda *counts: told.append(counts))
    count = len(jax.tree.leaves(params))
    assert told == [(number, count) for number in range(count + 1)]


def test_shipped_weights():
    path = tiny_weights_path()
    assert path.stat().st_size <= 4 * 2**20
    params, config, metadata = load_checkpoint(path)
    assert config.dtype == "float32"
    assert config.num_mtp_layers == 1
    held_out = json.loads(metadata["held_out"])
    assert held_out["mtp_acceptance"] >= 0.4
    assert held_out["decoder_loss"] < 1.7  # nats a byte; a uniform guess has ln 256 = 5.5
    text = b"import os\nimport sys\n\ndef __init__(self, name=None):\n        self."
    ids = np.frombuffer(text, np.uint8).astype(np.int32)[None]
    positions = np.arange(ids.shape[1], dtype=np.int32)[None]

    def logprobs(params, ids, positions):
        cache = init_cache(config, 1, ids.shape[1])
        hidden, _ = llama.forward(params, config, ids, positions, cache)
        return jax.nn.log_softmax(llama.logits(params, config, hidden[0]))

    got = np.asarray(quick_compile.jit(logprobs)(params, ids, positions))
    weights = {name: np.asarray(x) for name, x in named_arrays(params).items()}
    want = reference_model.logprobs(weights, config.to_dict(), ids[0])
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=0)
    guesses = np.argmax(got, axis=-1)
    assert (guesses[:-1] == ids[0, 1:]).mean() > 0.5
    s = text.index(b"self.")
    assert bytes(guesses[s : s + 3].astype(np.uint8)) == b"elf"
