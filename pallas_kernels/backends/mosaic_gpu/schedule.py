"""How a row of logits is cut up for the GPU kernels: vectors, groups, blocks, steps, programs.

    row      V logits, contiguous; read by `splits` programs, each a run of whole steps, and by one
             more program for the edge, if there is one
    block    16 groups, 4096 logits: what a program holds in registers at a time, a step; or the
             row's end
    group    256 logits from a multiple of 256 on, in every row: has one sum
    part     a group, or a half of it: has one maximum, by which pass 2 takes what it reads again
    run      8 consecutive logits, what a thread holds of each 64 of a group
    vector   16 aligned bytes, what a thread loads at once

A warpgroup is 4 warps of 32 lanes. One load takes a [16, 64] piece of a block: a run a lane, 8
lanes a group. So a thread reads 32 logits of a group before its maximum takes three warp shuffles.

Which logits a thread has does not depend on where the row starts. Where rows start between two
vectors, a run is loaded in the widest vectors that every row allows.
"""

import math
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedLayout
from jax.experimental.pallas import mosaic_gpu as plgpu

GROUP = 256  # logits
GROUPS_PER_BLOCK = 16
BLOCK = GROUPS_PER_BLOCK * GROUP  # logits
VECTOR_BYTES = 16
WARPGROUP = 128
RUN = 8  # consecutive logits of a thread in a group, however many it loads at once
NARROW = 128  # logits of a part where many of them are read again
AT_A_TIME = 1024  # groups of a row that pass 2 holds at a time for its sum

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
    part_width: int  # logits of a part: 256 or 128
    splits: int

    @property
    def vector(self) -> int:
        """Logits in 16 bytes."""
        return VECTOR_BYTES // jnp.dtype(self.dtype).itemsize

    @property
    def aligned(self) -> bool:
        """Whether every row starts at a vector, as the array does."""
        return self.vocabulary % self.vector == 0

    @property
    def block(self) -> int:
        """Logits per block."""
        return BLOCK

    @property
    def piece(self) -> tuple[int, int]:
        """The shape of what a warpgroup holds of a block at once: a run a thread."""
        return GROUPS_PER_BLOCK, WARPGROUP // GROUPS_PER_BLOCK * RUN

    @property
    def num_blocks(self) -> int:
        """The number of blocks that cover a row."""
        return -(-self.vocabulary // self.block)

    @property
    def num_groups(self) -> int:
        """The groups of all blocks: the last ones may have no token."""
        return self.num_blocks * GROUPS_PER_BLOCK

    @property
    def padded_groups(self) -> int:
        """Places of a row's groups: of each of a warpgroup whole words, in 16 bits too."""
        each = 2 * WARPGROUP if self.num_groups <= AT_A_TIME else AT_A_TIME
        return -(-self.num_groups // each) * each

    @property
    def parts_per_group(self) -> int:
        return GROUP // self.part_width

    @property
    def num_parts(self) -> int:
        return self.num_groups * self.parts_per_group

    @property
    def padded_parts(self) -> int:
        """Places of a row's maxima."""
        return self.padded_groups * self.parts_per_group

    @property
    def num_steps(self) -> int:
        """The number of whole blocks."""
        return self.vocabulary // self.block

    @property
    def edges(self) -> tuple[int, ...]:
        """The block that is no step, if there is one."""
        return tuple(range(self.num_steps, self.num_blocks))

    @property
    def programs(self) -> int:
        """The number of programs that read a row."""
        return self.splits + (1 if self.edges else 0)

    def layout(self, vector: int) -> Layout:
        """Registers of a piece: a quarter of its groups a warp, a run a lane."""
        groups, width = self.piece
        tiles: tuple[tuple[int, ...], ...] = ((groups, width), (groups // 4, width))
        if vector == RUN:
            tiling = plgpu.Tiling((*tiles, (vector,)))
            return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
        tiling = plgpu.Tiling((*tiles, (RUN,), (vector,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-6,), lane_dims=(-4, -3), vector_dim=-1)

    def common_vector(self, width: int) -> int:
        """The logits that a thread can load at once wherever rows of this width begin."""
        return math.gcd(self.vector, width)


def choose_read_schedule(num_targets: int, vocabulary: int, dtype: str) -> Schedule:
    """The cut of rows whose two passes are launches of their own."""
    schedule = Schedule(vocabulary, dtype, GROUP, 0)
    return replace(schedule, splits=choose_splits(num_targets, schedule))


def choose_schedule(num_targets: int, vocabulary: int, k: int, dtype: str) -> Schedule:
    """Choose narrow parts for a large K, of which K are read again, and many splits for few rows.

    Rows are read by clusters where those are enough to keep every multiprocessor busy.
    """
    schedule = Schedule(vocabulary, dtype, GROUP if k <= 32 else NARROW, 0)
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
