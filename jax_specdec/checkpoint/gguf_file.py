"""A GGUF file: its fields, where its tensors are, and what both are in Hugging Face layout.

The fields are read here, as the `gguf` package takes seconds for a vocabulary; that package says
how quantized tensors are packed, and unpacks them. What llama.cpp computes and the decoder does not
is refused by name. For llama, the rows of queries and keys are in another order, in which pairs of
neighbors are turned; `permuted` marks them.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from jax_specdec.checkpoint.model_config import CheckpointError

_SUFFIX = ".gguf"
_INSTALL = "pip install 'gguf>=0.19'"
_VERSIONS = (2, 3)
_SCALARS = dict(enumerate("BbHhIif?", 0)) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_BLOCK = 1 << 20  # weights that are unpacked at a time


@dataclass(frozen=True)
class GgufTensor:
    """A tensor's place in the file.

    Attributes:
      kind: its type by name, such as "Q4_1".
      shape: outermost axis first.
      offset, size: bytes of the file.
    """

    kind: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class Gguf:
    """The head of a file, before its weights: the fields, and the tensors by name."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, GgufTensor]


def is_gguf(path: str | Path) -> bool:
    """Whether a path names a GGUF file rather than a directory."""
    return Path(path).suffix == _SUFFIX and not Path(path).is_dir()


def read_gguf(path: Path) -> Gguf:
    """The fields of a file and the places of its tensors; no weight is read.

    Raises:
      FileNotFoundError: there is no such file.
      CheckpointError: it is cut off, damaged, a part of a model or something else.
      ValueError: the `gguf` package is not installed.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    gguf, size = _package(), path.stat().st_size
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            fields, tensors = _header(_Reader(data), gguf)
    except (ValueError, KeyError, TypeError, ArithmeticError, struct.error, MemoryError) as error:
        raise CheckpointError(
            f"{path} ({size} bytes) is cut off, damaged or not a GGUF file: {error}{_part(path)}"
        ) from error
    number, count = (fields.get(f"split.{name}") for name in ("no", "count"))
    if isinstance(count, int) and count > 1:
        at = number + 1 if isinstance(number, int) else "?"
        raise CheckpointError(
            f"{path} is part {at} of {count} of a model, and parts are not read: "
            f"{_others(path, count)}. Make one file of them with llama.cpp's `llama-gguf-split "
            "--merge FIRST_PART MODEL.gguf`, and name that"
        )
    for name, tensor in tensors.items():
        if tensor.offset + tensor.size > size:
            raise CheckpointError(
                f"{path} ({size} bytes) is cut off: {name} {list(tensor.shape)} ends at byte "
                f"{tensor.offset + tensor.size}{_part(path)}"
            )
    return Gguf(path, fields, tensors)


_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_MOST_NAMED = 16


def _part(path: Path) -> str:
    """The parts that a file's name speaks of, for an error; "" where it speaks of none."""
    name = _PART.fullmatch(path.name)
    count = int(name[3]) if name else 1
    return f"; by its name it is one of {count} parts: {_others(path, count)}" if count > 1 else ""


def _others(path: Path, count: int) -> str:
    """The names of a model's other parts, and which of them are not there."""
    name = _PART.fullmatch(path.name)
    if name is None:
        return f"the others have names that end in -0000N-of-{count:05}.gguf"
    others = [
        other
        for at in range(1, int(name[3]) + 1)
        if (other := f"{name[1]}-{at:05}-of-{name[3]}.gguf") != path.name
    ]
    more = f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
    missing = [other for other in others if not (path.parent / other).is_file()]
    lacking = f" ({len(missing)} of them not beside it, {missing[0]} first)" if missing else ""
    return f"the others are {', '.join(others[:_MOST_NAMED])}{more}{lacking}"


