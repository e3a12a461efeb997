"""Both passes in one launch: a row's programs are a cluster, and the first of them goes on.

A program leaves its partial results and its groups, as pass 1 does, and ends. The first of a row
waits until the others have, and does what pass 2 does, while programs of other rows still read.
"""

import functools
from typing import Any

import jax
from jax.experimental import pallas as pl

from pallas_kernels.backends.mosaic_gpu import (
    compat,
    finish_kernel,
    groups_kernel,
    limits,
    row_sum,
    thread,
)
from pallas_kernels.backends.mosaic_gpu.changes import biased_groups
from pallas_kernels.backends.mosaic_gpu.changes.biased_groups import Biased, Replaced
from pallas_kernels.backends.mosaic_gpu.chosen_groups import Row
from pallas_kernels.backends.mosaic_gpu.compat import GPU, Readable
from pallas_kernels.backends.mosaic_gpu.groups_kernel import GroupOutputs
from pallas_kernels.backends.mosaic_gpu.schedule import CLUSTER, Index, Schedule
from pallas_kernels.contract.rows import Outputs


def fits_cluster(schedule: Schedule) -> bool:
    """Whether the programs of a row may be a cluster, on what the program is lowered for."""
    return 1 < schedule.programs <= CLUSTER and limits.has_clusters()


def topk_rows(
    schedule: Schedule,
    outputs: Outputs,
    mode: finish_kernel.Mode,
    logits: jax.Array,
    num_targets: int,
    inputs: groups_kernel.GroupInputs,
    allowed: jax.Array | None,
    biased: Biased | None = None,
) -> tuple[GroupOutputs[jax.Array], finish_kernel.RowOutputs[jax.Array]]:
    """The results of pass 1 for R target rows, and the outputs.

    Arguments as `read_targets` and `finish_rows` have them; biased: groups that are read again.
    """
    between: Any = groups_kernel.result_types(schedule, num_targets, logits.dtype, outputs.entropy)
    if biased is not None:
        between = *between, biased_groups.replaced_types(biased, weighted=outputs.entropy)
    types, tree = jax.tree.flatten(between)
    kernel = GPU.kernel(
        functools.partial(
            _topk_rows_kernel,
            schedule=schedule,
            outputs=outputs,
            mode=mode,
            shape=logits.shape,
            num_targets=num_targets,
            tree=tree,
        ),
        out_type=[*types, *finish_kernel.finish_types(outputs, mode, num_targets)],
        scratch_types=finish_kernel.all_scratch_types(schedule, outputs, mode),
        grid=(num_targets,),
        grid_names=("row",),
        cluster=(schedule.programs,),
        cluster_names=("program",),
        compiler_params=compat.compiler_params(approx_math=True),
        kernel_name="topk_rows",
    )
    found = kernel(logits.reshape(-1), inputs, allowed, biased)
    groups, *_ = jax.tree.unflatten(tree, found[: len(types)])
    return groups, finish_kernel.named(found[len(types) :], outputs, mode)


def _topk_rows_kernel(
    logits_ref: Any,
    inputs: groups_kernel.GroupInputs,
    allowed_ref: Readable | None,
    biased: Biased | None,
    *others: Any,  # out, as `read_targets` and `finish_rows`; scratch
    schedule: Schedule,
    outputs: Outputs,
    mode: finish_kernel.Mode,
    shape: tuple[int, ...],
    num_targets: int,
    tree: jax.tree_util.PyTreeDef,
) -> None:
    between, after = others[: tree.num_leaves], others[tree.num_leaves :]
    out, *of_biased = jax.tree.unflatten(tree, between)
    of_groups, groups_tree = jax.tree.flatten((out,))

    def sum_biased(first: Index, target: Index, program: Index, scale: jax.Array) -> None:
        assert biased is not None
        row = Row(schedule, logits_ref, first, biased.changes, target)
        biased_groups.sum_in_cluster(
            row, scale, biased, tuple(jax.tree.leaves(of_biased)), program, num_targets
        )

    groups_kernel.read_groups_kernel(
        logits_ref, inputs, *of_groups, schedule=schedule, shape=shape, num_targets=num_targets,
        tree=groups_tree, inclusive=outputs.inclusive,
        then=None if biased is None else sum_biased,
    )  # fmt: skip
    replaced = None if biased is None else Replaced(biased.numbers, *of_biased[0])
    thread.inline(thread.arrive_in_cluster, (), (), ())

    # Read again, so that no register holds them while the row is read.
    @pl.when(thread.special("cluster_ctaid.x") == 0)
    def _() -> None:
        finish_kernel.finish_rows_kernel(
            finish_kernel.FinishInputs(
                logits_ref,
                inputs.chosen if mode == "given" else None,
                out.partials,
                row_sum.Sources(out.maxima, out.sums, out.weighted),
                inputs.targets,
                allowed_ref,
                inputs.offset,
                replaced,
            ),
            *after, outputs=outputs, mode=mode, schedule=schedule, shape=shape,
            num_targets=num_targets,
            own=lambda: thread.special("clusterid.x"),
            wait=lambda: thread.inline(thread.wait_for_cluster, (), (), ()),
        )  # fmt: skip
