"""A Hugging Face model directory's config.json as a `ModelConfig`.

Decoders that are Llama's up to optional parts are supported (`FAMILIES`). Defaults are those of
transformers' configuration classes: a file may leave them out. An option that the decoder does not
compute is refused by name, never ignored. Both spellings of types are read: `dtype` (transformers
5) and `torch_dtype` (before).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jax_specdec.checkpoint.model_config import CheckpointError, ModelConfig
from jax_specdec.checkpoint.rope_scaling import FULL, SLIDING, read_rope, read_rope_by_kind

_Fields = Mapping[str, Any]
GELU = "gelu_pytorch_tanh"
MAX_LAYERS = 2**16


@dataclass(frozen=True)
class Family:
    """The differences of one architecture.

    Attributes:
      defaults: fields that its config.json may leave out.
      sliding: which layers slide: "none"; "all" where `sliding_window` is a number; "switched",
        "all" if `use_sliding_window` is true; "upper", those from `max_window_layers` on if it is
        true; or all but each `pattern`-th. `layer_types` says it too.
      pattern: see `sliding`.
      qkv_bias: queries, keys and values always have biases, and what attention returns never has.
      qk_norm: queries and keys are normed.
      experts: where the names of experts come from; empty for none.
      gemma: it is a Gemma, in norms, embeddings, activation and scales.
      mtp: the layout of an MTP head that it may have; empty for none.
    """

    defaults: _Fields = field(default_factory=dict)
    sliding: Literal["none", "all", "switched", "upper", "pattern"] = "none"
    pattern: int = 0
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: Literal["", "mixtral", "qwen3"] = ""
    gemma: bool = False
    mtp: Literal["", "deepseek", "mimo"] = ""


_GEMMA: dict[str, Any] = {
    "head_dim": 256, "num_key_value_heads": 4, "hidden_activation": GELU, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "query_pre_attn_scalar": 256, "sliding_window": 4096,
}  # fmt: skip
FAMILIES = {
    "LlamaForCausalLM": Family(mtp="deepseek"),
    "MistralForCausalLM": Family({"num_key_value_heads": 8, "sliding_window": 4096}, "all"),
    "Qwen2ForCausalLM": Family({}, "upper", qkv_bias=True, mtp="deepseek"),
    "Qwen3ForCausalLM": Family({"head_dim": 128}, "upper", qk_norm=True, mtp="deepseek"),
    "MiMoForCausalLM": Family(qkv_bias=True, mtp="mimo"),
    "MixtralForCausalLM": Family(
        {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6}, "all",
        experts="mixtral",
    ),
    "Qwen3MoeForCausalLM": Family({}, "switched", qk_norm=True, experts="qwen3"),
    "Gemma2ForCausalLM": Family(
        _GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}, "pattern", 2,
        gemma=True,
    ),
    "Gemma3ForCausalLM": Family(
        _GEMMA | {"rope_theta": 1e6}, "pattern", 6, qk_norm=True, gemma=True
    ),
}  # fmt: skip


def options(architecture: str, fields: _Fields) -> dict[str, Any]:
    """The fields of `ModelConfig` that are not plain sizes.

    Args:
      architecture: one of `FAMILIES`.
      fields: of config.json, with the family's defaults.

    Raises:
      KeyError: a field is missing.
      ValueError: a field has a value that is not computed.
    """
    family = FAMILIES[architecture]
    _refuse(family, fields)
    bias = bool(fields.get("attention_bias"))
    window, layers = _sliding(family, fields)
    settings: dict[str, Any] = {
        "qkv_bias": bias or family.qkv_bias,
        "output_bias": bias and not family.qkv_bias,
        "qk_norm": family.qk_norm,
        "sliding_window": window,
        "sliding_layers": layers,
        "norm_in_head": family.mtp == "mimo",
    }
    if architecture == "Gemma3ForCausalLM":
        rope = read_rope_by_kind(fields)
        settings["rope_theta"], settings["rope_scaling"], settings["sliding_rope_theta"] = rope
    else:
        settings["rope_theta"], settings["rope_scaling"] = read_rope(fields)
    if family.experts:
        settings |= _experts(family, fields)
    if family.gemma:
        settings |= _gemma(fields)
    return settings


def _refuse(family: Family, fields: _Fields) -> None:
    """Refuse options that change the result and that the decoder lacks."""
    only(fields, "mlp_bias", not fields.get("mlp_bias"), "false")
    quantization = "quantization_config"
    only(fields, quantization, not fields.get(quantization), "none: bf16, f16 or f32")
    if family.sliding == "none":
        only(fields, "use_sliding_window", not fields.get("use_sliding_window"), "false")
        layers = set(fields.get("layer_types") or ()) - {FULL}
        only(fields, "layer_types", not layers, f"{FULL} everywhere")
    if family.gemma:
        only(fields, "hidden_activation", fields["hidden_activation"] == GELU, GELU)
        name = "use_bidirectional_attention"
        only(fields, name, not fields.get(name), "false")
        if family.qk_norm:  # the reference reads it and does not apply it
            name = "attn_logit_softcapping"
            only(fields, name, fields.get(name) is None, "null with Gemma 3")
    else:
        act = fields.get("hidden_act", "silu")
        only(fields, "hidden_act", act in ("silu", "swish"), "silu")
    if family.experts == "qwen3":
        only(fields, "mlp_only_layers", not fields.get("mlp_only_layers"), "none")
        step = fields.get("decoder_sparse_step", 1)
        only(fields, "decoder_sparse_step", step == 1, "1: experts in every layer")


def only(fields: _Fields, name: str, fine: bool, supported: str) -> None:
    """Refuse a field by name unless its value is fine."""
    if not fine:
        raise ValueError(f"{name} = {fields[name]!r} is not supported, only {supported}")


def _sliding(family: Family, fields: _Fields) -> tuple[int | None, tuple[int, ...]]:
    """The window, and the layers that have it."""
    count, window = fields["num_hidden_layers"], fields.get("sliding_window")
    if isinstance(count, int) and count > MAX_LAYERS:
        raise ValueError(f"num_hidden_layers = {count} may be {MAX_LAYERS} at most")
    if family.sliding in ("switched", "upper") and not fields.get("use_sliding_window"):
        window = None
    first = fields.get("max_window_layers", 28) if family.sliding == "upper" else 0
    period = fields.get("sliding_window_pattern") or family.pattern
    sliding = [
        window is not None
        and family.sliding != "none"
        and index >= first
        and (family.sliding != "pattern" or (index + 1) % period > 0)
        for index in range(count)
    ]
    types = fields.get("layer_types")
    if types is not None:
        kinds = {FULL: False, SLIDING: True}
        # Of these families the reference reads the list; the others' layers are all of one kind.
        is_read = family.sliding in ("upper", "pattern") and window is not None
        is_known = len(types) == count and set(types) <= kinds.keys()
        if not is_known or (not is_read and [kinds[kind] for kind in types] != sliding):
            raise ValueError(
                f"layer_types = {types!r} is not supported: it needs {count} times {FULL} or "
                f"{SLIDING}, as the other fields have it"
            )
        sliding = [kinds[kind] for kind in types]
    layers = tuple(index for index, slides in enumerate(sliding) if slides)
    return (window, layers) if layers else (None, ())


def _experts(family: Family, fields: _Fields) -> dict[str, Any]:
    name = "num_local_experts" if "num_local_experts" in fields else "num_experts"
    is_qwen3 = family.experts == "qwen3"
    return {
        "num_experts": fields[name],
        "experts_per_token": fields["num_experts_per_tok"],
        "intermediate_size": fields["moe_intermediate_size" if is_qwen3 else "intermediate_size"],
        "renormalize_experts": bool(fields.get("norm_topk_prob")) if is_qwen3 else True,
    }


def _gemma(fields: _Fields) -> dict[str, Any]:
    return {
        "activation": "gelu_tanh",
        "post_norms": True,
        "norm_plus_one": True,
        "scale_embedding": True,
        "attention_scale": float(fields["query_pre_attn_scalar"]) ** -0.5,
        "attention_softcap": fields.get("attn_logit_softcapping"),
        "logit_softcap": fields.get("final_logit_softcapping"),
    }


_ARCHITECTURES = tuple(FAMILIES)
COMPUTE_DTYPES = ("bfloat16", "float32")


_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # as the Hugging Face Hub names a model


@dataclass(frozen=True)
class HfConfig:
    """The contents of config.json and generation_config.json.

    Attributes:
      architecture: one of `_ARCHITECTURES`.
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
        length = fields.get("max_position_embeddings")
        max_length = None if length is None else int(length)
    except KeyError as error:
        raise CheckpointError(f"{path} lacks {error}") from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    stops = _ids(path, fields.get("eos_token_id"))
    return HfConfig(architecture, model, stops, max_length)


def eos_token_ids(directory: Path) -> tuple[int, ...] | None:
    """The ids that end a text as generation_config.json says; None where it does not.

    Raises:
      CheckpointError: it is damaged.
    """
    path = directory / "generation_config.json"
    stops = read_json(path).get("eos_token_id") if path.is_file() else None
    return None if stops is None else _ids(path, stops)


def _what_it_is(name: Path) -> str:
    """A guess at a name without a config.json in it, and the way out."""
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
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path} holds a {type(fields).__name__}, not a JSON object")
    return fields


def _architecture(path: Path, fields: Mapping[str, Any]) -> str:
    names = fields.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if name not in _ARCHITECTURES:
        raise CheckpointError(
            f"{path}: architecture {name!r} is not supported; supported are "
            f"{', '.join(_ARCHITECTURES)}"
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
    if not all(isinstance(token_id, int) and token_id >= 0 for token_id in ids):
        raise CheckpointError(
            f"{path}: eos_token_id = {value!r} is neither an id nor a list of ids"
        )
    return tuple(ids)
