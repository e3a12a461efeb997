"""Mutants of the product: small faults, of which each should fail a test of its own room.

    python -m tests.heavy.mutants [ROOM ...] [--number 20] [--seed 1]

Cosmic Ray (https://cosmic-ray.readthedocs.io) makes the mutants; a seed draws as many of each room,
line by line so that no long expression has most of them. A copy of the project is mutated, never
the project. The test files that name the mutated module come first, and the first red test ends a
mutant. What was decided is kept in build/mutants, and a run that was cut short goes on; a room
whose files or tests changed begins again. A mutant that no test decides in time counts as survived.
"""

import argparse
import collections
import contextlib
import hashlib
import random
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkResult

from tests.support.paths import ROOT

FOLDER = ROOT / "build/mutants"
COPIED = ("pallas_kernels", "jax_specdec", "ipc", "bench", "tests", "examples", "docs", ".ci")
FILES = ("pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE")
# Of what an annotation, a decorator with its arguments or an assertion's text is made: no test is
# asked for those. Nor for the mark before keywords, which is taken for a product.
LEFT_OUT = re.compile(r"\S*(BinaryOperator_BitOr|RemoveDecorator|ExceptionReplacer)|\S+ +@|.*\0\*,")

# Patterns of the files to mutate, and the tests that should notice.
ROOMS = {
    "kernels": (
        "pallas_kernels/topk/*.py pallas_kernels/lowering/*.py pallas_kernels/contract/*.py "
        "pallas_kernels/numbers/*.py pallas_kernels/backends/*.py pallas_kernels/backends/xla/*.py",
        "tests/pallas_kernels/*.py tests/pallas_kernels/[!s]*/**/*.py",
    ),
    "sampling": ("pallas_kernels/sampling/*.py", "tests/pallas_kernels/sampling/**/*.py"),
    "records": ("jax_specdec/records/*.py", "tests/jax_specdec/records/*.py"),
    "engine": (
        "jax_specdec/engine/*.py jax_specdec/control/*.py",
        "tests/jax_specdec/engine/*.py tests/jax_specdec/control/*.py",
    ),
    "ipc": ("ipc/[!w]*.py ipc/w[!i]*.py", "tests/ipc/*.py"),
    "wire": (
        "ipc/wire.py jax_specdec/device/messages/*.py",
        "tests/ipc/test_wire.py tests/jax_specdec/device/messages/*.py "
        "tests/jax_specdec/device/loop/test_every_value.py",
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Exit status 1 if a mutant survived, or was not decided."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help=f"of {', '.join(ROOMS)}")
    parser.add_argument("--number", type=int, default=20, help="mutants of a room (20)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if unknown := set(options.rooms) - ROOMS.keys():
        parser.error(f"no room {', '.join(sorted(unknown))}: choose from {', '.join(ROOMS)}")
    found = {name: run(name, options.number, options.seed) for name in options.rooms or ROOMS}
    for name, (verdicts, _) in found.items():
        print(f"{name}: {dict(verdicts)}")
    left = [one for _, alive in found.values() for one in alive]
    print(*left, sep="\n")
    return 1 if left else 0


def run(name: str, number: int, seed: int) -> tuple[collections.Counter[str], list[str]]:
    """Decide the mutants of a room; how many had which verdict, and those that live."""
    files, tests = ROOMS[name]
    tree = FOLDER / name / hash_of(files, tests)[:16]
    session, took = tree.with_suffix(f".{seed}.{number}.sqlite"), tree.with_suffix(".seconds")
    if not tree.exists():
        shutil.rmtree(tree.parent, ignore_errors=True)  # of other files
        for part in COPIED:
            shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
        for file in FILES:
            shutil.copy(ROOT / file, tree / file)
    for path in files_of(files, ROOT):  # a run that was killed may have left a mutant
        shutil.copy(path, tree / path.relative_to(ROOT))
    with contextlib.chdir(tree), use_db(session) as database:
        if not took.exists():
            begin = time.monotonic()
            subprocess.run(command(tests, ""), check=True)  # what is not mutated passes
            took.write_text(f"{time.monotonic() - begin:.0f}")
        seconds = int(took.read_text())
        if not database.num_results:
            draw(files, database, number, seed)
        for item in database.pending_work_items:
            (mutation,) = item.mutations
            # A test that hangs is red once it took longer than all of them did.
            limited = [*command(tests, mutation.module_path.stem), f"--timeout={60 + seconds}"]
            result = mutate_and_test([mutation], shlex.join(limited), 120 + 3 * seconds)
            database.set_result(item.job_id, result)
            print(mutation.module_path, mutation.start_pos[0], result.test_outcome, flush=True)
        return verdicts_of(database)


def command(tests: str, module: str) -> list[str]:
    """The tests of a room in one process; those files first that name a module."""
    silent = {file: not re.search(rf"\b{module}\b", file.read_text())
              for file in files_of(tests, Path()) if file.match("test_*.py")}  # fmt: skip
    files = sorted(silent, key=lambda file: (silent[file], file))
    return [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider",
            *map(str, files)]  # fmt: skip


def hash_of(patterns: str, tests: str) -> str:
    """The contents of a room's files and of its tests."""
    found = hashlib.sha256()
    for file in files_of(f"{patterns} {tests} tests/**/conftest.py tests/support/**/*.py", ROOT):
        found.update(file.read_bytes())
    return found.hexdigest()


def files_of(patterns: str, root: Path) -> list[Path]:
    """The files to mutate."""
    found = {file for pattern in patterns.split() for file in root.glob(pattern)}
    return sorted(file for file in found if file.stem != "__init__")


def draw(patterns: str, database: WorkDB, number: int, seed: int) -> None:
    """Keep of all mutants as many as are asked for, at most one a line; the others are skipped."""
    text = {file: file.read_text().split("\n") for file in files_of(patterns, Path())}
    init(text, database, {})
    by_line = collections.defaultdict(list)
    for item in sorted(database.work_items, key=lambda item: str(item.mutations)):
        (mutation,) = item.mutations
        row, column = mutation.start_pos
        line = text[mutation.module_path][row - 1]
        if not LEFT_OUT.match(f"{mutation.operator_name} {line[:column]}\0{line[column:]}"):
            by_line[str(mutation.module_path), row].append(item.job_id)
    random_ = random.Random(seed)
    lines = random_.sample(sorted(by_line), number)
    drawn = {random_.choice(by_line[line]) for line in lines}
    skipped = WorkResult(WorkerOutcome.SKIPPED)
    others = [item.job_id for item in database.work_items if item.job_id not in drawn]
    database.set_multiple_results(others, skipped)


def verdicts_of(database: WorkDB) -> tuple[collections.Counter[str], list[str]]:
    """How many mutants had which verdict, and the differences of those that live."""
    verdicts: collections.Counter[str] = collections.Counter()
    alive = []
    for _, result in database.results:
        if result.worker_outcome == WorkerOutcome.SKIPPED:
            continue
        outcome = result.test_outcome
        unclear = outcome in (None, TestOutcome.INCOMPETENT) or result.output == "timeout"
        verdict = "not decided" if unclear else str(outcome.value)
        verdicts[verdict] += 1
        if verdict != "killed":
            alive.append(f"{verdict}:\n{result.diff}")
    return verdicts, alive


if __name__ == "__main__":
    sys.exit(main())
