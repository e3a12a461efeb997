"""A check of a device, rehearsed on executed PTX: the pieces of `check-device --rehearse`.

    python -m tests.pallas_kernels.mosaic_gpu.ptx.rehearse

Needs the `aot` extra. Exits with 1 where a piece fails.
"""

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import jax

from pallas_kernels.backends import answers
from pallas_kernels.backends.groups import FEW, Part, Read, number_of_groups
from pallas_kernels.backends.mosaic_gpu import (
    count_larger,
    draw,
    finish_kernel,
    groups,
    groups_kernel,
    rows,
    rows_kernel,
)
from pallas_kernels.backends.mosaic_gpu.schedule import choose_fixed_schedule
from pallas_kernels.contract.types import Outputs, Rows
from pallas_kernels.meshes.vocab_shard import WHOLE
from pallas_kernels.testing import pieces
from pallas_kernels.testing.checks import Kernels
from tests.pallas_kernels.mosaic_gpu.ptx import kernels

MODULES = (rows_kernel, groups_kernel, finish_kernel, draw, count_larger)
LEFT_OUT = ("verify",)  # it needs one program, which cannot wait for what is executed here


def together() -> kernels.Conditions:
    """All programs of a launch run together."""
    return kernels.Conditions("together", lambda ctas: [list(range(ctas))])


def as_ptx() -> Kernels:
    """The kernels' own calls, one after the other: `executed` runs what they launch."""

    def topk(given: Rows, outputs: Outputs) -> Any:
        if given.changes is None:
            return rows.topk_logprobs(given, outputs)
        return answers.topk_logprobs(rows.row_sums, given, outputs, WHOLE)

    def read(part: Part, inverse: jax.Array, needed: jax.Array, k: int) -> Read:
        x = part.logits  # `groups.read`, without the switch over how many candidates are needed
        schedule = choose_fixed_schedule(len(x), x.shape[1], x.dtype.name)
        out = groups_kernel.read_groups(schedule, x, inverse, True)
        found = groups.of_rows(out, schedule, number_of_groups(x.shape[1]))
        return Read(*found, *groups.top_of_groups(x, schedule, out, FEW))

    return Kernels(
        topk=topk,
        groups=read,
        candidates=groups.candidates,
        draw=draw.draw,
        num_larger=count_larger.count_larger,
        name="xla",
        jit=lambda function: function,
    )


def main(parts: Sequence[str] = ()) -> int:
    """Run the pieces of these parts, or of all; returns how many fail, 1 at most."""
    compiler, failed = kernels.Compiler(), 0
    for part in parts or (name for name in pieces.PARTS if name not in LEFT_OUT):
        stand, said = kernels.Stand(together(), compiler), []
        found = pieces.pieces_of(part, as_ptx(), "mosaic_gpu", full=False, rehearse=True)
        with ExitStack() as stack:
            stack.enter_context(kernels.executed(stand, MODULES))
            begin = time.monotonic()
            pieces.run(found, set(), said.append)
        ends = [line for line in said if "piece" in line]
        wrong = [line["error"] for line in ends if not line["ok"]]
        wrong += ["no kernel was executed"] * (not stand.runs)
        failed += len(wrong)
        names = ", ".join(dict.fromkeys(run.kernel.name for run in stand.runs))
        verdict = f"WRONG: {wrong}" if wrong else "ok"
        print(f"{part}: {names}: {verdict}, {time.monotonic() - begin:.0f} s", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
