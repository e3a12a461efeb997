"""How a row of logits is cut up for the GPU kernels: vectors, groups, blocks, steps, programs.

    row      V logits, contiguous; read by `splits` programs, each a run of whole steps, and by one
             more program for the edges, if there are any
    block    16 or 32 groups: what a program holds in registers at a time, a step; or an edge
    group    `group_width` contiguous logits, in index order: has one maximum
    vector   16 aligned bytes, what a thread loads at once

A warpgroup is 4 warps of 32 lanes. One load takes a [groups, W] piece of a block: one vector a
lane, 8 lanes a group of 256 logits and 4 a group of 128. So a thread reads 32 logits of a group
before its maximum takes three or two warp shuffles.

Where V is no multiple of a vector, most rows start between two of them. Blocks are then cut at
aligned places: `skew` logits before where they would be in an aligned row, so that vectors can be
loaded in every row. The blocks that reach over an end of the row are edges. They are moved inside,
read one logit at a time, and masked, so that every logit belongs to one group.

Rows that are sampled have groups of their own (`choose_fixed_schedule`): 256 logits from a multiple
of 256 on in every row, since a draw depends on them. There is no skew and no block is moved; where
rows start between two vectors, logits are loaded in the widest vectors that every row allows.
"""

import math
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedLayout
from jax.experimental.pallas import mosaic_gpu as plgpu

BLOCK = 4096  # logits, where the vocabulary has as many
VECTOR_BYTES = 16
WARPGROUP = 128
MIN_GROUP_WIDTH = 128  # pass 2 reads a group with a warpgroup
RUN = 8  # consecutive logits of a thread in a fixed group, however many it loads at once

# An H100 has 132 multiprocessors; with up to 96 registers a thread, 5 programs fit on each. So many
# run at once; a few more would run alone after them.
MULTIPROCESSORS = 132
PROGRAMS_AT_ONCE = MULTIPROCESSORS * 5
# Programs of a row that one launch does all of (`cluster_kernel`): as many as any chip allows. With
# fewer steps each, and more of them than fit, what they begin and end with is most of what they do.
CLUSTER, STEPS = 8, 4


Index: TypeAlias = int | jax.Array  # [] int32 of a kernel


class Layout(Protocol):
    """How a vector lies in the registers of a warpgroup: what Pallas's layouts have in common."""

    def reduce(self, axes: int) -> "Layout": ...
    def to_mgpu(self) -> FragmentedLayout: ...


