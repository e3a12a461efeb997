"""GGUF files: what the `gguf` package writes is read as the directory that it is made from."""

import dataclasses
import random
import sys

import gguf
import jax
import numpy as np
import pytest

from jax_specdec.checkpoint.hf_names import open_model
from jax_specdec.checkpoint.model_config import CheckpointError, ModelConfig
from jax_specdec.checkpoint.written_arrays import write_arrays
from jax_specdec.device.model.checkpoint import load_model
from jax_specdec.text.tokenizer import Tokenizer
from tests.support import gguf_files, hf_files
from tests.support.tokenizer_files import byte_level

CONFIG = ModelConfig.tiny(40, num_mtp_layers=0, tie_embeddings=False)
CONFIGS = {
    "llama": CONFIG,
    "llama, tied": dataclasses.replace(CONFIG, tie_embeddings=True),
    "qwen2": dataclasses.replace(CONFIG, qkv_bias=True),
    "qwen3": dataclasses.replace(CONFIG, qk_norm=True, tie_embeddings=True),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_file_is_the_model_of_its_directory(config, tmp_path):
    params = hf_files.random_params(config)
    hf_files.write(tmp_path / "model", config, params)
    path = gguf_files.write(
        tmp_path / "model.gguf", config, params=params, tokenizer={"eos_token_id": 2}
    )
    of_file, of_directory = open_model(path), open_model(tmp_path / "model")
    # An epsilon is a float32 there.
    assert of_file.config == dataclasses.replace(config, norm_eps=float(np.float32(1e-5)))
    assert of_file.hf.eos_token_ids == of_directory.hf.eos_token_ids == (2,)
    assert of_file.hf.max_length == of_directory.hf.max_length == 512
    found, _ = load_model(path)
    expected, _ = load_model(tmp_path / "model")
    assert jax.tree.all(jax.tree.map(np.array_equal, found, expected))


@pytest.mark.parametrize("packed", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_weights_are_unpacked(packed, tmp_path):
    config = dataclasses.replace(CONFIG, hidden_size=64, head_dim=16, intermediate_size=96)
    params = hf_files.random_params(config)
    path = gguf_files.write(tmp_path / "model.gguf", config, params=params, packed=packed)
    found, loaded = load_model(path)
    assert loaded.dtype == ("bfloat16" if packed == "BF16" else "float32")
    kind = gguf.GGMLQuantizationType[packed]

    def through(x):
        rows = np.asarray(x, np.float32)
        return gguf.dequantize(gguf.quantize(rows, kind), kind).reshape(rows.shape)

    for of in (lambda x: x.embedding, lambda x: x.head.T, lambda x: x.layers.gate[1].T):
        assert np.array_equal(np.asarray(of(found), np.float32), through(of(params)))


def test_scaled_positions_are_read(tmp_path):
    changes = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    path = gguf_files.write(tmp_path / "model.gguf", CONFIG, changes=changes)
    found = open_model(path).config.rope_scaling
    assert (found.kind, found.factor) == ("linear", 2.0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope.scaling.type": "yarn"}, "rope.scaling.type = 'yarn' is not supported, only none"),
        ({"expert_count": 8}, "llama.expert_count = 8 is not known here"),
        ({"rope.dimension_count": 4}, "rope.dimension_count = 4 is not supported, only the length"),
        ({"block_count": None}, "lacks llama.block_count"),
        ({"attention.head_count": "many"}, "head_count = 'many' is no number"),
    ],
)
def test_what_is_not_computed_is_named(changes, said, tmp_path):
    path = gguf_files.write(tmp_path / "model.gguf", CONFIG, changes=changes)
    with pytest.raises(CheckpointError, match=said):
        open_model(path)


def test_another_family_is_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    gguf_files.finish(writer)
    with pytest.raises(CheckpointError, match=r"'mamba' is not supported; supported are llama"):
        open_model(tmp_path / "model.gguf")


def test_a_file_that_is_cut_off_or_something_else_is_named(tmp_path):
    tokenizer = gguf_files.tokenizer_fields(byte_level())
    path = gguf_files.write(tmp_path / "model.gguf", CONFIG, tokenizer=tokenizer)
    whole = path.read_bytes()
    for size in [*range(64), *range(64, len(whole), 499), len(whole) - 40]:
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"model.gguf \(\d+ bytes\) is cut off"):
            open_model(path)
    for head, said in ((b"PK\3\4", "begins with"), (b"GGUF\0\0\0\3", "version 50331648")):
        path.write_bytes(head + whole[len(head) :])
        with pytest.raises(CheckpointError, match=said):
            open_model(path)
    with pytest.raises(FileNotFoundError, match=r"no file .*none.gguf"):
        open_model(tmp_path / "none.gguf")


