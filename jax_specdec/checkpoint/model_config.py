"""The sizes of a model, which the engine reads too. No jax."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

DTYPES = ("float32", "bfloat16", "float16")
ROPE_SCALINGS = ("linear", "llama3")


class CheckpointError(ValueError):
    """Files are not a checkpoint, are damaged, or do not fit their own configuration."""


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are slowed down, so that a model reads past its first training length.

    "linear" divides every frequency by `factor`. "llama3" (https://arxiv.org/abs/2407.21783, as in
    Llama 3.1) divides the frequencies that turn less than `low_frequency_factor` times in
    `original_length` positions, keeps those that turn more than `high_frequency_factor` times, and
    blends between the two.

    Raises:
      ValueError: a value is outside its range.
    """

    kind: str
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_length: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ROPE_SCALINGS:
            raise ValueError(
                f"rope scaling must be one of {', '.join(ROPE_SCALINGS)}, not {self.kind!r}"
            )
        if not (math.isfinite(self.factor) and self.factor >= 1):
            raise ValueError(f"a rope scaling's factor must be at least 1, not {self.factor!r}")
        if not 0 < self.low_frequency_factor < self.high_frequency_factor < math.inf:
            raise ValueError(
                "a rope scaling needs 0 < low_frequency_factor < high_frequency_factor, not "
                f"{self.low_frequency_factor!r} and {self.high_frequency_factor!r}"
            )
        if self.original_length < 1:
            raise ValueError(f"original_length must be positive, not {self.original_length!r}")


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a Llama-style decoder with an optional MTP head; hashable, so static under jit.

    Optional parts make it the other models of that family: Qwen2 has `qkv_bias`, Qwen3 `qk_norm`,
    Llama 3.1 a `rope_scaling`.

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
        for name in ("rope_theta", "norm_eps"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be positive and finite, not {value!r}")
        if self.num_mtp_layers not in (0, 1):
            raise ValueError(f"num_mtp_layers must be 0 or 1, not {self.num_mtp_layers!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")

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

    @classmethod
    def llama_1b(cls, **changes: Any) -> ModelConfig:
        """The sizes of Llama 3.2 1B, without its stretched rotary frequencies."""
        sizes: dict[str, Any] = {
            "vocab_size": 128_256,
            "hidden_size": 2048,
            "num_layers": 16,
            "num_heads": 32,
            "num_kv_heads": 8,
            "head_dim": 64,
            "intermediate_size": 8192,
            "rope_theta": 500_000.0,
            "dtype": "bfloat16",
        }
        return cls(**(sizes | changes))

    @property
    def num_parameters(self) -> int:
        """The number of weights."""
        d, f, h = self.hidden_size, self.intermediate_size, self.head_dim
        q, kv = self.num_heads * h, self.num_kv_heads * h
        layer = 2 * d + 2 * d * (q + kv) + 3 * d * f
        layer += self.qkv_bias * (q + 2 * kv) + self.output_bias * d + self.qk_norm * 2 * h
        mtp = self.num_mtp_layers * (layer + 2 * d * d + 3 * d)
        heads = self.vocab_size * d * (1 if self.tie_embeddings else 2)
        return self.num_layers * layer + mtp + heads + d

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
        given = dict(fields)
        if given.get("rope_scaling") is not None:
            given["rope_scaling"] = RopeScaling(**given["rope_scaling"])
        return cls(**given)
