"""A GGUF file as a model directory in Hugging Face layout would be: configuration and tensors.

What llama.cpp computes and the decoder does not is refused by name. For llama, the rows of queries
and keys are in another order, in which pairs of neighbors are turned; `permuted` marks them.
"""

import re
from typing import Any

from jax_specdec.checkpoint.gguf_file import Gguf
from jax_specdec.checkpoint.model_config import CheckpointError

ARCHITECTURES = {
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
    if kind not in tuple(ARCHITECTURES):  # which may be a list, in a damaged file
        raise CheckpointError(
            f"{file.path}: a GGUF file of architecture {kind!r} is not supported; supported are "
            f"{', '.join(ARCHITECTURES)}: use the Hugging Face directory that it was made from"
        )
    own = {
        name.removeprefix(f"{kind}."): value
        for name, value in file.fields.items()
        if name.startswith(f"{kind}.")
    }
    if unknown := sorted(own.keys() - _KNOWN):
        raise CheckpointError(
            f"{file.path}: {kind}.{unknown[0]} = {own[unknown[0]]!r} is not known here: results "
            "could change without it"
        )
    for name in own.keys() - {"rope.scaling.type"}:
        if not isinstance(own[name], int | float):
            raise CheckpointError(f"{file.path}: {kind}.{name} = {own[name]!r} is no number")
    embedding = file.tensors.get("token_embd.weight")
    if lacking := [name for name in (*SIZES.values(), "context_length") if name not in own]:
        raise CheckpointError(f"{file.path} lacks {kind}.{lacking[0]}")
    if embedding is None:
        raise CheckpointError(f"{file.path} lacks token_embd.weight")
    heads = own["attention.head_count"]
    head_dim = own.get("attention.key_length", own["embedding_length"] // max(heads, 1))
    for name in ("attention.value_length", "rope.dimension_count"):
        if own.get(name, head_dim) != head_dim:
            raise CheckpointError(
                f"{file.path}: {kind}.{name} = {own[name]} is not supported, only the length of a "
                f"key, {head_dim}"
            )
    rope = {"rope_type": str(own.get("rope.scaling.type", "none")).replace("none", "default")}
    if "rope.scaling.factor" in own:
        rope["factor"] = own["rope.scaling.factor"]
    if rope["rope_type"] not in ("default", "linear"):
        raise CheckpointError(
            f"{file.path}: {kind}.rope.scaling.type = {rope['rope_type']!r} is not supported, only "
            "none and linear"
        )
    return {
        "architectures": [ARCHITECTURES[kind]],
        **{name: own[stored] for name, stored in SIZES.items()},
        "num_key_value_heads": own.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": own["context_length"],
        "rope_theta": own.get("rope.freq_base", 10_000.0),
        "rope_scaling": rope,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_id": stop_ids(file),
        "dtype": "bfloat16" if embedding.kind == "BF16" else "float32",
    }


def stop_ids(file: Gguf) -> list[int]:
    """The ids that end a text, or an answer."""
    names = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot"))
    return list(dict.fromkeys(file.fields[name] for name in names if name in file.fields))


def hf_name(name: str) -> str:
    """What transformers calls a tensor; a name that is not known stays."""
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
