"""Model directories in Hugging Face layout, written without torch: the layout's inverse."""

import json

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from jax_specdec.checkpoint.hf_names import tensor_sources
from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.checkpoint.rope_scaling import RopeScaling
from jax_specdec.device.model.params import named_arrays
from tests.support.random_params import drawn

GEMMA = {
    "post_norms": True, "norm_plus_one": True, "scale_embedding": True, "activation": "gelu_tanh",
    "attention_scale": 12**-0.5,
}  # fmt: skip
OF_GEMMA = GEMMA | {"num_mtp_layers": 0, "num_layers": 3, "sliding_window": 4}
PLAIN = {"tie_embeddings": False, "num_mtp_layers": 0}
EXPERTS = PLAIN | {"experts_per_token": 2}
YARN = RopeScaling("yarn", 4.0, 1.0, 32.0, 60, attention_factor=1.5)
LLAMA3 = RopeScaling("llama3", 8.0, original_length=60)
CAPS = {"attention_softcap": 50.0, "logit_softcap": 30.0}
EVERY_BIAS = {"qkv_bias": True, "output_bias": True}
CHANGES = {
    "llama": PLAIN,
    "llama with an MTP head": {"tie_embeddings": False},
    "llama 3.1, tied": {"num_mtp_layers": 0, "rope_scaling": LLAMA3},
    "qwen2": PLAIN | {"qkv_bias": True},
    "qwen3, every bias, MTP": EVERY_BIAS
    | {"qk_norm": True, "rope_scaling": RopeScaling("linear", 2.0)},
    "mistral, sliding, yarn": PLAIN
    | {"sliding_window": 5, "sliding_layers": (0, 1), "rope_scaling": YARN},
    "mimo": {"tie_embeddings": False, "qkv_bias": True, "norm_in_head": True},
    "mixtral": EXPERTS | {"num_experts": 4},
    "qwen3 moe": EXPERTS | {"num_experts": 3, "qk_norm": True, "renormalize_experts": False},
    "gemma 2": OF_GEMMA | CAPS | {"sliding_layers": (0, 2)},
    "gemma 3": OF_GEMMA | {"sliding_layers": (0, 1), "qk_norm": True, "sliding_rope_theta": 100.0},
}
CONFIGS = {name: ModelConfig.tiny(40, **changes) for name, changes in CHANGES.items()}


# As `ModelConfig`, config.json and a GGUF file name them.
NUMBERS = (
    ("hidden_size", "hidden_size", "embedding_length"),
    ("num_layers", "num_hidden_layers", "block_count"),
    ("num_heads", "num_attention_heads", "attention.head_count"),
    ("num_kv_heads", "num_key_value_heads", "attention.head_count_kv"),
    ("head_dim", "head_dim", "attention.key_length"),
    ("intermediate_size", "intermediate_size", "feed_forward_length"),
    ("rope_theta", "rope_theta", "rope.freq_base"),
    ("norm_eps", "rms_norm_eps", "attention.layer_norm_rms_epsilon"),
)


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

    def draw(name, shape):
        if name.endswith("norm"):
            return rng.uniform(0.5, 1.5, shape)
        return rng.normal(size=shape) * 2 / np.sqrt(shape[-2])

    return drawn(config, draw)


def hf_fields(config):
    """The fields of config.json as transformers before version 5 wrote it."""
    fields = {theirs: getattr(config, ours) for ours, theirs, _ in NUMBERS} | {
        "architectures": [architecture_of(config)],
        "vocab_size": config.vocab_size,
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
                f"{'sliding' if at in config.sliding_layers else 'full'}_attention"
                for at in range(config.num_layers)
            ],
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": config.attention_softcap,
            "final_logit_softcapping": config.logit_softcap,
            "rope_local_base_freq": config.sliding_rope_theta,
        }
    fields["sliding_window"] = config.sliding_window
    if (scaling := config.rope_scaling) is not None:
        names = ("beta_slow", "beta_fast")
        if scaling.kind != "yarn":
            names = ("low_freq_factor", "high_freq_factor")
        factors = scaling.low_frequency_factor, scaling.high_frequency_factor
        fields["rope_scaling"] = dict(zip(names, factors, strict=True)) | {
            "rope_type": scaling.kind,
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_length,
            "attention_factor": scaling.attention_factor,
            "truncate": scaling.truncate,
        }
    return fields


def hf_tensors(config, params):
    """The tensors by their names in a checkpoint."""
    arrays, tensors = named_arrays(params), {}
    for source in tensor_sources(config, architecture_of(config)):
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
