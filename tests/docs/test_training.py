"""The training script, at a size that takes seconds."""

import functools
import json

import jax
import pytest

from jax_specdec.device.model import (
    ModelConfig,
    init_params,
    load_checkpoint,
    save_checkpoint,
    tiny_weights_path,
)
from jax_specdec.engine import byte_tokens
from tests.support.run_examples import EXAMPLES

CONFIG = ModelConfig.tiny(byte_tokens.VOCAB_SIZE, num_layers=2)
SIZE = "--steps 50 --batch 4 --sequence 16 --rate 0.01"
PROMPTS = {"num_prompts": 2, "prompt_length": 8, "generated": 10}


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        import train_tiny_model

        patch.setattr(train_tiny_model, "CONFIG", CONFIG)
        compiled = jax.jit(init_params, static_argnums=0)  # operation by operation takes seconds
        patch.setattr(train_tiny_model, "init_params", compiled)
        yield train_tiny_model


# The list of files -----------------------------------------------------------------------------


@pytest.fixture
def library(tmp_path):
    """Thirty small files to take, one that is too short, and one in a folder that is left out."""
    root = tmp_path / "library"
    (root / "test").mkdir(parents=True)
    for number in range(30):
        (root / f"module_{number}.py").write_text(f"x = {number:4}\n" * 120)
    (root / "test" / "excluded.py").write_text("x = 1\n" * 200)
    (root / "short.py").write_text("x = 1\n")
    return root


def test_shipped_weights_come_from_the_shipped_list(script):
    corpus = script.tiny_corpus
    entries = corpus.read_list(EXAMPLES / "tiny_corpus.txt")
    _, _, metadata = load_checkpoint(tiny_weights_path())
    assert metadata["corpus"] == corpus.digest(entries)
    assert {e.split for e in entries} == set(corpus.SPLITS)
    assert len({e.path for e in entries}) == len(entries)


@pytest.mark.slow
def test_train_then_check(script, library, tmp_path, capsys, monkeypatch):
    small = functools.partial(script.tiny_evaluation.acceptance, **PROMPTS)
    monkeypatch.setattr(script.tiny_evaluation, "acceptance", small)
    files = ["--corpus", str(tmp_path / "list"), "--library", str(library)]
    weights = tmp_path / "tiny.safetensors"
    assert script.main(["--write-corpus", *files]) == 0
    assert script.main([*files, *SIZE.split(), "--output", str(weights)]) == 0
    assert "held-out mtp_acceptance" in capsys.readouterr().out
    check = ["--check", *files, "--weights", str(weights)]
    assert script.main(check) == 0
    params, config, metadata = load_checkpoint(weights)
    kept = {k: v for k, v in metadata.items() if k not in ("format", "config")}
    recorded = json.loads(kept["held_out"])
    kept["held_out"] = json.dumps(recorded | {"decoder_loss": recorded["decoder_loss"] * 0.97})
    save_checkpoint(weights, params, config, metadata=kept)
    capsys.readouterr()
    assert script.main(check) == 1
    assert capsys.readouterr().out.count("DIFFERS") == 1
    for file in library.glob("*.py"):
        file.write_text("changed")
    assert script.main(check) == 2
    assert "differs" in capsys.readouterr().err
