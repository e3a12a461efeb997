"""Tiny random checkpoints of each family, written by `transformers` itself."""

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.llama.modeling_llama import LlamaRMSNorm

torch.set_num_threads(1)  # of models this small; two would wait for each other in a busy loop

VOCAB = 96
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}


def rope(kind, theta=500.0, **more):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=60)  # fmt: skip
# Frequencies of 8 pairs: one is kept, five are blended, two are slowed.
YARN = rope("yarn", factor=4.0, beta_fast=4.0, beta_slow=0.25, original_max_position_embeddings=64)
YARN_BY_KIND = {"rope_parameters": {
    "full_attention": YARN["rope_parameters"],
    "sliding_attention": rope("default", 50.0)["rope_parameters"],
}}  # fmt: skip
SCALED = {"rope_parameters": YARN["rope_parameters"] | {
    "mscale": 1.5, "mscale_all_dim": 0.5, "truncate": False}}  # fmt: skip
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA = {
    "num_hidden_layers": 3, "layer_types": MIXED, "sliding_window": 6, "head_dim": 12,
    "query_pre_attn_scalar": 20, "tie_word_embeddings": True,
}  # fmt: skip
TIED = {"tie_word_embeddings": True}
MIXTRAL = {"num_local_experts": 5, "num_experts_per_tok": 2}
MOE = {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
SLIDES = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}

# name: what transformers calls it, changed fields
FAMILIES = {
    "Llama 2": ("Llama", {"num_key_value_heads": 4}),
    "Llama 3": ("Llama", rope("default", 500_000.0)),
    "Llama 3.1": ("Llama", LLAMA3),
    "Llama 3.2, tied": ("Llama", LLAMA3 | TIED),
    "Llama, linear": ("Llama", rope("linear", 10_000.0, factor=4.0)),
    "Llama, attention bias, head size": ("Llama", {"attention_bias": True, "head_dim": 12}),
    "Qwen2": ("Qwen2", rope("default", 1_000_000.0)),
    "Qwen2, tied": ("Qwen2", TIED),
    "Qwen3": ("Qwen3", {"head_dim": 16}),
    "Qwen3, tied, attention bias": ("Qwen3", TIED | {"head_dim": 16, "attention_bias": True}),
    "Qwen2, some layers slide": ("Qwen2", SLIDES),
    "Llama, yarn": ("Llama", YARN | {"head_dim": 16}),
    "Qwen3, yarn with scales": ("Qwen3", SCALED | {"head_dim": 16}),
    "Mistral": ("Mistral", {"sliding_window": None}),
    "Mistral, sliding": ("Mistral", {"sliding_window": 6, "head_dim": 12}),
    "Mixtral": ("Mixtral", MIXTRAL),
    "Mixtral, sliding": ("Mixtral", MIXTRAL | {"num_local_experts": 4, "sliding_window": 6}),
    "Qwen3-MoE": ("Qwen3Moe", MOE),
    "Qwen3-MoE, renormalized": ("Qwen3Moe", MOE | {
        "num_experts_per_tok": 2, "norm_topk_prob": True}),
    "Gemma 2": ("Gemma2", GEMMA | {
        "attn_logit_softcapping": 3.0, "final_logit_softcapping": 8.0}),
    "Gemma 3": ("Gemma3", GEMMA),
    "Gemma 3, yarn, capped": ("Gemma3", GEMMA | YARN_BY_KIND | {"final_logit_softcapping": 8.0}),
}  # fmt: skip


def build(family: str, seed: int = 0, **changes):
    """A model with large weights, so that its choices are clear, and random norms and biases."""
    kind, fields = FAMILIES[family]
    config_class = getattr(transformers, f"{kind}{'Text' * (kind == 'Gemma3')}Config")
    torch.manual_seed(seed)
    model_class = getattr(transformers, f"{kind}ForCausalLM")
    return randomized(model_class(config_class(**(SIZES | fields | changes))))


def randomized(model):
    model = model.float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(0, 0.5)
            elif weight.ndim == 1:
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(0, 1.5 * weight.shape[-1] ** -0.5)
    return model


def write(directory: Path, model, *, dtype=torch.float32, shard_bytes: int | None = None) -> Path:
    """Save in transformers' own way, in one file or several."""
    size = "5GB" if shard_bytes is None else shard_bytes
    model.to(dtype).save_pretrained(directory, max_shard_size=size)
    return directory


def read(directory: Path):
    """Transformers' model of a directory, in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()


class Mtp(torch.nn.Module):
    """DeepSeek-V3's MTP module over a layer of the model's own kind, with a checkpoint's names."""

    def __init__(self, model):
        super().__init__()
        config, size = model.config, model.config.hidden_size
        self.enorm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.hnorm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.eh_proj = torch.nn.Linear(2 * size, size, bias=False)
        self.layer = type(model.model.layers[0])(config, layer_idx=0)
        self.shared_head = torch.nn.ModuleDict({"norm": LlamaRMSNorm(size, config.rms_norm_eps)})
        self.rotary = type(model.model.rotary_emb)(config)

    def forward(self, hidden, embedded):
        """Join hidden states [1, N, E] of positions 0..N-1 and embeddings of the next tokens."""
        n = hidden.shape[1]
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        positions = torch.arange(n)[None]
        mask = torch.full((n, n), float("-inf")).triu(1)[None, None]
        out = self.layer(
            x, attention_mask=mask, position_ids=positions,
            position_embeddings=self.rotary(x, positions),
        )  # fmt: skip
        out = out[0] if isinstance(out, tuple) else out
        return self.shared_head["norm"](out)


def add_mtp(directory: Path, model, *, copies: bool = True) -> Mtp:
    """Add a random MTP head to a saved single-file checkpoint, in DeepSeek-V3's layout."""
    torch.manual_seed(9)
    head = randomized(Mtp(model))
    file = directory / "model.safetensors"
    tensors = load_file(file)
    prefix = f"model.layers.{model.config.num_hidden_layers}."
    for name, weight in head.state_dict().items():
        tensors[prefix + name.removeprefix("layer.")] = weight.contiguous()
    if copies:
        tensors[prefix + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[prefix + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return head
