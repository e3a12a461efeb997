"""Both passes in one launch: a row's programs are a cluster, and the first of them goes on.

A program leaves its partial results and group maxima, as pass 1 does, and ends. The first of a row
waits until the others have, and does what pass 2 does, while programs of other rows still read.
"""

import functools
from typing import Any

import jax
from jax.experimental import pallas as pl

from pallas_kernels.backends.mosaic_gpu import (
    compat,
    finish_kernel,
    limits,
    reading,
    rows_kernel,
    thread,
)
from pallas_kernels.backends.mosaic_gpu.compat import GPU
from pallas_kernels.backends.mosaic_gpu.schedule import CLUSTER, Schedule
from pallas_kernels.contract.rows import Outputs


def fits(schedule: Schedule) -> bool:
    """Whether the programs of a row may be a cluster, on what the program is lowered for."""
    return 1 < schedule.programs <= CLUSTER and limits.has_clusters()


def topk_rows(
    schedule: Schedule,
    outputs: Outputs,
    mode: finish_kernel.Mode,
    logits: jax.Array,
    num_targets: int,
    chosen: jax.Array | None,
    targets: reading.Targets,
    allowed: jax.Array | None,
) -> finish_kernel.RowOutputs[jax.Array]:
    """The outputs of R target rows; arguments as `read_rows` and `finish_rows` have them."""
    selected = finish_kernel.num_selected(outputs.k, mode)
    between = rows_kernel.result_types(schedule, num_targets, logits.dtype, selected > 0, outputs)
    kernel = GPU.kernel(
        functools.partial(
            _topk_rows_kernel,
            schedule=schedule,
            outputs=outputs,
            mode=mode,
            num_logits_rows=logits.shape[0],
            num_targets=num_targets,
            num_between=len(between),
        ),
        out_type=[*between, *finish_kernel.result_types(outputs, mode, num_targets)],
        scratch_types=finish_kernel.scratch_types(schedule, selected) if selected else (),
        grid=(num_targets,),
        grid_names=("row",),
        cluster=(schedule.programs,),
        cluster_names=("program",),
        compiler_params=compat.compiler_params(approx_math=True),
        kernel_name="topk_rows",
    )
    found = kernel(logits.reshape(-1), chosen, targets, allowed)
    return finish_kernel.named(found[len(between) :], outputs, mode)


def _topk_rows_kernel(
    logits_ref: Any,
    chosen_ref: Any,
    targets: reading.Targets,
    allowed_ref: jax.Ref | None,
    *others: Any,  # out, as `read_rows` and `finish_rows`; scratch
    schedule: Schedule,
    outputs: Outputs,
    mode: finish_kernel.Mode,
    num_logits_rows: int,
    num_targets: int,
    num_between: int,
) -> None:
    partials_ref, *groups = others[:num_between]
    groups_ref = groups[0] if groups else None
    rows_kernel.read_rows_kernel(
        logits_ref, chosen_ref, targets, allowed_ref, partials_ref, groups_ref, outputs=outputs,
        schedule=schedule, num_logits_rows=num_logits_rows, num_targets=num_targets,
    )  # fmt: skip
    thread.inline(thread.arrive_in_cluster, (), (), ())

    # Read again, so that no register holds them while the row is read.
    @pl.when(thread.special("cluster_ctaid.x") == 0)
    def _() -> None:
        token_ids = chosen_ref if mode == "given" else None
        finish_kernel.finish_rows_kernel(
            finish_kernel.Inputs(
                logits_ref, token_ids, partials_ref, groups_ref, targets, allowed_ref
            ),
            *others[num_between:], outputs=outputs, mode=mode, schedule=schedule,
            num_logits_rows=num_logits_rows, num_targets=num_targets,
            own=lambda: thread.special("clusterid.x"),
            wait=lambda: thread.inline(thread.wait_for_cluster, (), (), ()),
        )  # fmt: skip
