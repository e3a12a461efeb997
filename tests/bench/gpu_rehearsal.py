"""The steps of `bench.gpu_check` without a GPU: the kernels' PTX is executed on a CPU.

    python -m tests.bench.gpu_rehearsal [options of bench.gpu_check]

Needs the `aot` extra.
"""

import sys

from bench import gpu_check
from bench.gpu import contenders, floor
from pallas_kernels.backends.mosaic_gpu import finish_kernel, rows_kernel
from tests.pallas_kernels.mosaic_gpu.ptx import kernels, run_kernels


def main() -> int:
    """The exit status of the check."""
    options = gpu_check.parser().parse_args(["--rehearse", *sys.argv[1:]])
    stand = kernels.Stand(run_kernels.EXACT[0], kernels.Compiler())
    with kernels.executed(stand, (rows_kernel, finish_kernel, floor)):
        return gpu_check.check(options, contenders.rehearsal())


if __name__ == "__main__":
    sys.exit(main())
