"""How rotary frequencies are changed for texts longer than those of the first training."""

from __future__ import annotations

import math
from dataclasses import dataclass

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
