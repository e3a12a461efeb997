"""GGUF files, written by the `gguf` package from weights that have their names in a directory."""

import json

import gguf
import numpy as np

from tests.support import hf_files

KINDS = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}


def fields(config):
    """The fields of an architecture, by their names without it."""
    lengths = {"context_length": 512, "attention.value_length": config.head_dim}
    return lengths | {name: getattr(config, ours) for ours, _, name in hf_files.NUMBERS}


def tokenizer_fields(library, pre="gpt-2", **more):
    """A byte-level tokenizer of the tokenizers library as a file's fields."""
    rules = json.loads(library.to_str())
    vocabulary = library.get_vocab(with_added_tokens=True)
    kinds = [1] * len(vocabulary)
    for one in rules["added_tokens"]:
        kinds[one["id"]] = 3 if one["special"] else 4
    return {
        "model": "gpt2", "pre": pre, "tokens": sorted(vocabulary, key=vocabulary.get),
        "merges": [" ".join(pair) for pair in rules["model"]["merges"]], "token_type": kinds,
        "eos_token_id": 1, **more,
    }  # fmt: skip


def write(path, config, *, params=None, packed="F32", changes=None, tokenizer=None, chat=None):
    """Write a file; `packed` names the type of matrices, `changes` fields of the architecture."""
    tensors = hf_files.hf_tensors(config, params or hf_files.random_params(config))
    kind = KINDS[hf_files.architecture_of(config)]
    writer = gguf.GGUFWriter(path, kind)
    for name, value in (fields(config) | (changes or {})).items():
        if value is not None:
            _add(writer, f"{kind}.{name}", value)
    for name, value in (tokenizer or {}).items():
        _add(writer, f"tokenizer.ggml.{name}", value)
    if chat is not None:
        writer.add_chat_template(chat)
    arch = {name: one for one, name in gguf.MODEL_ARCH_NAMES.items()}[kind]
    names = gguf.get_tensor_name_map(arch, config.num_layers)
    for name, value in tensors.items():
        stem, _, last = name.rpartition(".")
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(stem[-6:], 0)
        if heads and kind == "llama":  # as llama.cpp's convert_hf_to_gguf.py has it
            half = value.shape[0] // heads // 2
            value = value.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(value.shape)
        of = gguf.GGMLQuantizationType[packed if value.ndim == 2 else "F32"]
        raw = gguf.quantize(value.astype(np.float32), of)
        writer.add_tensor(f"{names.get_name(stem)}.{last}", raw, raw_dtype=of)
    finish(writer)
    return path


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer, name, value):
    kinds = gguf.GGUFValueType
    kind = kinds.get_type(value)
    writer.add_key_value(name, value, kinds.UINT32 if kind is kinds.INT32 else kind)
