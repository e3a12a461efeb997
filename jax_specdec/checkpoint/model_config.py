"""The sizes of a model, which the engine reads too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from jax_specdec.checkpoint.rope_scaling import RopeScaling

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # of a number of each type
WEIGHT_DTYPES = tuple(DTYPE_BYTES)
ACTIVATIONS = ("silu", "gelu_tanh")


class CheckpointError(ValueError):
    """Files are not a checkpoint, are damaged, or do not fit their own configuration."""


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a Llama-style decoder with an optional MTP head; hashable, so static under jit.

    Optional parts make it the other models of that kind: Qwen2 has `qkv_bias`, Qwen3 `qk_norm`,
    Llama 3.1 a `rope_scaling`, Mistral a `sliding_window`, Mixtral and Qwen3-MoE experts, and Gemma
    most of what follows `num_experts`. `checkpoint/hf_config.py` says which family has what.

    Raises:
      ValueError: a size is not positive or does not fit the others.
    """

    vocab_size: int  # V
    hidden_size: int  # D
    num_layers: int  # L
    num_heads: int  # H
    num_kv_heads: int  # KVH, divides H
    head_dim: int  # Dh, even
    intermediate_size: int  # F
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    num_mtp_layers: int = 0  # 0 or 1
    dtype: str = "float32"  # the type of weights, activations, caches and logits
    qkv_bias: bool = False  # added to queries, keys and values
    output_bias: bool = False  # added to what attention returns
    qk_norm: bool = False  # RMSNorm of each query and key head, before they are turned
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None  # positions that a sliding layer's row sees, its own too
    sliding_layers: tuple[int, ...] = ()  # their indices, ascending; the others see everything
    sliding_rope_theta: float | None = None  # theirs, without scaling; None: as in all layers
    num_experts: int = 0  # X; each has `intermediate_size` columns. 0: one feed-forward part
    experts_per_token: int = 0
    renormalize_experts: bool = True  # the chosen experts' shares add up to 1
    activation: str = "silu"  # of the gate
    post_norms: bool = False  # RMSNorm of what attention and feed-forward part return, too
    norm_plus_one: bool = False  # RMSNorm multiplies by 1 + weight
    scale_embedding: bool = False  # embeddings times sqrt(D)
    attention_scale: float | None = None  # of queries times keys; None: 1 / sqrt(Dh)
    attention_softcap: float | None = None  # c: scores become c tanh(score / c)
    logit_softcap: float | None = None  # c: logits become c tanh(logit / c)
    vocab_padding: int = 0  # tokens of probability 0 behind the others, so that devices share all
    row_tile: int | None = None  # rows of a product, whose bits are their own; None: all at once
    row_step: int | None = None  # fewer rows are padded to a multiple of it; None: to a tile
    norm_in_head: bool = False  # hidden states lack the final norm; `llama.logits` applies it

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads",
                     "head_dim", "intermediate_size"):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, not {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary positions turn pairs")
        for name in ("rope_theta", "norm_eps", "sliding_rope_theta", "attention_scale",
                     "attention_softcap", "logit_softcap"):  # fmt: skip
            value, optional = getattr(self, name), name not in ("rope_theta", "norm_eps")
            if not ((optional and value is None) or (math.isfinite(value) and value > 0)):
                rest = ", or None" if optional else ""
                raise ValueError(f"{name} must be positive and finite{rest}, not {value!r}")
        self._check_sliding()
        counts = self.experts_per_token, self.num_experts
        if not all(isinstance(count, int) for count in counts):
            raise ValueError(
                f"experts_per_token={self.experts_per_token!r} and num_experts="
                f"{self.num_experts!r} must be integers"
            )
        if not 0 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} must be from 0 to "
                f"num_experts={self.num_experts}"
            )
        if self.num_experts and not self.experts_per_token:
            raise ValueError(f"{self.num_experts} experts need experts_per_token of 1 or more")
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation must be one of {', '.join(ACTIVATIONS)}, not {self.activation!r}"
            )
        if self.vocab_padding < 0:
            raise ValueError(f"vocab_padding must be 0 or more, not {self.vocab_padding!r}")
        for name in ("row_tile", "row_step"):
            value = getattr(self, name)
            if value is not None and (value < 1 or value % 8):
                raise ValueError(f"{name} must be a multiple of 8, or None, not {value!r}")
        if self.num_mtp_layers not in (0, 1):
            raise ValueError(f"num_mtp_layers must be 0 or 1, not {self.num_mtp_layers!r}")
        if self.dtype not in WEIGHT_DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(WEIGHT_DTYPES)}, not {self.dtype!r}")

    def _check_sliding(self) -> None:
        layers, window = self.sliding_layers, self.sliding_window
        if list(layers) != sorted(
            layer for layer in set(layers) if layer in range(self.num_layers)
        ):
            raise ValueError(
                f"sliding_layers must be ascending indices below num_layers={self.num_layers}, "
                f"not {layers}"
            )
        if layers and (window is None or window < 1):
            raise ValueError(f"sliding layers need a sliding_window of 1 or more, not {window!r}")

    @classmethod
    def tiny(cls, vocab_size: int = 32, **changes: Any) -> ModelConfig:
        """A float32 model with an MTP head and a few thousand weights, for tests."""
        sizes: dict[str, Any] = {
            "vocab_size": vocab_size,
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 8,
            "intermediate_size": 24,
            "num_mtp_layers": 1,
        }
        return cls(**(sizes | changes))

    @property
    def row_tiles(self) -> tuple[int, int] | None:
        """`row_tile` and `row_step`, as `over_rows` takes them; None without tiles.

        Experts have whole tiles: their products of fewer rows have other bits.
        """
        if self.row_tile is None:
            return None
        return self.row_tile, self.row_tile if self.num_experts else self.row_step or self.row_tile

    @property
    def num_columns(self) -> int:
        """Logits of a row: V and the padding."""
        return self.vocab_size + self.vocab_padding

    @property
    def num_parameters(self) -> int:
        """The number of weights."""
        d, f, h = self.hidden_size, self.intermediate_size, self.head_dim
        q, kv = self.num_heads * h, self.num_kv_heads * h
        layer = (4 if self.post_norms else 2) * d + 2 * d * (q + kv)
        layer += self.num_experts * (3 * d * f + d) if self.num_experts else 3 * d * f
        layer += self.qkv_bias * (q + 2 * kv) + self.output_bias * d + self.qk_norm * 2 * h
        mtp = self.num_mtp_layers * (layer + 2 * d * d + 3 * d)
        heads = self.num_columns * d * (1 if self.tie_embeddings else 2)
        return self.num_layers * layer + mtp + heads + d

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, in the type that the model computes in."""
        return self.num_parameters * DTYPE_BYTES[self.dtype]

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values; `from_dict` is the inverse."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> ModelConfig:
        """The configuration that `to_dict` wrote; a missing field has its default.

        Raises:
          TypeError: a configuration has no such field.
          ValueError: a value is outside its range.
        """
        values = dict(fields)
        if values.get("rope_scaling") is not None:
            values["rope_scaling"] = RopeScaling(**values["rope_scaling"])
        values["sliding_layers"] = tuple(values.get("sliding_layers", ()))  # JSON has lists
        return cls(**values)


def cache_bytes(config: ModelConfig, num_slots: int, max_length: int, num_shards: int = 1) -> int:
    """Bytes of the decoder's and the MTP head's keys and values on each device."""
    layers = config.num_layers + config.num_mtp_layers
    heads = config.num_kv_heads
    heads = heads if heads % num_shards else heads // num_shards
    entry = 2 * heads * config.head_dim * DTYPE_BYTES[config.dtype]
    return layers * num_slots * max_length * entry
