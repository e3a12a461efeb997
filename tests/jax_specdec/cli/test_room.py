"""What the server says of its room at its start: slots, caches, weights, and who drafts."""

import argparse
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.checkpoint.shipped import tiny_config, tiny_weights_path
from jax_specdec.cli import room, serve_command
from jax_specdec.device.model.checkpoint import load_checkpoint
from jax_specdec.engine.config import EngineConfig

# 30 layers of 3 heads of 64 numbers: SmolLM2-135M's.
SMALL = ModelConfig(
    vocab_size=49152, hidden_size=576, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64,
    intermediate_size=1536, tie_embeddings=True,
)  # fmt: skip


def said(model=SMALL, **changes):
    fields = {"vocab_size": 49152, "num_slots": 8, "max_length": 8192, "drafter": "ngram"}
    return room.line(EngineConfig(**fields | changes), model)


def test_line_has_slots_memory_and_drafter():
    assert said() == (
        "each worker: 8 slots of 8,192 tokens; caches 2.81 GiB (with --max-length 2048 0.70 GiB), "
        "weights 0.50 GiB in float32; drafter: ngram, up to 3 drafts a step"
    )
    assert "caches 0.70 GiB (with --max-length 512 0.18 GiB), " in said(max_length=2048)
    assert "caches 0.35 GiB, weights 0.50 GiB" in said(max_length=1024)  # less than the weights
    half = said(replace(SMALL, dtype="bfloat16"), num_slots=1, num_drafts=1)
    assert "1 slot of 8,192 tokens; caches 0.18 GiB, weights 0.25 GiB in bfloat16" in half
    assert half.endswith("drafter: ngram, up to 1 draft a step")
    assert said(drafter="none", num_drafts=0).endswith("drafter: none")
    assert "in float32 on 4 devices;" in said(tensor_parallel=4)
    assert "; caches and weights as the own model makes them;" in said(None)


def test_weights_count_what_the_shipped_file_has():
    params, config, _ = load_checkpoint(tiny_weights_path())
    assert tiny_config() == config
    assert config.weight_bytes == sum(x.nbytes for x in jax.tree.leaves(params))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "8 slots of 1,024 tokens; caches 0.02 GiB, weights 0.00 GiB in float32; drafter: mtp"),
        (["--slots", "2", "--drafts", "0"], "2 slots of 1,024 tokens;"),
        (["--dtype", "bfloat16", "--drafter", "suffix"], "in bfloat16; drafter: suffix, up to 3"),
    ],
)
def test_options_decide_what_is_said(options, words):
    parser = argparse.ArgumentParser()
    serve_command.add(parser)
    _, config, sizes = serve_command.model_of(parser.parse_args(options))
    assert words in room.line(config, sizes)


def test_a_draft_model_is_counted_and_named(monkeypatch):
    """It computes in the model's type, whatever its file says."""
    half = SimpleNamespace(config=replace(SMALL, dtype="bfloat16"))
    monkeypatch.setattr(room, "open_model", lambda path, dtype: half)
    text = said(drafter="model", draft_model="/models/small")
    assert "caches 5.62 GiB (with --max-length 2048 1.41 GiB), weights 1.00 GiB in float32;" in text
    assert text.endswith("drafter: model (small), up to 3 drafts a step")