@dataclass(frozen=True)
class Schedule:
    """The cut of one [N, V] array of logits; see the module's docstring. splits <= num_steps."""

    vocabulary: int
    dtype: str
    group_width: int
    splits: int
    fixed: bool = False  # groups begin at multiples of their width in every row

    @property
    def vector(self) -> int:
        """Logits in 16 bytes."""
        return VECTOR_BYTES // jnp.dtype(self.dtype).itemsize

    @property
    def aligned(self) -> bool:
        """Whether every row starts at a vector, as the array does."""
        return self.vocabulary % self.vector == 0

    @property
    def shifted(self) -> bool:
        """Whether rows have a skew, and so edges at both ends."""
        return not self.aligned and not self.fixed

    @property
    def groups_per_block(self) -> int:
        return 16 if self.vocabulary < BLOCK else BLOCK // self.group_width

    @property
    def block(self) -> int:
        """Logits per block."""
        return self.groups_per_block * self.group_width

    def piece(self, vector: int) -> tuple[int, int]:
        """The shape of what a warpgroup loads at once: a vector a thread, or a run of fixed groups.

        Which logits of a fixed group a thread has does not depend on the vectors that it loads them
        in, and so no sum's rounding does.
        """
        run = RUN if self.fixed else vector
        return self.groups_per_block, WARPGROUP // self.groups_per_block * run

    @property
    def num_blocks(self) -> int:
        """The number of blocks that cover a row with the largest skew."""
        skew = self.vector - 1 if self.shifted else 0
        return -(-(self.vocabulary + skew) // self.block)

    @property
    def num_groups(self) -> int:
        return self.num_blocks * self.groups_per_block

    @property
    def padded_groups(self) -> int:
        """Group maxima stored for a row: of 16 bits or 32, whole words for each of a warpgroup."""
        return -(-self.num_groups // (2 * WARPGROUP)) * 2 * WARPGROUP

    @property
    def first_block(self) -> int:
        """The first block of the first step."""
        return 1 if self.shifted else 0

    @property
    def num_steps(self) -> int:
        """The number of blocks that lie within the row, for any skew."""
        return self.vocabulary // self.block - self.first_block

    @property
    def edges(self) -> tuple[int, ...]:
        """The blocks that are in no step."""
        after = self.first_block + self.num_steps
        return (*range(self.first_block), *range(after, self.num_blocks))

    @property
    def programs(self) -> int:
        """The number of programs that read a row."""
        return self.splits + (1 if self.edges else 0)

    def skew(self, row: Index) -> Index:
        """The number of logits by which this row's blocks start earlier than those of row 0."""
        return row * (self.vocabulary % self.vector if self.shifted else 0) % self.vector

    def block_ids(self, block: Index, skew: Index) -> tuple[Index, Index, Index]:
        """The first id that a block reads, and the first and the last + 1 that belong to it."""
        begin = block * self.block - skew
        start = jnp.clip(begin, 0, self.vocabulary - self.block)
        return start, begin, begin + self.block

    def layout(self, vector: int) -> Layout:
        """Registers of a piece: a quarter of its groups a warp, a vector or a run a lane."""
        groups, width = self.piece(vector)
        tiles: tuple[tuple[int, ...], ...] = ((groups, width), (groups // 4, width))
        if not self.fixed or vector == RUN:
            tiling = plgpu.Tiling((*tiles, (vector,)))
            return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
        tiling = plgpu.Tiling((*tiles, (RUN,), (vector,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-6,), lane_dims=(-4, -3), vector_dim=-1)

    def common_vector(self, width: int) -> int:
        """The logits that a thread can load at once wherever rows of this width begin."""
        return math.gcd(self.vector, width)


def choose_fixed_schedule(num_targets: int, vocabulary: int, dtype: str) -> Schedule:
    """The cut of rows that are sampled: groups of 256 logits from a multiple of 256 on."""
    schedule = Schedule(vocabulary, dtype, 256, 0, fixed=True)
    return replace(schedule, splits=choose_splits(num_targets, schedule))


def choose_schedule(num_targets: int, vocabulary: int, k: int, dtype: str) -> Schedule:
    """Choose narrow groups for a large K, of which K are read again, and many splits for few rows.

    Rows are read by clusters where those are enough to keep every multiprocessor busy.
    """
    group_width = 256 if k <= 32 and vocabulary >= BLOCK else MIN_GROUP_WIDTH
    schedule = Schedule(vocabulary, dtype, group_width, 0)
    splits = choose_splits(num_targets, schedule)
    if num_targets * CLUSTER > MULTIPROCESSORS:
        others = 1 if schedule.edges else 0
        splits = min(splits, CLUSTER - others)
        # A cluster of three takes 101 to 104 registers, with which four programs fit on a
        # multiprocessor and not five: by the model a call of V = 32000 is 8 % slower than of four.
        if splits + others == 3 and splits < schedule.num_steps:
            splits += 1
    return replace(schedule, splits=splits)


def choose_splits(num_targets: int, schedule: Schedule) -> int:
    """How many programs share the whole steps of a row: as many as fit at once, or a cluster's."""
    steps, others = schedule.num_steps, 1 if schedule.edges else 0
    fitting = PROGRAMS_AT_ONCE // num_targets - others
    return min(steps, max(fitting, min(CLUSTER - others, -(-steps // STEPS))))
