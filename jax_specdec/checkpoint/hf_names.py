"""How a Hugging Face checkpoint's tensors become the decoder's, by name and shape.

An MTP head of Llama, Qwen2 or Qwen3 is recognized in DeepSeek-V3's layout
(https://github.com/deepseek-ai/DeepSeek-V3, README_WEIGHTS.md): layer L, after the decoder's last,
has the tensors of a layer and `enorm`, `hnorm`, `eh_proj` and `shared_head.norm`. It may store
`embed_tokens` and `shared_head.head` again, which must then equal the decoder's. MiMo has its own
(https://github.com/XiaomiMiMo/MiMo, modeling_mimo.py): `model.mtp_layers.0`.
"""

import re
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from pathlib import Path

from jax_specdec.checkpoint.gguf_file import config_fields, is_gguf, read_gguf
from jax_specdec.checkpoint.hf_config import FAMILIES, HfConfig, config_of, read_config
from jax_specdec.checkpoint.hf_files import (
    StoredTensor,
    check_shapes,
    gguf_tensors,
    stored_tensors,
)
from jax_specdec.checkpoint.model_config import CheckpointError, ModelConfig

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_UNUSED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # a constant


@dataclass(frozen=True)
class TensorSource:
    """One stored tensor, and its place in the decoder.

    Attributes:
      leaf: the dotted path in `ModelParams`.
      layer: the index in the leaf's leading axis; None for a leaf without one.
      expert: the index in the axis behind that one; None for a leaf without one.
      name: its name in the file.
      shape: its shape in the file.
      transposed: it is stored [out, in], as torch's linear layers are, and becomes [in, out].
      swapped: after that, the two halves of the inputs change places.
    """

    leaf: str
    layer: int | None
    name: str
    shape: tuple[int, ...]
    transposed: bool = False
    swapped: bool = False
    expert: int | None = None


@dataclass(frozen=True)
class HfModel:
    """A checkpoint whose files fit its configuration; no weight was read yet.

    Attributes:
      directory: where the files are.
      hf: what the configuration files say.
      config: the decoder's sizes, with an MTP head if the checkpoint has one.
      stored: every tensor in the files, by name.
      copies: (name, name) of tensors that are stored twice and must be equal.
    """

    directory: Path
    hf: HfConfig
    config: ModelConfig
    stored: dict[str, StoredTensor]
    copies: tuple[tuple[str, str], ...]

    @property
    def sources(self) -> list[TensorSource]:
        """Every tensor to load."""
        return list(tensor_sources(self.config, self.hf.architecture))


def open_model(directory: str | Path, *, dtype: str = "") -> HfModel:
    """Read the configuration and the files' headers, and check that they fit.

    Args:
      directory: in Hugging Face layout, or a GGUF file.
      dtype: the type to compute in; see `hf_config.read_config`.

    Raises:
      FileNotFoundError: a file is missing.
      CheckpointError: something is unsupported or damaged, or does not fit; says what and where.
    """
    directory = Path(directory)
    if is_gguf(directory):
        file = read_gguf(directory)
        hf, stored = config_of(directory, config_fields(file), dtype), gguf_tensors(file)
    else:
        hf, stored = read_config(directory, dtype=dtype), stored_tensors(directory)
    if hf.model.num_layers * max(1, hf.model.num_experts) > len(stored):
        raise CheckpointError(
            f"{directory} does not fit its configuration: {len(stored)} tensors are too few for "
            f"{hf.model.num_layers} layers of {max(1, hf.model.num_experts)} feed-forward parts"
        )
    config = replace(hf.model, num_mtp_layers=1)
    layout = FAMILIES[hf.architecture].mtp
    projections = [
        source.name for source in _mtp(config, layout) if source.leaf == "mtp.projection"
    ]
    has_mtp = any(name in stored for name in projections)
    config = replace(hf.model, num_mtp_layers=int(has_mtp))
    shapes = {source.name: source.shape for source in tensor_sources(config, hf.architecture)}
    check_shapes(stored, shapes, directory)
    head = EMBEDDING if config.tie_embeddings else HEAD
    copies = {HEAD: EMBEDDING} if config.tie_embeddings else {}
    if has_mtp and layout == "deepseek":
        mtp = f"model.layers.{config.num_layers}."
        copies |= {f"{mtp}embed_tokens.weight": EMBEDDING, f"{mtp}shared_head.head.weight": head}
    _refuse_unknown(hf, stored, shapes.keys() | copies.keys())
    present = tuple(pair for pair in copies.items() if pair[0] in stored)
    check_shapes(stored, {name: stored[of].shape for name, of in present}, directory)
    return HfModel(directory, hf, config, stored, present)


