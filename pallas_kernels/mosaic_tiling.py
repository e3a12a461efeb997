"""How a row of logits is cut up for the GPU kernels: words, vectors, groups, blocks, steps, splits.

    row      V logits, contiguous; read by `splits` programs, each a run of whole steps
    step     `blocks_per_step` blocks: what a program holds in registers at a time
    block    16 groups; the last block starts early (at V - block) rather than ending late
    group    `group_width` contiguous logits, in index order: has one maximum
    word     one logit; of bfloat16, where V is even, a pair of logits read as one uint32

A warpgroup is 4 warps of 32 lanes. One load takes a [16, W] piece of a block: 4 rows (groups) a
warp, 8 lanes a row, one vector of words a lane. So a group's maximum takes three warp shuffles.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

GROUPS_PER_BLOCK = 16
LANES_PER_GROUP = 8
VECTOR_BYTES = 16
WARPGROUP = 128
MIN_GROUP_WIDTH = 128  # pass 2 reads a group with a warpgroup

# Enough programs to keep an H100 (132 multiprocessors) busy with about 5 on each.
WANTED_PROGRAMS = 132 * 5


@dataclass(frozen=True)
class Tiling:
    """The cut of one [N, V] array of logits; see the module's docstring."""

    vocabulary: int
    dtype: str
    group_width: int
    blocks_per_step: int
    splits: int

    @property
    def paired(self) -> bool:
        """Whether a word is a pair of bfloat16 logits."""
        return self.dtype == "bfloat16" and self.vocabulary % 2 == 0

    @property
    def logits_per_word(self) -> int:
        return 2 if self.paired else 1

    @property
    def vector(self) -> int:
        """Words per lane and load: 16 bytes where every row starts aligned to that."""
        word_bytes = jnp.dtype(self.dtype).itemsize * self.logits_per_word
        return math.gcd(self.vocabulary // self.logits_per_word, VECTOR_BYTES // word_bytes)

    @property
    def load_width(self) -> int:
        """Words of each group in one load."""
        return LANES_PER_GROUP * self.vector

    @property
    def loads_per_block(self) -> int:
        return self.group_width // (self.load_width * self.logits_per_word)

    @property
    def block(self) -> int:
        """Logits per block."""
        return GROUPS_PER_BLOCK * self.group_width

    @property
    def num_blocks(self) -> int:
        return -(-self.vocabulary // self.block)

    @property
    def num_groups(self) -> int:
        return self.num_blocks * GROUPS_PER_BLOCK

    @property
    def padded_groups(self) -> int:
        """Group maxima stored for a row: whole vectors of a warpgroup."""
        return -(-self.num_groups // WARPGROUP) * WARPGROUP

    @property
    def num_steps(self) -> int:
        """Whole steps of whole blocks; the blocks after them are the tail."""
        return self.vocabulary // (self.block * self.blocks_per_step)

    @property
    def tail(self) -> tuple[tuple[int, int], ...]:
        """(start, first new logit) of each block after the last whole step."""
        blocks = range(self.num_steps * self.blocks_per_step, self.num_blocks)
        return tuple(
            (min(b * self.block, self.vocabulary - self.block), b * self.block) for b in blocks
        )

    @property
    def layout(self) -> Any:
        """Registers of a [16, load_width] piece: 4 rows a warp, 8 lanes a row."""
        rows, width = GROUPS_PER_BLOCK // 4, self.load_width
        return plgpu.Layout.TILED(
            plgpu.Tiling(((4 * rows, width), (rows, width), (self.vector,))),
            warp_dims=(-5,),
            lane_dims=(-3, -2),
            vector_dim=-1,
        )


def choose_tiling(num_targets: int, vocabulary: int, k: int, dtype: str) -> Tiling:
    """Narrow groups for a large K (pass 2 reads K of them) and for few rows (more splits)."""
    group_width = 256 if k <= 32 and vocabulary >= GROUPS_PER_BLOCK * 256 else MIN_GROUP_WIDTH
    blocks_per_step = 4 if group_width == MIN_GROUP_WIDTH else 2
    if dtype == "float32":
        blocks_per_step //= 2
    while blocks_per_step > 1:
        steps = vocabulary // (GROUPS_PER_BLOCK * group_width * blocks_per_step)
        if num_targets * steps >= WANTED_PROGRAMS and steps > 0:
            break
        blocks_per_step //= 2
    tiling = Tiling(vocabulary, dtype, group_width, blocks_per_step, 1)
    splits = min(max(1, tiling.num_steps), -(-WANTED_PROGRAMS // num_targets))
    return Tiling(vocabulary, dtype, group_width, blocks_per_step, splits)
