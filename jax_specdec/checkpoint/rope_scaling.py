"""How rotary frequencies are changed for texts longer than those of the first training.

A Hugging Face configuration says it in `rope_parameters` (transformers 5), or in `rope_theta` and
`rope_scaling` (before). Gemma 3 has two sets: nested by the kind of layer, or
`rope_local_base_freq` beside the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ROPE_SCALINGS = ("linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are slowed down, so that a model reads past its first training length.

    "linear" divides every frequency by `factor`. The others divide the frequencies that turn less
    than `low_frequency_factor` times in `original_length` positions, keep those that turn more than
    `high_frequency_factor` times, and blend between the two: "llama3"
    (https://arxiv.org/abs/2407.21783, as in Llama 3.1) in proportion to the turns, "yarn"
    (https://arxiv.org/abs/2309.00071) in proportion to a pair's index, between whole indices where
    `truncate` says so. "yarn" multiplies queries and keys by `attention_factor`, too.

    Raises:
      ValueError: a value is outside its range.
    """

    kind: str
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_length: int = 8192
    attention_factor: float = 1.0
    truncate: bool = True

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
        if not (math.isfinite(self.attention_factor) and self.attention_factor > 0):
            raise ValueError(
                f"attention_factor must be positive and finite, not {self.attention_factor!r}"
            )
        if self.kind != "yarn" and not (self.attention_factor == 1 and self.truncate):
            raise ValueError(f"attention_factor and truncate are yarn's, not {self.kind}'s")

    def yarn_bounds(self, theta: float, head_dim: int) -> tuple[float, float]:
        """The pairs' indices between which "yarn" blends; earlier pairs keep their frequency."""
        low, high = (
            head_dim
            * math.log(self.original_length / (turns * 2 * math.pi))
            / (2 * math.log(theta))
            for turns in (self.high_frequency_factor, self.low_frequency_factor)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        return low, high + 0.001 if low == high else high


def yarn_attention_factor(factor: float, mscale: float = 0, mscale_all_dim: float = 0) -> float:
    """The factor of queries and keys where a configuration states none."""

    def at(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    return at(mscale) / at(mscale_all_dim) if mscale and mscale_all_dim else at(1)


KNOWN = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "low_freq_factor",
    "high_freq_factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
    "attention_factor", "mscale", "mscale_all_dim", "truncate", "finetuned",
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"


def read_rope(fields: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """The rotary base, and how the frequencies are slowed down.

    Raises:
      KeyError: a number is missing.
      ValueError: something of it is not supported.
    """
    rope = _object(fields, "rope_parameters") or _object(fields, "rope_scaling")
    theta = float(rope.get("rope_theta", fields.get("rope_theta", 10_000.0)))
    for where in (rope, fields):
        if where.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(
                f"partial_rotary_factor = {where['partial_rotary_factor']!r} is not supported, "
                "only 1: the decoder turns every value of a head"
            )
    if unknown := sorted(rope.keys() - KNOWN):
        raise ValueError(
            f"rotary positions have a field {unknown[0]} = {rope[unknown[0]]!r}, which is not "
            "known here: results could change without it"
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", float(rope["factor"]))
    if kind == "llama3":
        return theta, RopeScaling(
            "llama3",
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            _original_length(rope, fields),
        )
    if kind == "yarn":
        return theta, _yarn(rope, fields)
    raise ValueError(
        f"rotary positions of type {kind!r} are not supported; supported are default, linear, "
        "llama3 and yarn"
    )


def read_rope_by_kind(fields: Mapping[str, Any]) -> tuple[float, RopeScaling | None, float]:
    """`read_rope` of full layers, and the rotary base of sliding ones (Gemma 3)."""
    rope = _object(fields, "rope_parameters")
    if not {FULL, SLIDING} & rope.keys():
        return *read_rope(fields), float(fields.get("rope_local_base_freq", 10_000.0))
    defaults = {FULL: 1_000_000.0, SLIDING: 10_000.0}
    if unknown := sorted(rope.keys() - defaults.keys()):
        raise ValueError(f"rope_parameters of {unknown[0]!r} are not supported")
    (theta, scaling), (sliding, sliding_scaling) = (
        read_rope({**fields, "rope_theta": default, "rope_parameters": rope.get(kind) or {}})
        for kind, default in defaults.items()
    )
    if sliding_scaling is not None:
        raise ValueError(
            f"rotary positions of sliding layers must be default, not {sliding_scaling.kind!r}"
        )
    return theta, scaling, sliding


def _object(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = fields.get(name) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} = {value!r} must be an object")
    return value


def _yarn(rope: Mapping[str, Any], fields: Mapping[str, Any]) -> RopeScaling:
    length = _original_length(rope, fields)
    factor = rope["factor"]
    factor = float(fields["max_position_embeddings"] / length if factor is None else factor)
    attention = rope.get("attention_factor")
    if attention is None:
        scales = (float(rope.get(name) or 0) for name in ("mscale", "mscale_all_dim"))
        attention = yarn_attention_factor(factor, *scales)
    return RopeScaling(
        "yarn",
        factor,
        float(rope.get("beta_slow") or 1),
        float(rope.get("beta_fast") or 32),
        length,
        float(attention),
        bool(rope.get("truncate", True)),
    )


def _original_length(rope: Mapping[str, Any], fields: Mapping[str, Any]) -> int:
    """Positions of the first training; a field beside the others counts first."""
    name = "original_max_position_embeddings"
    length = fields.get(name) or rope.get(name)
    return int(fields["max_position_embeddings"] if length is None else length)
