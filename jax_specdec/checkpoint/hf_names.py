"""How a Hugging Face checkpoint's tensors become the decoder's, by name and shape. No jax.

An MTP head is recognized in DeepSeek-V3's layout (https://github.com/deepseek-ai/DeepSeek-V3,
README_WEIGHTS.md): layer L, after the decoder's last, has the tensors of a layer and `enorm`,
`hnorm`, `eh_proj` and `shared_head.norm`. It may store `embed_tokens` and `shared_head.head` again,
which must then equal the decoder's.
"""

import re
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from pathlib import Path

from jax_specdec.checkpoint.hf_config import HfConfig, read_config
from jax_specdec.checkpoint.hf_files import StoredTensor, check_shapes, stored_tensors
from jax_specdec.checkpoint.model_config import CheckpointError, ModelConfig

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_UNUSED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # a constant


@dataclass(frozen=True)
class Source:
    """One stored tensor, and its place in the decoder.

    Attributes:
      leaf: the dotted path in `ModelParams`.
      layer: the index in the leaf's leading axis; None for a leaf without one.
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
    def sources(self) -> list[Source]:
        """Every tensor to load."""
        return list(sources(self.config))


def open_model(directory: str | Path, *, dtype: str = "") -> HfModel:
    """Read the configuration and the files' headers, and check that they fit.

    Args:
      directory: in Hugging Face layout.
      dtype: the type to compute in; see `hf_config.read_config`.

    Raises:
      FileNotFoundError: a file is missing.
      CheckpointError: something is unsupported or damaged, or does not fit; says what and where.
    """
    directory = Path(directory)
    hf = read_config(directory, dtype=dtype)
    stored = stored_tensors(directory)
    mtp = f"model.layers.{hf.model.num_layers}."
    has_mtp = f"{mtp}eh_proj.weight" in stored
    config = replace(hf.model, num_mtp_layers=int(has_mtp))
    wanted = {source.name: source.shape for source in sources(config)}
    check_shapes(stored, wanted, directory)
    head = EMBEDDING if config.tie_embeddings else HEAD
    copies = {HEAD: EMBEDDING} if config.tie_embeddings else {}
    if has_mtp:
        copies |= {f"{mtp}embed_tokens.weight": EMBEDDING, f"{mtp}shared_head.head.weight": head}
    _refuse_unknown(hf, stored, wanted.keys() | copies.keys())
    present = tuple(pair for pair in copies.items() if pair[0] in stored)
    check_shapes(stored, {name: stored[of].shape for name, of in present}, directory)
    return HfModel(directory, hf, config, stored, present)


def _refuse_unknown(hf: HfConfig, stored: dict[str, StoredTensor], known: Set[str]) -> None:
    unknown = sorted(name for name in stored.keys() - known if not _UNUSED.fullmatch(name))
    if unknown:
        raise CheckpointError(
            f"{stored[unknown[0]].file}: {unknown[0]} has no place in a {hf.architecture} with "
            f"this config.json ({len(unknown)} such tensors): results could change without it"
        )


def sources(config: ModelConfig) -> Iterator[Source]:
    """Every tensor that a model of this configuration has."""
    d, mtp = config.hidden_size, f"model.layers.{config.num_layers}."
    yield Source("embedding", None, EMBEDDING, (config.vocab_size, d))
    for index in range(config.num_layers):
        yield from _layer(config, "layers", index, f"model.layers.{index}.")
    yield Source("final_norm", None, "model.norm.weight", (d,))
    if not config.tie_embeddings:
        yield Source("head", None, HEAD, (config.vocab_size, d), transposed=True)
    if config.num_mtp_layers:
        yield Source("mtp.token_norm", None, f"{mtp}enorm.weight", (d,))
        yield Source("mtp.hidden_norm", None, f"{mtp}hnorm.weight", (d,))
        # DeepSeek puts the token's half first, the decoder the hidden state's.
        yield Source("mtp.projection", None, f"{mtp}eh_proj.weight", (d, 2 * d), True, True)
        yield Source("mtp.final_norm", None, f"{mtp}shared_head.norm.weight", (d,))
        yield from _layer(config, "mtp.layers", 0, mtp)


def _layer(config: ModelConfig, leaf: str, index: int, prefix: str) -> Iterator[Source]:
    d, f = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    matrices = {
        "query": ("self_attn.q_proj", (q, d)),
        "key": ("self_attn.k_proj", (kv, d)),
        "value": ("self_attn.v_proj", (kv, d)),
        "output": ("self_attn.o_proj", (d, q)),
        "gate": ("mlp.gate_proj", (f, d)),
        "up": ("mlp.up_proj", (f, d)),
        "down": ("mlp.down_proj", (d, f)),
    }
    for name, (stored, shape) in matrices.items():
        yield Source(f"{leaf}.{name}", index, f"{prefix}{stored}.weight", shape, transposed=True)
    vectors = {
        "attention_norm": ("input_layernorm.weight", d),
        "mlp_norm": ("post_attention_layernorm.weight", d),
    }
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
        yield Source(f"{leaf}.{name}", index, prefix + stored, (size,))
