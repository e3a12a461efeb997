"""What a fused GPU kernel saves `linear_topk_logprobs`: a model of the time on an H100.

    python -m bench.linear_model          a line for each shape

As compiled for an H100, XLA copies a part of the head, multiplies, writes bfloat16 logits and reads
them twice: for maxima, and for sums. The fused kernel (`linear_groups`)
reads the head while it multiplies, and keeps the logits on the chip. It has K = 0 alone: for a top
K it would write the logits once, with a maximum a group, and read K groups of each row afterwards.

Two ends of a range. The least: logits of XLA's blocks stay in the L2 cache, the kernel's tiles take
their operands from that cache at its guessed bandwidth, and nothing hides what reduces the logits.
The most: XLA's logits go through the memory, the kernel's product is as fast as XLA's, and one
warpgroup reduces while the other multiplies. Left out: starting XLA's kernels, a few for each part;
the logit of each row's token, which both find beforehand; and the order of the top K. Nothing of
this was measured.
"""

import itertools
import sys
from dataclasses import dataclass
from typing import NamedTuple

from bench.linear import Shape
from pallas_kernels.backends.mosaic_gpu import linear_tiles

READS = 2  # of each logit
LOGIT_BYTES = 2
WORTH = 1.2  # times the speed, from which on a kernel of its own is worth it
ROWS = (256, 1024, 8192)  # fewer are one block, of which XLA copies nothing
# Instructions a logit after the product, as compiled: `bench.aot_linear --check` holds it.
EPILOGUE = 9.5


@dataclass(frozen=True)
class Chip:
    """An H100 SXM: NVIDIA's data sheet, but for what is a guess."""

    bfloat16_flops: float = 989e12  # a second, dense
    product_share: float = 0.75  # of it, that a large product reaches: a guess
    memory_bandwidth: float = 3.35e12  # bytes a second
    cache_bandwidth: float = 5.5e12  # of the L2 cache: a guess, from others' measurements
    multiprocessors: int = 132
    instructions: float = 132 * 128 * 1.83e9  # of one lane, a second: 1.83 GHz makes 989e12


class Times(NamedTuple):
    """Seconds of both ways."""

    copy: float  # of the head, a part at a time; each then multiplies from the cache
    product: float  # of XLA's
    logits_in_memory: float
    logits_in_cache: float
    fused: float  # the kernel, if all goes well
    fused_slow: float  # the kernel, if nothing is hidden and its operands come slowly
    kept_in_memory: float  # the logits that a kernel with a top K would write
    kept_in_cache: float

    @property
    def most(self) -> float:
        """How many times as fast the kernel is, at the better end."""
        xla = self.copy + self.product + self.logits_in_memory
        return xla / (self.fused + self.kept_in_memory)

    @property
    def least(self) -> float:
        """At the worse end."""
        xla = self.copy + self.product + self.logits_in_cache
        return xla / (self.fused_slow + self.kept_in_cache)


def times(shape: Shape, chip: Chip | None = None) -> Times:
    """The model's times of a bfloat16 shape. Raises ValueError for another dtype."""
    if shape.dtype != "bfloat16":
        raise ValueError(f"dtype {shape.dtype!r}: the model has the products of bfloat16 alone")
    chip = chip or Chip()
    reached = chip.bfloat16_flops * chip.product_share
    head = 2 * shape.hidden * shape.vocabulary
    logits = shape.rows * shape.vocabulary
    moved, kept = LOGIT_BYTES * (1 + READS) * logits, LOGIT_BYTES * logits if shape.k else 0
    fused, fused_slow = fused_times(shape, chip)
    return Times(
        copy=head / chip.memory_bandwidth,
        product=max(2 * logits * shape.hidden / reached, head / chip.cache_bandwidth),
        logits_in_memory=moved / chip.memory_bandwidth,
        logits_in_cache=moved / chip.cache_bandwidth,
        fused=fused,
        fused_slow=fused_slow,
        kept_in_memory=kept / chip.memory_bandwidth,
        kept_in_cache=kept / chip.cache_bandwidth,
    )


def fused_times(shape: Shape, chip: Chip) -> tuple[float, float]:
    """The kernel's seconds at both ends: whole waves of tiles, or the memory's if it is slower."""
    rows = max(linear_tiles.ROWS, shape.rows)
    tiles = linear_tiles.choose_tiles(rows, shape.vocabulary, shape.hidden)
    waves = -(-tiles.number // linear_tiles.programs(tiles, chip.multiprocessors))
    logits = linear_tiles.ROWS * linear_tiles.GROUP * chip.multiprocessors  # of a wave
    product = 2 * logits * shape.hidden / (chip.bfloat16_flops * chip.product_share)
    # Programs of a pair load half of the tokens each.
    loaded = linear_tiles.ROWS + linear_tiles.GROUP // tiles.together
    operands = 2 * shape.hidden * loaded * chip.multiprocessors / chip.cache_bandwidth
    epilogue = logits * EPILOGUE / chip.instructions
    bands = -(-tiles.row_tiles // (tiles.together * tiles.band))
    read = 2 * shape.hidden * (bands * shape.vocabulary + rows) / chip.memory_bandwidth
    fast = waves * max(product, epilogue)
    slow = waves * (max(product, operands) + epilogue)
    return max(fast, read), max(slow, read)


def verdict(found: Times) -> str:
    """Whether the model says that the kernel is worth it."""
    if found.least >= WORTH:
        return "worth it"
    return "worth it at the better end" if found.most >= WORTH else "not worth it"


def main() -> int:
    """Print the comparison."""
    for hidden in (1024, 2048, 4096, 8192):
        for rows, k in itertools.product(ROWS, (0, 20)):
            found = times(Shape(rows, hidden, 151_936, k, "bfloat16"))
            print(
                f"N={rows} H={hidden} V=151936 K={k} bfloat16: "
                f"the head's copy {1e3 * found.copy:.2f} ms, "
                f"the product {1e3 * found.product:.2f} ms, "
                f"its logits {1e3 * found.logits_in_cache:.2f} ms in the cache, "
                f"{1e3 * found.logits_in_memory:.2f} ms in memory; fused "
                f"{1e3 * found.fused:.2f} to {1e3 * found.fused_slow:.2f} ms: "
                f"{found.least:.2f}x to {found.most:.2f}x; {verdict(found)}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
