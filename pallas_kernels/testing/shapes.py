"""Shapes of calls, and vocabularies of models."""

from dataclasses import dataclass

VOCABULARIES = {
    "Llama 2": 32_000,
    "GPT-2, odd": 50_257,
    "Llama 3": 128_256,
    "2**17": 131_072,
    "Qwen": 151_936,
    "Gemma": 262_144,
}


@dataclass(frozen=True)
class Shape:
    """Target rows R, vocabulary V, top K and the logits' dtype."""

    rows: int
    vocabulary: int
    k: int
    dtype: str


# The one that a CPU is held to, against log_softmax + top_k + gather + count.
CPU_SPEED = Shape(64, 131_072, 20, "float32")

# Where a CPU is compared with the best of several ways.
CPU_GRID = tuple(
    Shape(rows, vocabulary, k, dtype)
    for rows in (1, 4, 8, 64, 256)
    for vocabulary in (32_000, 151_936)
    for k in (0, 1, 5, 20, 128)
    for dtype in ("float32", "bfloat16")
)
