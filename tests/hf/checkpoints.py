"""Tiny random checkpoints of each family, written by `transformers` itself."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
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
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 60,
}
# Frequencies of 8 pairs: one is kept, five are blended, two are slowed.
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "beta_fast": 4.0, "beta_slow": 0.25,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN_BY_KIND = {
    "full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}  # fmt: skip
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA = {
    "num_hidden_layers": 3, "layer_types": MIXED, "sliding_window": 6, "head_dim": 12,
    "query_pre_attn_scalar": 20, "tie_word_embeddings": True,
}  # fmt: skip

# name: class, configuration class, changed fields
FAMILIES = {
    "Llama 2": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 4}),
    "Llama 3": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": {
        "rope_type": "default", "rope_theta": 500_000.0}}),
    "Llama 3.1": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "Llama 3.2, tied": (LlamaForCausalLM, LlamaConfig, {
        "rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "Llama, linear": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": {
        "rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}}),
    "Llama, attention bias, head size": (LlamaForCausalLM, LlamaConfig, {
        "attention_bias": True, "head_dim": 12}),
    "Qwen2": (Qwen2ForCausalLM, Qwen2Config, {"rope_parameters": {
        "rope_type": "default", "rope_theta": 1_000_000.0}}),
    "Qwen2, tied": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "Qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
    "Qwen3, tied, attention bias": (Qwen3ForCausalLM, Qwen3Config, {
        "head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
    "Qwen2, some layers slide": (Qwen2ForCausalLM, Qwen2Config, {
        "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "Llama, yarn": (LlamaForCausalLM, LlamaConfig, {"head_dim": 16, "rope_parameters": YARN}),
    "Qwen3, yarn with scales": (Qwen3ForCausalLM, Qwen3Config, {
        "head_dim": 16, "rope_parameters": YARN | {
            "mscale": 1.5, "mscale_all_dim": 0.5, "truncate": False}}),
    "Mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "Mistral, sliding": (MistralForCausalLM, MistralConfig, {"sliding_window": 6, "head_dim": 12}),
    "Mixtral": (MixtralForCausalLM, MixtralConfig, {
        "num_local_experts": 5, "num_experts_per_tok": 2}),
    "Mixtral, sliding": (MixtralForCausalLM, MixtralConfig, {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}),
    "Qwen3-MoE": (Qwen3MoeForCausalLM, Qwen3MoeConfig, {
        "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}),
    "Qwen3-MoE, renormalized": (Qwen3MoeForCausalLM, Qwen3MoeConfig, {
        "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
        "norm_topk_prob": True}),
    "Gemma 2": (Gemma2ForCausalLM, Gemma2Config, GEMMA | {
        "attn_logit_softcapping": 3.0, "final_logit_softcapping": 8.0}),
    "Gemma 3": (Gemma3ForCausalLM, Gemma3TextConfig, GEMMA),
    "Gemma 3, yarn, capped": (Gemma3ForCausalLM, Gemma3TextConfig, GEMMA | {
        "rope_parameters": YARN_BY_KIND, "final_logit_softcapping": 8.0}),
}  # fmt: skip


def build(family: str, seed: int = 0):
    """A model with large weights, so that its choices are clear, and random norms and biases."""
    model_class, config_class, changes = FAMILIES[family]
    config = config_class(**(SIZES | changes))
    torch.manual_seed(seed)
    model = model_class(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight") or "layernorm" in name:
                weight.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                weight.normal_(0, 0.5)
            else:
                weight.normal_(0, 1.5 * weight.shape[-1] ** -0.5)
    return model


def write(directory: Path, model, *, dtype=torch.float32, shard_bytes: int | None = None) -> Path:
    """Save in transformers' own way, in one file or several."""
    size = "5GB" if shard_bytes is None else shard_bytes
    model.to(dtype).save_pretrained(directory, max_shard_size=size)
    return directory


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
    head = Mtp(model).float().eval()
    with torch.no_grad():
        for weight in head.parameters():
            if weight.ndim == 1:
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(0, 1.5 * weight.shape[-1] ** -0.5)
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
    config["num_nextn_predict_layers"] = 1
    (directory / "config.json").write_text(json.dumps(config))
    return head
