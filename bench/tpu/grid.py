"""Which programs `bench.aot_tpu` compiles."""

from bench.tpu.programs import CLOCKS
from pallas_kernels.testing.shapes import Shape

LIMITED = tuple(
    Shape(rows, vocabulary, k, dtype)
    for rows in (64, 256)
    for vocabulary in (131_072, 151_936)
    for k in (0, 20, 64)
    for dtype in ("bfloat16", "float32")
)
OTHERS = (
    *(Shape(rows, 131_072, 20, "bfloat16") for rows in (1, 2048)),
    Shape(64, 50_257, 20, "bfloat16"),
    Shape(64, 262_144, 20, "float32"),
    Shape(64, 131_072, 512, "bfloat16"),
    *(Shape(64, 131_072, k, "float16") for k in (0, 20)),
)
# Read by XLA: rows that are too long for the kernel, and shorter ones, by choice.
BY_XLA = (
    *(
        Shape(64, vocabulary, k, dtype)
        for vocabulary in (2048, 32_768, 131_072, 655_360)
        for k in (0, 20)
        for dtype in ("bfloat16", "float32")
    ),
    Shape(64, 32_768, 64, "bfloat16"),
    Shape(1, 655_360, 0, "float32"),
    Shape(256, 16_384, 0, "bfloat16"),
    *(Shape(256, 131_072, 0, dtype) for dtype in ("bfloat16", "float32")),
)
SAMPLED = (Shape(64, 131_072, 0, "bfloat16"), Shape(64, 151_936, 0, "float32"))
# On both sides of the rule's limits: what it chooses, and the other.
RULE = (
    *(Shape(64, vocabulary, 0, "float32") for vocabulary in (16_384, 32_768)),
    *(Shape(rows, 131_072, 0, "bfloat16") for rows in (8, 16)),
    *(Shape(256, vocabulary, 1, "float32") for vocabulary in (2048, 8192)),
    *(Shape(64, vocabulary, 5, "float32") for vocabulary in (128, 512)),
)
STEPS = (("v5e", 4, 32_768), ("v6e", 4, 32_768))  # chip, devices, vocabulary
LINEAR = Shape(64, 151_936, 20, "float32")  # of a head [V, 4096] in bfloat16
QUICK = tuple(Shape(64, 131_072, k, "bfloat16") for k in (0, 20))
FEW = (
    Shape(64, 131_072, 0, "bfloat16"),
    Shape(64, 131_072, 20, "float32"),
)  # with what rare rows need


def programs(quick: bool) -> list[tuple[str, str, Shape]]:
    """Chip, way and shape of each program to compile."""
    shapes = QUICK if quick else (*LIMITED, *OTHERS)
    found = [(chip, "kernel", shape) for chip in ("v5e", "v6e") for shape in shapes]
    found.append(("v6e", "linear", LINEAR))
    if quick:
        return found
    found += [(chip, "kernel", shape) for chip in ("v5p", "7x") for shape in LIMITED]
    found += [(chip, "groups", shape) for chip in ("v5e", "v6e") for shape in SAMPLED]
    found += [("v6e", "plain", shape) for shape in LIMITED]
    found += [("v6e", way, shape) for shape in RULE for way in ("kernel", "xla")]
    found += [("v6e", way, shape) for shape in BY_XLA for way in ("plain", "xla")]
    found += [("v6e", "plain", shape) for shape in OTHERS if shape.rows in (1, 2048)]
    found += [(chip, "full", shape) for chip in CLOCKS for shape in FEW]
    return list(dict.fromkeys(found))


def name(chip: str, way: str, shape: Shape) -> str:
    """A program's name."""
    return f"{chip} {way} {shape.rows} {shape.vocabulary} {shape.k} {shape.dtype}"


def steps_name(chip: str, devices: int, vocabulary: int) -> str:
    """The name of a worker's programs."""
    return f"{chip} steps {devices} {vocabulary}"
