"""Checkpoints come back as they were written, and errors name what is wrong with a file."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jax_specdec.checkpoint.model_config import CheckpointError, ModelConfig, cache_bytes
from jax_specdec.device.model.checkpoint import (
    load_checkpoint,
    load_model,
    save_checkpoint,
    tiny_weights_path,
)
from jax_specdec.device.model.memory import InsufficientMemory
from jax_specdec.device.model.params import named_arrays
from tests.support import hf_files

CONFIG = ModelConfig.tiny(32, tie_embeddings=False, norm_eps=3e-6)


@pytest.fixture(scope="module")
def params():
    return hf_files.random_params(CONFIG)


@pytest.fixture
def file(params, tmp_path):
    path = tmp_path / "model.safetensors"
    save_checkpoint(path, params, CONFIG, metadata={"note": "hello"})
    return path


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("storage", [None, "float16", "bfloat16"])
def test_round_trip_in_any_type_on_disk_and_to_compute_in(params, tmp_path, storage, dtype):
    path, told = tmp_path / "x", []
    save_checkpoint(path, params, CONFIG, storage_dtype=storage, metadata={"note": "hello"})
    assert storage is None or path.stat().st_size < 2 * CONFIG.num_parameters + 4000
    loaded, config, metadata = load_checkpoint(
        path, dtype=dtype, tell=lambda *counts: told.append(counts)
    )
    assert (config, metadata["note"]) == (
        dataclasses.replace(CONFIG, dtype=dtype or "float32"), "hello",
    )  # fmt: skip
    rounded = jax.tree.map(
        lambda x: np.asarray(x).astype(jnp.dtype(storage or "float32")).astype(config.dtype), params
    )
    jax.tree.map(np.testing.assert_array_equal, loaded, rounded)
    assert {x.dtype for x in jax.tree.leaves(loaded)} == {jnp.dtype(config.dtype)}
    names = {"embedding", "head", "layers.query", "mtp.projection", "mtp.layers.down"}
    assert names < named_arrays(loaded).keys() == load_file(path).keys()
    count = len(jax.tree.leaves(params))
    assert told == [(number, count) for number in range(count + 1)]


def other_tensors(**changes):
    """A file with other tensors; None: without."""

    def write(path):
        with safe_open(path, framework="numpy") as opened:
            metadata = dict(opened.metadata())
        tensors = {k: v for k, v in (load_file(path) | changes).items() if v is not None}
        save_file(tensors, path, metadata)

    return write


def other_config(text):
    def write(path):
        save_file(load_file(path), path, {"format": "jax-specdec-1", "config": text})

    return write


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.unlink(), r"no checkpoint at .*model"),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "damaged"),
        (lambda path: path.write_bytes(b"not a checkpoint at all"), "damaged"),
        (lambda path: save_file({"x": np.zeros(3)}, path), "has format None"),
        (other_tensors(final_norm=np.ones(17, np.float32)),
         r"final_norm has shape \(17,\).*wants \(16,\)"),
        (other_tensors(**{"layers.up": None}), r"lacks \['layers.up'\]"),
        (other_tensors(final_norm=np.ones(16, np.int32)), "stored as int32, and a float type"),
        (other_config("{"), "no valid configuration"),
        (other_config("{}"), "no valid configuration"),
        (other_config(json.dumps(CONFIG.to_dict() | {"num_layers": -1})), "no valid configuration"),
    ],
)  # fmt: skip
def test_wrong_files_are_refused(file, change, message):
    change(file)
    with pytest.raises((FileNotFoundError, CheckpointError), match=message):
        load_checkpoint(file)


def test_reserved_metadata_is_refused(params, tmp_path):
    with pytest.raises(ValueError, match=r"\['config'\] are written by save_checkpoint"):
        save_checkpoint(tmp_path / "x", params, CONFIG, metadata={"config": "{}"})


def test_caches_that_do_not_fit_are_refused_before_they_are_made(file, monkeypatch):
    """The weights are in memory already: the free memory must hold the caches."""
    just_enough = cache_bytes(CONFIG, 4, 100)
    monkeypatch.setattr("jax_specdec.device.model.checkpoint.available_bytes", lambda: just_enough)
    assert load_model(file, num_slots=4, max_length=100)[1] == CONFIG
    with pytest.raises(InsufficientMemory, match="fewer slots or a smaller max_length"):
        load_model(file, num_slots=4, max_length=101)


def test_shipped_weights():
    path = tiny_weights_path()
    assert path.stat().st_size <= 4 * 2**20
    _, config, metadata = load_checkpoint(path)
    assert (config.dtype, config.num_mtp_layers) == ("float32", 1)
    held_out = json.loads(metadata["held_out"])
    assert held_out["mtp_acceptance"] >= 0.4
    assert held_out["decoder_loss"] < 1.7  # nats a byte; a uniform guess has ln 256 = 5.5
