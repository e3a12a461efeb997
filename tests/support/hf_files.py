"""Model directories in Hugging Face layout, written without torch: the layout's inverse."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from jax_specdec.checkpoint.hf_names import sources
from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.checkpoint.rope_scaling import RopeScaling
from jax_specdec.device.model.params import init_params, named_arrays

GEMMA = {
    "post_norms": True, "norm_plus_one": True, "scale_embedding": True, "activation": "gelu_tanh",
    "attention_scale": 12**-0.5,
}  # fmt: skip
CONFIGS = {
    "llama": ModelConfig.tiny(40, tie_embeddings=False, num_mtp_layers=0),
    "llama with an MTP head": ModelConfig.tiny(40, tie_embeddings=False),
    "llama 3.1, tied": ModelConfig.tiny(
        40, num_mtp_layers=0, rope_scaling=RopeScaling("llama3", 8.0, original_length=60)
    ),
    "qwen2": ModelConfig.tiny(40, tie_embeddings=False, num_mtp_layers=0, qkv_bias=True),
    "qwen3, every bias, MTP": ModelConfig.tiny(
        40, qk_norm=True, qkv_bias=True, output_bias=True, rope_scaling=RopeScaling("linear", 2.0)
    ),
    "mistral, sliding, yarn": ModelConfig.tiny(
        40, tie_embeddings=False, num_mtp_layers=0, sliding_window=5, sliding_layers=(0, 1),
        rope_scaling=RopeScaling("yarn", 4.0, 1.0, 32.0, 60, attention_factor=1.5),
    ),
    "mimo": ModelConfig.tiny(40, tie_embeddings=False, qkv_bias=True, norm_in_head=True),
    "mixtral": ModelConfig.tiny(
        40, tie_embeddings=False, num_mtp_layers=0, num_experts=4, experts_per_token=2
    ),
    "qwen3 moe": ModelConfig.tiny(
        40, tie_embeddings=False, num_mtp_layers=0, num_experts=3, experts_per_token=2,
        qk_norm=True, renormalize_experts=False,
    ),
    "gemma 2": ModelConfig.tiny(
        40, num_mtp_layers=0, num_layers=3, sliding_window=4, sliding_layers=(0, 2),
        attention_softcap=50.0, logit_softcap=30.0, **GEMMA,
    ),
    "gemma 3": ModelConfig.tiny(
        40, num_mtp_layers=0, num_layers=3, sliding_window=4, sliding_layers=(0, 1), qk_norm=True,
        sliding_rope_theta=100.0, **GEMMA,
    ),
}  # fmt: skip


def architecture_of(config):
    """The architecture whose checkpoint has such a configuration."""
    if config.post_norms:
        kind = "Gemma3" if config.qk_norm else "Gemma2"
    elif config.num_experts:
        kind = "Qwen3Moe" if config.qk_norm else "Mixtral"
    elif config.norm_in_head:
        kind = "MiMo"
    elif config.sliding_layers:
        kind = "Mistral"
    else:
        kind = "Qwen3" if config.qk_norm else "Qwen2" if config.qkv_bias else "Llama"
    return f"{kind}ForCausalLM"


def random_params(config, seed=0):
    """Random weights, so large that the model's choices are clear; norms are not 1."""
    rng = np.random.default_rng(seed)

    def draw(path, x):
        if path[-1].name.endswith("norm"):
            values = rng.uniform(0.5, 1.5, x.shape)
        else:
            values = rng.normal(size=x.shape) * 2 / np.sqrt(x.shape[-2])
        return jnp.asarray(values, config.dtype)

    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    return jax.tree_util.tree_map_with_path(draw, shapes)


def hf_fields(config):
    """The fields of config.json as transformers before version 5 wrote it."""
    fields = {
        "architectures": [architecture_of(config)],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": config.dtype,
        "attention_bias": config.output_bias,
        "max_position_embeddings": 512,
        "eos_token_id": 2,
    }
    if config.num_experts:
        fields |= {
            "num_local_experts": config.num_experts,
            "num_experts_per_tok": config.experts_per_token,
            "moe_intermediate_size": config.intermediate_size,
            "norm_topk_prob": config.renormalize_experts,
        }
    if config.post_norms:
        fields |= {
            "layer_types": [
                "sliding_attention" if index in config.sliding_layers else "full_attention"
                for index in range(config.num_layers)
            ],
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": config.attention_softcap,
            "final_logit_softcapping": config.logit_softcap,
            "rope_local_base_freq": config.sliding_rope_theta,
        }
    fields["sliding_window"] = config.sliding_window
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "yarn":
        fields["rope_scaling"] = {
            "rope_type": "yarn", "factor": scaling.factor, "truncate": scaling.truncate,
            "beta_slow": scaling.low_frequency_factor, "beta_fast": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_length,
            "attention_factor": scaling.attention_factor,
        }  # fmt: skip
    elif scaling is not None:
        fields["rope_scaling"] = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            fields["rope_scaling"] |= {
                "low_freq_factor": scaling.low_frequency_factor,
                "high_freq_factor": scaling.high_frequency_factor,
                "original_max_position_embeddings": scaling.original_length,
            }
    return fields


def hf_tensors(config, params):
    """The tensors by their names in a checkpoint."""
    arrays, tensors = named_arrays(params), {}
    for source in sources(config, architecture_of(config)):
        value = np.asarray(arrays[source.leaf])
        value = value if source.layer is None else value[source.layer]
        value = value if source.expert is None else value[source.expert]
        if source.swapped:
            value = np.roll(value, config.hidden_size, axis=0)
        tensors[source.name] = np.ascontiguousarray(value.T if source.transposed else value)
    return tensors


def write(directory, config, params=None, *, shards=1, dtype=None, fields=None, tensors=None):
    """Write a whole model directory; `tensors` replaces those of `params`."""
    directory.mkdir(parents=True, exist_ok=True)
    if tensors is None:
        tensors = hf_tensors(config, random_params(config) if params is None else params)
    if dtype is not None:
        tensors = {name: value.astype(jnp.dtype(dtype)) for name, value in tensors.items()}
    (directory / "config.json").write_text(json.dumps(hf_fields(config) | (fields or {})))
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    names, weight_map = list(tensors), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[shard::shards]
        save_file({name: tensors[name] for name in mine}, directory / file)
        weight_map |= dict.fromkeys(mine, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory
