"""One table of shapes for tests and benchmarks."""

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


# What the tests run on any machine. Each vocabulary takes another path through selection or cuts.
SMALL = tuple(
    Shape(rows, vocabulary, k, dtype)
    for rows, vocabulary, k in (
        (1, 1, 1),
        (4, 5, 5),
        (24, 257, 20),
        (9, 1000, 0),
        (5, 4096, 20),
        (3, 50_257, 5),
        (2, 32_000, 128),
        (3, 600, 512),
        (2, 50_257, 512),
    )
    for dtype in ("float32", "bfloat16", "float16")
)

# Where memory is held to a share of the logits.
MEMORY = tuple(
    Shape(rows, vocabulary, 20, dtype)
    for rows, vocabulary in ((24, 32_000), (64, 131_072), (64, 50_257), (1536, 151_936))
    for dtype in ("float32", "bfloat16")
)

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

# What is measured on a GPU.
GPU = tuple(
    Shape(rows, vocabulary, k, dtype)
    for rows in (4, 16, 64, 256, 1536)
    for vocabulary in (131_072, 151_936)
    for k in (0, 1, 5, 20, 64)
    for dtype in ("bfloat16", "float32")
)

# What is compiled for a GPU where there is none: every vocabulary, dtype and kind of schedule.
AOT = (
    *(Shape(1536, vocabulary, 20, "bfloat16") for vocabulary in VOCABULARIES.values()),
    *(Shape(64, vocabulary, 20, "float32") for vocabulary in VOCABULARIES.values()),
    *(Shape(256, 151_936, k, dtype) for k in (0, 1, 64, 128) for dtype in ("bfloat16", "float32")),
    *(Shape(1536, 50_257, 64, dtype) for dtype in ("bfloat16", "float32")),
    # Rows with edges, whose programs take places too.
    *(Shape(64, vocabulary, 20, "bfloat16") for vocabulary in (128_256, 131_072, 151_936)),
    Shape(4, 131_072, 20, "bfloat16"),
    Shape(4, 50_257, 128, "float32"),
    Shape(1, 32_000, 128, "float16"),
    Shape(2048, 262_144, 5, "float16"),
    # What the model of the time holds promises for, and a K above that of any server.
    *(Shape(1536, 131_072, 128, dtype) for dtype in ("bfloat16", "float32")),
    *(Shape(256, 131_072, 20, dtype) for dtype in ("bfloat16", "float32")),
    *(Shape(64, 131_072, k, "float32") for k in (20, 256, 512)),
    *(Shape(rows, 131_072, 20, "bfloat16") for rows in (528, 560)),
    Shape(64, 131_072, 512, "bfloat16"),
)
