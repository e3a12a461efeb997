"""The pieces of work of `bench.gpu_check`, part by part."""

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from bench import gpu_tune
from bench.gpu import correctness, kernels
from bench.gpu.contenders import COPY, FLOOR, FUSED, OURS, Machine
from bench.gpu.journal import Journal, Piece
from bench.report.comparison import Comparison
from bench.timing import BenchError
from pallas_kernels.testing.shapes import GPU, Shape

PARTS = ("first", "tests", "shapes", "targets", "tune", "rest", "end-to-end")

# Every kernel, word size and path once, before anything else.
FIRST = (
    Shape(4, 131_072, 20, "bfloat16"),
    Shape(64, 131_072, 0, "float32"),
    Shape(1536, 151_936, 20, "bfloat16"),
    Shape(3, 50_257, 128, "float16"),
)
GLANCES = tuple(Shape(rows, 131_072, k, "bfloat16") for rows in (64, 1536) for k in (0, 20))
# Test files and the tests to run: some are about CPUs.
TESTS = {
    "tests/pallas_kernels/mosaic_gpu/test_interpreted.py": "",
    "tests/bench/test_floor.py": "reads",
    "tests/pallas_kernels/test_small_rows.py": "not no_rows",
    "tests/pallas_kernels/test_topk_logprobs.py": "not shard_map",
}
# Executed PTX takes a second a row: few rows in every part.
REHEARSED_TESTS = {
    "tests/pallas_kernels/mosaic_gpu/test_interpreted.py": "float16",
    "tests/pallas_kernels/test_small_rows.py": "by_hand",
}
# The kernels' calls with every edge of the contract: on a GPU, or as executed PTX.
CASES = "tests.pallas_kernels.mosaic_gpu.ptx.run_kernels"
REHEARSED_CASES = "draw", "mask, odd"
# The GPU's setup in small comes before the command, which measures another one on a CPU.
REHEARSED_LOOP = "tests/bench/loop/test_suite.py", "what_a_gpu_will_measure_runs_here", "slow"
REHEARSED_FIRST = (Shape(2, 2050, 2, "bfloat16"),)
REHEARSED_GLANCES = (Shape(1, 2048, 1, "bfloat16"),)
REHEARSED_TARGETS = (Shape(2, 4352, 20, "bfloat16"),)
REHEARSED_REST = (Shape(2, 2048, 0, "float32"), Shape(1, 2048, 5, "bfloat16"))


def pieces_of(part: str, machine: Machine, journal: Journal) -> Iterator[Piece]:
    """The pieces of one part, in order; `machine` says whether it is a rehearsal."""
    real = machine.on_gpu
    measured = functools.partial(measure, machine=machine, journal=journal)
    if part == "first":
        for shape in FIRST if real else REHEARSED_FIRST:
            check = functools.partial(correctness.check_shape, shape)
            yield Piece(f"first: {shape}", check)
        yield Piece("the copy's bandwidth", lambda: kernels.measure_ceiling(machine))
        only = (FLOOR, OURS, FUSED)
        for shape in GLANCES if real else REHEARSED_GLANCES:
            yield Piece(f"a glance at {shape}", functools.partial(measured, shape, only))
    elif part == "tests":
        for file, chosen in (TESTS if real else REHEARSED_TESTS).items():
            yield Piece(f"{file}", functools.partial(run_tests, file, chosen, on_gpu=real))
        for name in ("",) if real else REHEARSED_CASES:
            yield Piece(f"cases {name}", functools.partial(run_cases, name, on_gpu=real))
    elif part == "shapes":
        for name, function in correctness.everything(small=not real):
            yield Piece(name, function)
    elif part == "tune":
        for shape in gpu_tune.SHAPES if real else gpu_tune.REHEARSED:
            few = None if real else 3
            yield Piece(
                f"schedules for {shape}", functools.partial(gpu_tune.measure, shape, machine, few)
            )
    elif part in ("targets", "rest"):
        if real:
            shapes = [s for s in by_importance() if has_targets(s) == (part == "targets")]
        else:
            shapes = list(REHEARSED_TARGETS if part == "targets" else REHEARSED_REST)
        for shape in shapes:
            yield Piece(f"speed of {shape}", functools.partial(measured, shape))
    else:
        if not real:
            yield Piece("end-to-end, in small", functools.partial(run_tests, *REHEARSED_LOOP))
        yield Piece("end-to-end", functools.partial(end_to_end, journal.path))


def has_targets(shape: Shape) -> bool:
    """Whether a shape has more limits than its use of memory."""
    return shape.rows in (64, 256, 1536) and shape.k in (0, 20)


def by_importance() -> list[Shape]:
    """The benchmark's shapes, one of each kind before its relatives."""
    rows, ks = (1536, 64, 256, 16, 4), (20, 0, 5, 1, 64)
    words = ("bfloat16", "float32")
    return sorted(
        GPU,
        key=lambda s: (s.vocabulary, words.index(s.dtype), ks.index(s.k), rows.index(s.rows)),
    )


def measure(
    shape: Shape, only: tuple[str, ...] = (), *, machine: Machine, journal: Journal
) -> Comparison:
    """Measure a shape beside the copy's bandwidth, which is measured once."""
    copies = [one for one in journal.comparisons if COPY in one.figures and len(one.names) == 1]
    if not copies:
        copies = [kernels.measure_ceiling(machine)]
        journal.comparisons += copies
    ceiling = copies[0].figures[COPY]["GB/s"]
    if only:
        return kernels.glance(shape, machine, ceiling, only)
    return kernels.measure(shape, machine, ceiling)


def run_tests(file: str, chosen: str, marked: str = "not slow", *, on_gpu: bool = False) -> None:
    """Run tests in a process of their own, since jax chooses its device at the start."""
    _run(["pytest", "-v", "--durations=10", file, "-k", chosen, "-m", marked], on_gpu)


def run_cases(only: str, *, on_gpu: bool = False) -> None:
    """Run the kernels' cases whose names have this."""
    how = ["--on-gpu"] if on_gpu else ["--mutants", "0"]
    _run([CASES, "--only", only, *how], on_gpu)


def _run(module: list[str], on_gpu: bool) -> None:
    variables = os.environ | {"JAX_PLATFORMS": "cuda" if on_gpu else "cpu"}
    if subprocess.run([sys.executable, "-m", *module], env=variables, check=False).returncode:
        raise BenchError(f"{module} failed, see above")


def end_to_end(journal: Path) -> None:
    """Run the benchmark of the whole loop; its results go beside the journal."""
    path = journal.with_name(f"{journal.stem}-end-to-end.json")
    command = [sys.executable, "-m", "bench", "end-to-end", "--quick", "--json", str(path)]
    if subprocess.run(command, check=False).returncode:
        raise BenchError("the end-to-end benchmark failed, see above")