def part(path, number, count):
    """A part as llama-gguf-split writes it: the first one has the fields, all have tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in (("no", number), ("count", count)):
        writer.add_key_value(f"split.{name}", value, gguf.GGUFValueType.UINT16)
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(8, np.float32))
    gguf_files.finish(writer)
    return path


def test_a_part_of_a_model_names_the_others(tmp_path):
    names = [f"m-0000{at}-of-00003.gguf" for at in (1, 2, 3)]
    for number in range(3):
        part(tmp_path / names[number], number, 3)
        others = ", ".join(one for one in names if one != names[number])
        lacking = rf" \({2 - number} of them not beside it, " if number < 2 else r"\."
        said = rf"{names[number]} is part {number + 1} of 3 of a model, and.*are {others}{lacking}"
        with pytest.raises(CheckpointError, match=said):
            open_model(tmp_path / names[number])
        with pytest.raises(CheckpointError, match="llama-gguf-split --merge"):
            Tokenizer(tmp_path / names[number])
    renamed = part(tmp_path / "part.gguf", 0, 2)
    with pytest.raises(CheckpointError, match=r"part 1 of 2 .*names that end in -0000N-of-00002"):
        open_model(renamed)
    many = part(tmp_path / "m-00007-of-00040.gguf", 6, 40)
    with pytest.raises(CheckpointError, match=r"m-00017-of-00040\.gguf and 23 more"):
        open_model(many)
    with pytest.raises(CheckpointError, match=r"lacks"):  # one part is a whole model
        open_model(part(tmp_path / "one.gguf", 0, 1))


def test_a_piece_of_a_file_that_was_cut_is_told_by_its_name(tmp_path):
    whole = gguf_files.write(tmp_path / "model.gguf", CONFIG).read_bytes()
    for at, cut in ((1, whole[: len(whole) // 2]), (2, whole[len(whole) // 2 :])):
        path = tmp_path / f"m-0000{at}-of-00002.gguf"
        path.write_bytes(cut)
        with pytest.raises(CheckpointError, match=r"cut off.*by its name it is one of 2 parts"):
            open_model(path)


def test_bytes_that_changed_are_refused_or_read(tmp_path):
    """Nothing but a `CheckpointError` comes of a header with other bytes."""
    path = gguf_files.write(tmp_path / "model.gguf", CONFIG, tokenizer={"tokens": ["a", "b"]})
    whole, draw, refused = path.read_bytes(), random.Random(0), 0
    for _ in range(400):
        changed = bytearray(whole)
        for _ in range(draw.randint(1, 3)):
            changed[draw.randrange(1400)] = draw.randrange(256)
        path.write_bytes(changed)
        try:
            open_model(path)
        except CheckpointError:
            refused += 1
    assert refused > 100


def test_a_file_that_became_shorter_is_noticed(tmp_path, monkeypatch):
    path = gguf_files.write(tmp_path / "model.gguf", CONFIG)
    model = open_model(path)
    path.write_bytes(path.read_bytes()[:-900])
    monkeypatch.setattr("jax_specdec.device.model.checkpoint.open_model", lambda *_, **__: model)
    with pytest.raises(CheckpointError, match="a tensor of type F32 cannot be read"):
        load_model(path)


def test_arrays_need_a_directory(tmp_path):
    with pytest.raises(CheckpointError, match="is a GGUF file: give the path of another one"):
        write_arrays({"x": np.zeros(3)}, str(tmp_path / "model.gguf"), tmp_path / "target")


def test_a_missing_package_is_said_with_the_command(tmp_path, monkeypatch):
    path = gguf_files.write(tmp_path / "model.gguf", CONFIG)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"^GGUF files are read with gguf: pip install 'gguf>="):
        open_model(path)
