"""What a fused GPU kernel could save `linear_topk_logprobs`: a model of the time on an H100.

    python -m bench.linear_model          a line for each shape

As compiled for an H100, XLA copies a part of the head, multiplies, writes bfloat16 logits and reads
them twice: for maxima, and for sums. A fused kernel (TMA, wgmma) would read the head while it
multiplies, and keep the logits on the chip where K = 0. For a top K it would write them once, with
a maximum a group: the K groups with the largest are read afterwards, as computing them again would
read K groups of the head for every row. Its epilogue is taken to be hidden behind the product, and
the product to be as fast as XLA's, which is the most that it could be. Logits' bytes go at the
bandwidth of the memory, or of the L2 cache if the blocks stay there: the truth is in between. Left
out: starting XLA's kernels, and the order of the top K, which both ways need. Nothing of this was
measured.
"""

import itertools
import sys
from dataclasses import dataclass
from typing import NamedTuple

from bench.linear import Shape

READS = 2  # of each logit
LOGIT_BYTES = 2
WORTH = 1.2  # times the speed, from which on a kernel of its own is worth it
ROWS = (64, 256, 1024, 8192)


@dataclass(frozen=True)
class Chip:
    """An H100 SXM: NVIDIA's data sheet, but for what is a guess."""

    bfloat16_flops: float = 989e12  # a second, dense
    product_share: float = 0.75  # of it, that a large product reaches: a guess
    memory_bandwidth: float = 3.35e12  # bytes a second
    cache_bandwidth: float = 5.5e12  # of the L2 cache: a guess, from others' measurements


class Times(NamedTuple):
    """Seconds, and how many times as fast a fused kernel would be at most."""

    copy: float  # of the head, a part at a time; each then multiplies from the cache
    product: float  # of XLA's, and of the fused kernel's if the head's bytes do not decide
    fused: float  # the fused kernel's
    logits_in_memory: float
    logits_in_cache: float
    kept_in_memory: float  # the logits that a fused kernel writes
    kept_in_cache: float

    @property
    def most(self) -> float:
        """Where each block of logits goes through the memory."""
        xla = self.copy + self.product + self.logits_in_memory
        return xla / (self.fused + self.kept_in_memory)

    @property
    def least(self) -> float:
        """Where it stays in the cache."""
        xla = self.copy + self.product + self.logits_in_cache
        return xla / (self.fused + self.kept_in_cache)


def times(shape: Shape, chip: Chip | None = None) -> Times:
    """The model's times of a bfloat16 shape. Raises ValueError for another dtype."""
    if shape.dtype != "bfloat16":
        raise ValueError(f"dtype {shape.dtype!r}: the model has the products of bfloat16 alone")
    chip = chip or Chip()
    flops = 2 * shape.rows * shape.hidden * shape.vocabulary
    computed = flops / (chip.bfloat16_flops * chip.product_share)
    head = 2 * shape.hidden * shape.vocabulary
    logits = shape.rows * shape.vocabulary
    moved, kept = LOGIT_BYTES * (1 + READS) * logits, LOGIT_BYTES * logits if shape.k else 0
    return Times(
        copy=head / chip.memory_bandwidth,
        product=max(computed, head / chip.cache_bandwidth),
        fused=max(computed, head / chip.memory_bandwidth),
        logits_in_memory=moved / chip.memory_bandwidth,
        logits_in_cache=moved / chip.cache_bandwidth,
        kept_in_memory=kept / chip.memory_bandwidth,
        kept_in_cache=kept / chip.cache_bandwidth,
    )


def verdict(found: Times) -> str:
    """Whether the model says that a fused kernel is worth it."""
    if found.least >= WORTH:
        return "worth it"
    return "worth it if the blocks leave the cache" if found.most >= WORTH else "not worth it"


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
                f"{1e3 * found.logits_in_memory:.2f} ms in memory: fused at most "
                f"{found.least:.2f}x, {found.most:.2f}x; {verdict(found)}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