def read_tensor(path: Path, tensor: GgufTensor) -> np.ndarray:
    """The tensor's weights in float32, in memory of their own.

    Raises:
      CheckpointError: its type is not read, or the file has become shorter.
    """
    gguf = _package()
    rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
    value = np.empty((rows, tensor.shape[-1]), np.float32)
    kind = gguf.GGMLQuantizationType[tensor.kind]
    try:
        raw = np.memmap(path, np.uint8, "r", tensor.offset, (rows, tensor.size // rows))
        step = max(1, _BLOCK // tensor.shape[-1])
        for begin in range(0, rows, step):
            part = slice(begin, begin + step)
            value[part] = gguf.quants.dequantize(np.asarray(raw[part]), kind)
    except (NotImplementedError, ValueError, OSError) as error:
        raise CheckpointError(
            f"{path}: a tensor of type {tensor.kind} cannot be read: {error}"
        ) from error
    return value.reshape(tensor.shape)


def _package() -> ModuleType:
    try:
        import gguf.quants
    except ImportError as error:
        raise ValueError(f"GGUF files are read with gguf: {_INSTALL}") from error
    return gguf


class _Reader:
    """Takes values from the header, one after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{form}", self.data, self.at)
        self.at += struct.calcsize(f"<{form}")
        return values

    def text(self) -> str:
        (length,) = self.take("Q")
        end = self.at + length
        if end > len(self.data):
            raise ValueError(f"a text of {length} bytes at byte {self.at} goes beyond the end")
        raw, self.at = self.data[self.at : end], end
        return raw.decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.take(_SCALARS[kind])[0]
        inner, count = self.take("IQ")
        if inner == _STRING:
            return [self.text() for _ in range(count)]
        return list(self.take(f"{count}{_SCALARS[inner]}"))


def _header(reader: _Reader, gguf: ModuleType) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    magic, version, num_tensors, num_fields = reader.take("4sIQQ")
    if magic != b"GGUF":
        raise ValueError(f"it begins with {magic!r}, not b'GGUF'")
    if version not in _VERSIONS:
        raise ValueError(f"version {version}; versions 2 and 3, little-endian, are read")
    fields = {}
    for _ in range(num_fields):
        name = reader.text()
        fields[name] = reader.value(*reader.take("I"))
    header = {}
    for _ in range(num_tensors):
        name, (dims,) = reader.text(), reader.take("I")
        header[name] = (*reversed(reader.take(f"{dims}Q")),), *reader.take("IQ")
    align = fields.get("general.alignment", 32)
    begin = -(-reader.at // align) * align
    tensors = {}
    for name, (shape, kind, offset) in header.items():
        block, packed = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        if not shape or 0 in shape or shape[-1] % block:
            raise ValueError(f"{name} has shape {list(shape)}")
        size = int(np.prod(shape, dtype=object)) // block * packed
        name_of_kind = gguf.GGMLQuantizationType(kind).name
        tensors[name] = GgufTensor(name_of_kind, shape, begin + offset, size)
    return fields, tensors


_ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
}  # fmt: skip
SIZES = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "intermediate_size": "feed_forward_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
_TENSOR = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
# Fields of an architecture that change nothing the decoder computes, or are looked at below.
_KNOWN = {
    *SIZES.values(), "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "context_length", "rope.freq_base", "rope.dimension_count", "rope.scaling.type",
    "rope.scaling.factor", "vocab_size",
}  # fmt: skip


def config_fields(file: Gguf) -> dict[str, Any]:
    """The file's fields as those of a config.json.

    Raises:
      CheckpointError: the architecture or a field is not supported, or a field is missing.
    """
    kind = file.fields.get("general.architecture")
    if kind not in tuple(_ARCHITECTURES):  # which may be a list, in a damaged file
        raise CheckpointError(
            f"{file.path}: a GGUF file of architecture {kind!r} is not supported; supported are "
            f"{', '.join(_ARCHITECTURES)}: use the Hugging Face directory that it was made from"
        )
    settings = {
        name.removeprefix(f"{kind}."): value
        for name, value in file.fields.items()
        if name.startswith(f"{kind}.")
    }
    if unknown := sorted(settings.keys() - _KNOWN):
        raise CheckpointError(
            f"{file.path}: {kind}.{unknown[0]} = {settings[unknown[0]]!r} is not known here: "
            "results could change without it"
        )
    for name in settings.keys() - {"rope.scaling.type"}:
        if not isinstance(settings[name], int | float):
            raise CheckpointError(f"{file.path}: {kind}.{name} = {settings[name]!r} is no number")
    embedding = file.tensors.get("token_embd.weight")
    if lacking := [name for name in (*SIZES.values(), "context_length") if name not in settings]:
        raise CheckpointError(f"{file.path} lacks {kind}.{lacking[0]}")
    if embedding is None:
        raise CheckpointError(f"{file.path} lacks token_embd.weight")
    heads = settings["attention.head_count"]
    head_dim = settings.get("attention.key_length", settings["embedding_length"] // max(heads, 1))
    for name in ("attention.value_length", "rope.dimension_count"):
        if settings.get(name, head_dim) != head_dim:
            raise CheckpointError(
                f"{file.path}: {kind}.{name} = {settings[name]} is not supported, only the length "
                f"of a key, {head_dim}"
            )
    rope = {"rope_type": str(settings.get("rope.scaling.type", "none")).replace("none", "default")}
    if "rope.scaling.factor" in settings:
        rope["factor"] = settings["rope.scaling.factor"]
    if rope["rope_type"] not in ("default", "linear"):
        raise CheckpointError(
            f"{file.path}: {kind}.rope.scaling.type = {rope['rope_type']!r} is not supported, only "
            "none and linear"
        )
    return {
        "architectures": [_ARCHITECTURES[kind]],
        **{name: settings[stored] for name, stored in SIZES.items()},
        "num_key_value_heads": settings.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": settings["context_length"],
        "rope_theta": settings.get("rope.freq_base", 10_000.0),
        "rope_scaling": rope,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_id": stop_ids(file),
        "dtype": "bfloat16" if embedding.kind == "BF16" else "float32",
    }


def stop_ids(file: Gguf) -> list[int]:
    """The ids that end a text, or an answer."""
    ids = (token_id(file, name) for name in ("eos", "eot"))
    return list(dict.fromkeys(id for id in ids if id is not None))


def token_id(file: Gguf, name: str) -> int | None:
    """The id of a token by its name, such as "bos"; None where the file names none.

    Raises:
      CheckpointError: it is no id of the file's tokens.
    """
    field = f"tokenizer.ggml.{name}_token_id"
    id, tokens = file.fields.get(field), file.fields.get("tokenizer.ggml.tokens")
    count = len(tokens) if isinstance(tokens, list) else None
    is_id = isinstance(id, int) and not isinstance(id, bool)
    if id is None or (is_id and 0 <= id < (2**31 if count is None else count)):
        return id
    has = "no tokens" if count is None else f"{count} tokens"
    raise CheckpointError(f"{file.path}: {field} = {id!r}, but the tokenizer has {has}")


def hf_name(name: str) -> str:
    """The name of a tensor in transformers; a name that is not known stays."""
    parts = _TENSOR.fullmatch(name)
    if parts is None or parts[2] not in NAMES:
        return name
    layer = "" if parts[1] is None else f"model.layers.{parts[1]}."
    return f"{layer}{NAMES[parts[2]]}.{parts[3]}"


def permuted(file: Gguf, name: str) -> int:
    """Among how many heads the rows of a tensor are permuted; 0 where they are not."""
    if file.fields["general.architecture"] != "llama":
        return 0
    heads: int = file.fields["llama.attention.head_count"]
    of_keys: int = file.fields.get("llama.attention.head_count_kv", heads)
    counts = {"attn_q": heads, "attn_k": of_keys}
    return counts.get(name.split(".")[-2], 0) if name.startswith("blk.") else 0
