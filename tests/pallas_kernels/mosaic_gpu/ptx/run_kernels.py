"""Every path of the GPU kernels, executed from its PTX: `.ci/heavy ptx`.

    --of LANE ... the cases of these kernels: rows, groups, draw
    --only WORD   the cases whose names have it
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
from dataclasses import dataclass

import jax
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pallas_kernels.testing import compile_target
from tests.pallas_kernels.mosaic_gpu.ptx import alignment, kernels, mutants
from tests.pallas_kernels.mosaic_gpu.ptx.cases import (
    Case,
    all_cases,
    mutant_case,
    option_cases,
    option_mutant_case,
)
from tests.pallas_kernels.mosaic_gpu.ptx.draw_cases import draw_cases, draw_mutant_case
from tests.pallas_kernels.mosaic_gpu.ptx.sampled_cases import sampled_cases, sampled_mutant_case
from tests.ptx_machine.arithmetic import Hardware
from tests.ptx_machine.parser import PtxError


def together(ctas: int) -> list[list[int]]:
    return [list(range(ctas))]


def backward(ctas: int) -> list[list[int]]:
    """Two groups, the last CTAs first."""
    return [list(part)[::-1] for part in np.array_split(np.arange(ctas), min(2, ctas))][::-1]


def shuffled(ctas: int) -> list[list[int]]:
    order = np.random.default_rng(ctas).permutation(ctas)
    return [list(part) for part in np.array_split(order, min(2, ctas))]


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
LANES = {"rows": (all_cases, option_cases), "groups": (sampled_cases,), "draw": (draw_cases,)}
MUTANTS = mutant_case, option_mutant_case, sampled_mutant_case, draw_mutant_case


@dataclass(frozen=True)
class Outcome:
    """The result of one case under all conditions."""

    runs: tuple[kernels.Run, ...]  # of the first conditions
    seconds: float
    wrong: str | None


def conditions_of(case: Case) -> tuple[kernels.Conditions, ...]:
    """All conditions; fewer for K above 64, whose selection takes long."""
    return (*EXACT, *INEXACT) if case.k <= 64 else (*EXACT[:2], INEXACT[-1])


def judge(case: Case, compiler: kernels.Compiler) -> Outcome:
    """Run a case: every conditions must give the oracle's result, exact ones the same bits."""
    begin = time.monotonic()
    first, runs = None, ()
    try:
        for conditions in conditions_of(case):
            where = conditions.name
            stand = kernels.Stand(conditions, compiler)
            with kernels.executed(stand, case.modules):
                result = case.call()
            case.check(result)
            bits = [np.asarray(x).tobytes() for x in jax.tree.leaves(result)]
            if first is None:
                first, runs = bits, tuple(stand.runs)
            elif conditions in EXACT and bits != first:
                raise AssertionError("other bits than in the first conditions")
    except (PtxError, AssertionError) as error:
        return Outcome(tuple(runs), time.monotonic() - begin, f"{where}: {error}")
    return Outcome(tuple(runs), time.monotonic() - begin, None)


def main(arguments: list[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("--of", nargs="+", choices=tuple(LANES), default=tuple(LANES))
    parser.add_argument("--only", default="", help="the cases whose names have this")
    parser.add_argument("--mutants", type=int, default=300, help="how many are tried")
    parser.add_argument("--seed", type=int, default=0, help="which mutants")
    parser.add_argument("--chip", choices=tuple(compile_target.CHIPS), default="H100")
    parser.add_argument("--on-gpu", action="store_true", help="on a GPU, not as executed PTX")
    options = parser.parse_args(arguments)
    cases = [case for lane in options.of for make in LANES[lane] for case in make()]
    if options.on_gpu:
        return run_all(cases, options.only)
    gc.freeze()  # jax has made many objects, and they stay
    compiler, console = kernels.Compiler(options.chip), Console(width=130)
    wrong = alignment.report(compiler.device)
    wrong += execute_all(cases, options.only, compiler, console)
    other = kernels.others_in_program(compiler)
    print(f"kernels that are others in a whole program than alone: {other or 'none'}")
    wrong += len(other)
    if options.mutants and not wrong:
        each = options.mutants // len(MUTANTS)
        for case in (make() for make in MUTANTS):
            missed = mutants.report(case, compiler, EXACT[0], each, options.seed, console)
            wrong += len(missed)
    return min(wrong, 1)


def run_all(makers: Sequence[Callable[[], Case]], only: str) -> int:
    """Run the cases whose names have `only` on the device; 1 if one is wrong, or none is there."""
    results = []
    for case in (make() for make in makers):
        if only in case.name:
            try:
                case.check(case.call())
                results.append("ok")
            except AssertionError as error:
                results.append(f"WRONG: {error}")
            print(f"{case.name}: {results[-1]}", flush=True)
    return int(not results or any(result != "ok" for result in results))


def execute_all(
    makers: Sequence[Callable[[], Case]],
    only: str = "",
    compiler: kernels.Compiler | None = None,
    console: Console | None = None,
) -> int:
    """Execute the cases whose names have `only` and print a table.

    Returns how many are wrong; 1 where no case has such a name.
    """
    compiler, console = compiler or kernels.Compiler(), console or Console(width=130)
    table = Table(title=f"PTX of jax {jax.__version__}, executed", title_justify="left")
    for column in ("case", "kernel", "R", "V", "K", "dtype", "CTAs"):
        table.add_column(column)
    for column in ("instructions", "barriers", "s"):
        table.add_column(column, justify="right")
    table.add_column("result")
    wrong, count = [], 0
    begin = time.monotonic()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("cases", total=len(makers))
        for make in makers:
            case = make()
            progress.update(task, advance=1, description=case.name)
            if only not in case.name:
                continue
            count += 1
            outcome = judge(case, compiler)
            if outcome.wrong:
                wrong.append(f"{case.name}: {outcome.wrong}")
            add_rows(table, case, outcome)
            progress.console.print(f"{outcome.seconds:6.1f} s  {case.name}")
    console.print(table)
    for text in wrong:
        print(f"WRONG {text}")
    print(
        f"{count} calls, {len(compiler.known)} kernels, "
        f"{time.monotonic() - begin:.0f} s: {len(wrong)} wrong"
    )
    return len(wrong) if count else 1


def add_rows(table: Table, case: Case, outcome: Outcome) -> None:
    """A line a kernel; the case's name, time and result in the first."""
    head = (case.name, f"{outcome.seconds:.1f}", "ok" if outcome.wrong is None else "WRONG")
    for run in outcome.runs or (None,):
        table.add_row(
            head[0],
            run.kernel.name if run else "",
            *map(str, (case.rows, case.schedule.vocabulary, case.k, case.schedule.dtype)),
            str(int(np.prod(run.kernel.host.grid))) if run else "",
            str(run.counts.instructions) if run else "",
            str(run.counts.barriers) if run else "",
            *head[1:],
        )
        head = ("", "", "")


if __name__ == "__main__":
    sys.exit(main())