def _refuse_unknown(hf: HfConfig, stored: dict[str, StoredTensor], known_names: Set[str]) -> None:
    unknown = sorted(name for name in stored.keys() - known_names if not _UNUSED.fullmatch(name))
    if unknown:
        raise CheckpointError(
            f"{stored[unknown[0]].file}: {unknown[0]} has no place in a {hf.architecture} with "
            f"this configuration ({len(unknown)} such tensors): results could change without it"
        )


def tensor_sources(config: ModelConfig, architecture: str) -> Iterator[TensorSource]:
    """Every tensor that a model of this configuration and architecture has."""
    d = config.hidden_size
    experts = FAMILIES[architecture].experts
    yield TensorSource("embedding", None, EMBEDDING, (config.vocab_size, d))
    for index in range(config.num_layers):
        yield from _layer(config, "layers", index, f"model.layers.{index}.", experts)
    yield TensorSource("final_norm", None, "model.norm.weight", (d,))
    if not config.tie_embeddings:
        yield TensorSource("head", None, HEAD, (config.vocab_size, d), transposed=True)
    if config.num_mtp_layers:
        yield from _mtp(config, FAMILIES[architecture].mtp)


def _mtp(config: ModelConfig, layout: str) -> Iterator[TensorSource]:
    """The tensors of an MTP head; none for an architecture without one."""
    if not layout:
        return
    d, prefix = config.hidden_size, "model.mtp_layers.0."
    names = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    if layout == "deepseek":
        prefix = f"model.layers.{config.num_layers}."
        names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    token_norm, hidden_norm, projection, final_norm = (f"{prefix}{name}.weight" for name in names)
    yield TensorSource("mtp.token_norm", None, token_norm, (d,))
    yield TensorSource("mtp.hidden_norm", None, hidden_norm, (d,))
    # DeepSeek puts the token's half first, MiMo and the decoder the hidden state's.
    yield TensorSource("mtp.projection", None, projection, (d, 2 * d), True, layout == "deepseek")
    yield TensorSource("mtp.final_norm", None, final_norm, (d,))
    yield from _layer(config, "mtp.layers", 0, prefix, "")


def _layer(
    config: ModelConfig, leaf: str, index: int, prefix: str, experts: str
) -> Iterator[TensorSource]:
    d = config.hidden_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    matrices = {
        "query": ("self_attn.q_proj", (q, d)),
        "key": ("self_attn.k_proj", (kv, d)),
        "value": ("self_attn.v_proj", (kv, d)),
        "output": ("self_attn.o_proj", (d, q)),
    }
    for name, (stored, shape) in matrices.items():
        yield TensorSource(
            f"{leaf}.{name}", index, f"{prefix}{stored}.weight", shape, transposed=True
        )
    yield from _feed_forward(config, leaf, index, prefix, experts)
    # Gemma calls the norm before the feed-forward part otherwise: it has one behind attention.
    behind = "pre_feedforward" if config.post_norms else "post_attention"
    vectors = {
        "attention_norm": ("input_layernorm.weight", d),
        "mlp_norm": (f"{behind}_layernorm.weight", d),
    }
    if config.post_norms:
        vectors["attention_post_norm"] = ("post_attention_layernorm.weight", d)
        vectors["mlp_post_norm"] = ("post_feedforward_layernorm.weight", d)
    if config.qkv_bias:
        vectors["query_bias"] = ("self_attn.q_proj.bias", q)
        vectors["key_bias"] = ("self_attn.k_proj.bias", kv)
        vectors["value_bias"] = ("self_attn.v_proj.bias", kv)
    if config.output_bias:
        vectors["output_bias"] = ("self_attn.o_proj.bias", d)
    if config.qk_norm:
        vectors["query_norm"] = ("self_attn.q_norm.weight", config.head_dim)
        vectors["key_norm"] = ("self_attn.k_norm.weight", config.head_dim)
    for name, (stored, size) in vectors.items():
        yield TensorSource(f"{leaf}.{name}", index, prefix + stored, (size,))


def _feed_forward(
    config: ModelConfig, leaf: str, index: int, prefix: str, experts: str
) -> Iterator[TensorSource]:
    """The feed-forward part: one, or a router and experts."""
    d, f, x = config.hidden_size, config.intermediate_size, config.num_experts
    block, names = "mlp", ("gate_proj", "up_proj", "down_proj")
    if experts == "mixtral":
        block, names = "block_sparse_moe", ("w1", "w3", "w2")
    shapes = {"gate": (f, d), "up": (f, d), "down": (d, f)}
    if x:
        yield TensorSource(f"{leaf}.router", index, f"{prefix}{block}.gate.weight", (x, d), True)
    for expert in range(x) if x else (None,):
        part = block if expert is None else f"{block}.experts.{expert}"
        for (name, shape), stored in zip(shapes.items(), names, strict=True):
            full = f"{prefix}{part}.{stored}.weight"
            yield TensorSource(f"{leaf}.{name}", index, full, shape, transposed=True, expert=expert)
