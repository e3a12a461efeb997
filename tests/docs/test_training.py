"""The training script, at a size that takes seconds."""

import argparse
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.device.model import checkpoint
from jax_specdec.device.model.params import init_params
from jax_specdec.text import byte_tokens
from tests.support import reference_model
from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples"
CONFIG = ModelConfig.tiny(byte_tokens.VOCAB_SIZE, num_layers=1)
STEPS, RATE = 50, 1e-2  # the same everywhere, so that one step function is compiled


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        import train_tiny_model

        patch.setattr(train_tiny_model, "CONFIG", CONFIG)
        yield train_tiny_model


@pytest.fixture(scope="module")
def corpus(script):
    return script.tiny_corpus


@pytest.fixture(scope="module")
def params():
    return jax.jit(init_params, static_argnums=0)(CONFIG, jax.random.key(0))


def log_softmax(x):
    x = x - x.max(axis=1)[:, None]
    return x - np.log(np.exp(x).sum(axis=1))[:, None]


@pytest.mark.fast
def test_losses_are_those_of_the_reference(script):
    """All three losses, the second draft by explicit recursion one position at a time."""
    config = dataclasses.replace(CONFIG, num_layers=2)
    params = jax.jit(init_params, static_argnums=0)(config, jax.random.key(0))
    s = 7
    ids = np.random.default_rng(1).integers(0, 256, s + 3)
    rows = jnp.asarray(ids[None], jnp.int32)
    got = jax.jit(script.losses, static_argnums=1)(params, config, rows)
    weights = {n: np.asarray(x, np.float64) for n, x in checkpoint.named_arrays(params).items()}
    sizes, head = config.to_dict(), weights["embedding"].T
    hidden = reference_model.hidden_states(weights, sizes, ids[:s])
    first = reference_model.mtp_hidden(weights, sizes, hidden, ids[1 : s + 1])
    second = [
        reference_model.mtp_hidden(
            weights, sizes, np.vstack([hidden[: i + 1], first[i]]), ids[1 : i + 3]
        )[-1]
        for i in range(s)
    ]
    for n, states in enumerate([hidden, first, np.stack(second)]):
        logprobs = log_softmax(states @ head)
        want = -logprobs[np.arange(s), ids[n + 1 : n + 1 + s]].mean()
        np.testing.assert_allclose(got[n], want, atol=1e-4)


def test_training_learns_and_repeats_itself(script):
    ids = np.tile(byte_tokens.encode("the quick brown fox. "), 40)
    args = argparse.Namespace(seed=1, steps=STEPS, rate=RATE, sequence=16, batch=4, report=1000)
    one, two = (script.train(CONFIG, ids, args) for _ in range(2))  # each from scratch
    jax.tree.map(np.testing.assert_array_equal, one, two)
    rows = jnp.asarray(ids[np.arange(4)[:, None] + np.arange(19)[None, :]])
    each = jax.jit(script.losses, static_argnums=1)(one, CONFIG, rows)
    assert (each < 1.5).all()  # ln 21 = 3.0 without learning anything but the letters
    args.seed = 2
    other = script.train(CONFIG, ids, args)
    assert np.abs(one.embedding - other.embedding).max() > 0.01


def test_the_first_step_is_that_of_adamw(script, params):
    """m / sqrt(v) is g / |g| after one step; norms do not decay; the gradient is clipped."""
    ids = jnp.asarray(np.random.default_rng(3).integers(0, 256, (4, 19)), jnp.int32)
    zeros = jax.device_get(jax.tree.map(jnp.zeros_like, params))
    state = (*jax.tree.map(jnp.asarray, (jax.device_get(params), zeros, zeros)), jnp.float32(0))
    (new, *_), _ = script.make_step(CONFIG, STEPS, RATE)(state, ids)
    weights = np.array([1.0, *script.DRAFT_WEIGHT], np.float32)
    gradient = jax.jit(jax.grad(lambda p: weights @ script.losses(p, CONFIG, ids)))(params)
    norm = np.sqrt(sum(np.square(g).sum() for g in jax.tree.leaves(gradient)))
    assert norm > 1  # so clipping is seen
    before, after = (checkpoint.named_arrays(x) for x in (params, new))
    for name, g in checkpoint.named_arrays(gradient).items():
        g, p = np.asarray(g, np.float64) / norm, np.asarray(before[name], np.float64)
        decay = 0.0 if name.endswith("norm") else 0.1
        want = p - RATE / 6 * (g / (np.abs(g) + 1e-8) + decay * p)  # a sixth: warming up
        sure = np.abs(g) > 1e-5  # elsewhere the sign is a matter of rounding
        assert sure.any()
        np.testing.assert_allclose(after[name][sure], want[sure], atol=1e-5, err_msg=name)


