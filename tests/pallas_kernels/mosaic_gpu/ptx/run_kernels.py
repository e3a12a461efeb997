"""Every path of the GPU kernels, executed from its PTX: `.ci/heavy ptx`.

    --of LANE ... the cases of these kernels: rows, groups, draw, bits
    --only WORD   the cases whose names have it
    --often       each under CTAs together and, for K up to 64, in another order
    --mutants N   spoil N instructions of four calls' kernels too, one at a time (default 300)
    --seed N      which ones
    --chip B200   what the kernels are compiled for
    --on-gpu      run the cases on this machine's GPU, once each, and nothing else

Needs the `aot` extra, unless they run on a GPU. Exits with 1 where anything is wrong.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from pallas_kernels.testing import chips
from tests.pallas_kernels.mosaic_gpu.ptx import (
    bits_cases,
    cases,
    draw_cases,
    kernels,
    mutants,
    sampled_cases,
)
from tests.pallas_kernels.mosaic_gpu.ptx.cases import Case
from tests.ptx_machine.arithmetic import Hardware
from tests.ptx_machine.parser import PtxError


def together(ctas: int) -> list[list[int]]:
    return [list(range(ctas))]


def in_two(order: Callable[[int], np.ndarray], ctas: int) -> list[list[int]]:
    """Two groups of CTAs, in this order."""
    return [list(part) for part in np.array_split(order(ctas), min(2, ctas))]


backward = partial(in_two, lambda ctas: np.arange(ctas)[::-1])
shuffled = partial(in_two, lambda ctas: np.random.default_rng(ctas).permutation(ctas))


# The results of the first three are bit-equal; of the others they stay within the bound.
EXACT = (
    kernels.Conditions("together", together, hardware=Hardware(0, 0xFF)),
    kernels.Conditions("backward", backward, kernels.BASE + 16, Hardware(31, 0x00)),
    kernels.Conditions("shuffled", shuffled, kernels.BASE + 48, hardware=Hardware(13, 0x7E)),
)
INEXACT = (
    kernels.Conditions("errors up", together, hardware=Hardware(0, 0xFF, "up")),
    kernels.Conditions("errors random", together, hardware=Hardware(0, 0xFF, "random")),
)
LANES = {
    "rows": (cases.all_cases, cases.option_cases),
    "groups": (sampled_cases.sampled_cases,),
    "draw": (draw_cases.draw_cases,),
    "bits": (bits_cases.bits_cases,),
}
MUTANTS = (
    cases.mutant_case, cases.option_mutant_case,
    sampled_cases.sampled_mutant_case, draw_cases.draw_mutant_case,
)  # fmt: skip


def conditions_of(case: Case, often: bool) -> tuple[kernels.Conditions, ...]:
    """All conditions; fewer for K above 64, whose selection takes long, and for `--often`."""
    if case.k > 64:
        return EXACT[:1] if often else (*EXACT[:2], INEXACT[-1])
    return EXACT[:2] if often else (*EXACT, *INEXACT)


def judge(case: Case, compiler: kernels.Compiler, often: bool) -> str | None:
    """Run a case and print its kernels; what is wrong.

    Every conditions must give the oracle's result, exact ones the same bits.
    """
    first = None
    for conditions in conditions_of(case, often):
        stand = kernels.Stand(conditions, compiler)
        try:
            bits = kernels.bits_of(case, stand)
            assert conditions not in EXACT or first in (None, bits), "bits of the first conditions"
        except (PtxError, AssertionError) as error:
            return f"{conditions.name}: {error}"
        if first is None:
            first, schedule = bits, case.schedule
            print(f"{case.name}: {case.rows} rows, V {schedule.vocabulary}, K {case.k}, "
                  f"{schedule.dtype}")  # fmt: skip
            for run in stand.runs:
                ctas = int(np.prod(run.kernel.host.grid))
                print(f"    {run.kernel.name}: {ctas} CTAs, {run.counts}")
    return None


def main(arguments: list[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("--of", nargs="+", choices=tuple(LANES), default=tuple(LANES))
    parser.add_argument("--only", default="", help="the cases whose names have this")
    parser.add_argument("--often", action="store_true", help="each under few of its conditions")
    parser.add_argument("--mutants", type=int, default=300, help="how many are tried")
    parser.add_argument("--seed", type=int, default=0, help="which mutants")
    parser.add_argument("--chip", choices=tuple(chips.GPUS), default="H100")
    parser.add_argument("--on-gpu", action="store_true", help="on a GPU, not as executed PTX")
    options = parser.parse_args(arguments)
    every = [case for lane in options.of for make in LANES[lane] for case in make()]
    if options.on_gpu:
        return min(run_all(every, options.only, on_gpu), 1)
    gc.freeze()  # jax has made many objects, and they stay
    compiler = kernels.Compiler(options.chip)
    wrong = kernels.report_alignment(compiler.device)
    wrong += run_all(every, options.only, partial(judge, compiler=compiler, often=options.often))
    other = kernels.others_in_program(compiler)
    print(f"kernels that are others in a whole program than alone: {other or 'none'}")
    wrong += len(other)
    if options.mutants and not wrong:
        each = options.mutants // len(MUTANTS)
        for case in (make() for make in MUTANTS):
            wrong += mutants.report(case, compiler, EXACT[0], each, options.seed)
    return min(wrong, 1)


def on_gpu(case: Case) -> str | None:
    try:
        case.check(case.call())
    except AssertionError as error:
        return str(error)
    return None


def run_all(
    makers: Sequence[Callable[[], Case]], only: str, run: Callable[[Case], str | None]
) -> int:
    """Run the cases whose names have `only`: how many are wrong; 1 where there is none."""
    count = wrong = 0
    for case in (make() for make in makers):
        if only not in case.name:
            continue
        begin, found = time.monotonic(), run(case)
        print(f"{time.monotonic() - begin:6.1f} s  {case.name}: {found or 'ok'}", flush=True)
        count, wrong = count + 1, wrong + (found is not None)
    print(f"{count} calls: {wrong} wrong")
    return wrong if count else 1


if __name__ == "__main__":
    sys.exit(main())
