"""A Hugging Face model directory's config.json as a `ModelConfig`.

Decoders that are Llama's up to optional parts are supported (`hf_families.py`). An option that the
decoder does not compute is refused by name, never ignored. Both spellings of types are read:
`dtype` (transformers 5) and `torch_dtype` (before).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_specdec.checkpoint.hf_families import FAMILIES, options
from jax_specdec.checkpoint.model_config import CheckpointError, ModelConfig

ARCHITECTURES = tuple(FAMILIES)
COMPUTE_DTYPES = ("bfloat16", "float32")


_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # as the Hugging Face Hub names a model


@dataclass(frozen=True)
class HfConfig:
    """The contents of config.json and generation_config.json.

    Attributes:
      architecture: one of `ARCHITECTURES`.
      model: the sizes, without an MTP head: only the tensors tell whether there is one.
      eos_token_ids: ids that end a text; empty where neither file names one.
      max_length: positions that the model was made for; None where config.json does not say.
    """

    architecture: str
    model: ModelConfig
    eos_token_ids: tuple[int, ...]
    max_length: int | None


def read_config(directory: Path, *, dtype: str = "") -> HfConfig:
    """Read the configuration of a model directory.

    Args:
      directory: it has config.json, and perhaps generation_config.json.
      dtype: the type to compute in, "bfloat16" or "float32"; empty for the type in the file if it
        is one of them, and float32 otherwise (float16 is exact in it).

    Raises:
      FileNotFoundError: there is no config.json.
      CheckpointError: the architecture or an option is not supported, or the file is not a
        configuration.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(_what_it_is(directory))
    fields, stops = read_json(path), eos_token_ids(directory)
    return config_of(path, fields if stops is None else fields | {"eos_token_id": [*stops]}, dtype)


def config_of(path: Path, fields: Mapping[str, Any], dtype: str) -> HfConfig:
    """The configuration of a config.json's fields.

    Args:
      path: the file that they are from, for errors.
      fields: the object in it, and the ids that end a text.
      dtype: as that of `read_config`.

    Raises:
      CheckpointError: as `read_config`.
    """
    architecture = _architecture(path, fields)
    try:
        model = _model(architecture, fields, dtype)
    except KeyError as error:
        raise CheckpointError(f"{path} lacks {error}") from error
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    stops = _ids(path, fields.get("eos_token_id"))
    length = fields.get("max_position_embeddings")
    return HfConfig(architecture, model, stops, None if length is None else int(length))


def eos_token_ids(directory: Path) -> tuple[int, ...] | None:
    """The ids that end a text as generation_config.json says; None where it does not.

    Raises:
      CheckpointError: it is damaged.
    """
    path = directory / "generation_config.json"
    stops = read_json(path).get("eos_token_id") if path.is_file() else None
    return None if stops is None else _ids(path, stops)


def _what_it_is(name: Path) -> str:
    """What a name without a config.json in it may be, and the way out."""
    layout = (
        "a directory in Hugging Face layout (config.json, model.safetensors, tokenizer.json) or a "
        "GGUF file"
    )
    if name.is_file():
        return f"{name} is a file: name {layout}, perhaps {name.parent}"
    if name.is_dir():
        return f"{name} has no config.json: name {layout}"
    if _HUB_ID.fullmatch(str(name)):
        return (
            f"there is no directory {name}, and nothing is downloaded: if that is a model on the "
            f"Hugging Face Hub, `hf download {name} --local-dir {name.name}` fetches it (pip "
            f"install huggingface_hub); then name {name.name}"
        )
    return f"there is no directory {name}: name {layout}"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      CheckpointError: the file holds something else.
    """
    try:
        fields = json.loads(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path} holds a {type(fields).__name__}, not a JSON object")
    return fields


def _architecture(path: Path, fields: Mapping[str, Any]) -> str:
    names = fields.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{path}: architecture {name!r} is not supported; supported are "
            f"{', '.join(ARCHITECTURES)}"
        )
    return str(name)


def _model(architecture: str, fields: Mapping[str, Any], dtype: str) -> ModelConfig:
    fields = {**FAMILIES[architecture].defaults, **fields}
    heads = fields["num_attention_heads"]
    head_dim = fields.get("head_dim") or FAMILIES[architecture].defaults.get("head_dim")
    if head_dim is None:
        head_dim, rest = divmod(fields["hidden_size"], heads)
        if rest:
            raise ValueError(
                f"hidden_size = {fields['hidden_size']} is not a multiple of num_attention_heads "
                f"= {heads}, and there is no head_dim"
            )
    sizes: dict[str, Any] = {
        "vocab_size": fields["vocab_size"],
        "hidden_size": fields["hidden_size"],
        "num_layers": fields["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": fields.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "intermediate_size": fields["intermediate_size"],
        "norm_eps": float(fields.get("rms_norm_eps", 1e-6)),
        "tie_embeddings": bool(fields.get("tie_word_embeddings", False)),
        "num_mtp_layers": 0,
        "dtype": _dtype(fields, dtype),
    }
    return ModelConfig(**(sizes | options(architecture, fields)))


def _dtype(fields: Mapping[str, Any], chosen: str) -> str:
    if chosen and chosen not in COMPUTE_DTYPES:
        raise ValueError(f"dtype {chosen!r} is not one of {', '.join(COMPUTE_DTYPES)}")
    stored = str(fields.get("dtype") or fields.get("torch_dtype") or "").removeprefix("torch.")
    return chosen or (stored if stored in COMPUTE_DTYPES else "float32")


def _ids(path: Path, value: object) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(one, int) and one >= 0 for one in ids):
        raise CheckpointError(
            f"{path}: eos_token_id = {value!r} is neither an id nor a list of ids"
        )
    return tuple(ids)