@pytest.mark.fast
def test_acceptance_is_that_of_speculative_decoding(script, params):
    """Counted once more the slow way: a draft, a check, a step of one or two tokens."""
    ids = np.random.default_rng(2).integers(0, 256, 40).astype(np.int32)
    weights = {n: np.asarray(x) for n, x in checkpoint.named_arrays(params).items()}
    sizes = CONFIG.to_dict()
    proposed = accepted = 0
    for start in (0, 32):
        text = list(ids[start : start + 8])

        def next_id(text):
            return int(reference_model.logits(weights, sizes, text)[-1].argmax())

        text.append(next_id(text))
        while len(text) < 8 + 10:
            draft = int(reference_model.mtp_logits(weights, sizes, text)[-1].argmax())
            text.append(next_id(text))
            proposed += 1
            if draft == text[-1]:
                accepted += 1
                text.append(next_id(text))
    got = script.acceptance(params, CONFIG, ids, num_prompts=2, prompt_length=8, generated=10)
    assert proposed > 4
    assert got == pytest.approx(accepted / proposed)


# The list of files -----------------------------------------------------------------------------


@pytest.fixture
def library(tmp_path):
    root = tmp_path / "library"
    (root / "test").mkdir(parents=True)
    for number in range(30):
        (root / f"module_{number}.py").write_text(f"x = {number}\n" * 200)
    (root / "test" / "excluded.py").write_text("x = 1\n" * 400)
    (root / "short.py").write_text("x = 1\n")
    return root


@pytest.mark.fast
def test_list_of_files(corpus, library, tmp_path):
    twin = tmp_path / "twin"
    twin.mkdir()
    for file in library.glob("*.py"):
        (twin / file.name).write_bytes(file.read_bytes())
    (twin / "module_3.py").write_text("y = 3\n" * 200)
    (twin / "module_4.py").unlink()
    entries = corpus.make_list([library, twin])
    assert {e.path for e in entries} == {f"module_{n}.py" for n in range(30) if n not in (3, 4)}
    assert {e.split for e in entries} == set(corpus.SPLITS)
    corpus.write_list(tmp_path / "list", entries)
    assert corpus.read_list(tmp_path / "list") == entries
    held_out = [e for e in entries if e.split == "held-out"]
    ids = corpus.load(entries, "held-out", twin)
    assert (ids == byte_tokens.EOS_ID).sum() == len(held_out) + 1
    assert byte_tokens.decode(ids[1:-1]).split("<|eos|>") == [
        (library / e.path).read_text() for e in held_out
    ]


@pytest.mark.fast
def test_files_that_differ_are_named(corpus, library):
    entries = corpus.make_list([library])
    first, second, *_ = [e.path for e in entries if e.split == "train"]
    (library / first).write_text("changed")
    (library / second).unlink()
    with pytest.raises(corpus.CorpusError) as caught:
        corpus.load(entries, "train", library)
    assert f"{first}: differs" in str(caught.value)
    assert f"{second}: missing" in str(caught.value)
    assert "2 files" in str(caught.value)
    assert "--write-corpus" in str(caught.value)


def test_a_line_that_is_none_is_named(corpus, tmp_path):
    (tmp_path / "list").write_text("# fine\n\nabc train x.py\n")
    with pytest.raises(corpus.CorpusError, match="list:3: want"):
        corpus.read_list(tmp_path / "list")


def test_shipped_weights_come_from_the_shipped_list(corpus):
    entries = corpus.read_list(EXAMPLES / "tiny_corpus.txt")
    _, _, metadata = checkpoint.load_checkpoint(checkpoint.tiny_weights_path())
    assert metadata["corpus"] == corpus.digest(entries)
    assert {e.split for e in entries} == set(corpus.SPLITS)
    assert len({e.path for e in entries}) == len(entries)


# The commands ----------------------------------------------------------------------------------


@pytest.mark.fast
def test_train_then_check(script, library, tmp_path, capsys):
    files = ["--corpus", str(tmp_path / "list"), "--library", str(library)]
    weights = tmp_path / "tiny.safetensors"
    assert script.main(["--write-corpus", *files]) == 0
    size = ["--steps", "2", "--batch", "2", "--sequence", "16"]
    assert script.main([*files, *size, "--output", str(weights)]) == 0
    assert "held-out mtp_acceptance" in capsys.readouterr().out
    check = ["--check", *files, "--weights", str(weights)]
    assert script.main(check) == 0
    params, config, metadata = checkpoint.load_checkpoint(weights)
    kept = {k: v for k, v in metadata.items() if k not in ("format", "config")}
    recorded = json.loads(kept["held_out"])
    kept["held_out"] = json.dumps(recorded | {"decoder_loss": recorded["decoder_loss"] * 0.97})
    checkpoint.save_checkpoint(weights, params, config, metadata=kept)
    capsys.readouterr()
    assert script.main(check) == 1
    assert capsys.readouterr().out.count("DIFFERS") == 1
    for file in library.glob("*.py"):
        file.write_text("changed")
    assert script.main(check) == 2
    assert "differs" in capsys.readouterr().err
