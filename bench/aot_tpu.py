"""Compile the TPU kernel for chips that need not exist, and count its cycles.

    python -m bench.aot tpu            a table for every shape on v5e, v6e, v5p and 7x
    python -m bench.aot tpu --quick    what two minutes allow
    python -m bench.aot tpu --keep     writes the cycles down, as those to compare with
    python -m bench.aot tpu --check --chip v6e --shape "64 131072"    a part of the programs

All take half an hour of processor time. --chip, --way and --shape choose a part; limits that
compare ways need them all in one part, as those of a chip and a shape.

Cycles are the compiler's bundles times the turns of loops: the arithmetic, without waits for copies
and without what rare rows need. Beside them stands the time in which the chip reads the logits, and
for v6e what the compiler estimates for the plain way. The limits: cycles within 5 % of those kept,
which must be there (`cycles.json` of the oldest libtpu, and what `cycles-0.0.52.json` has instead
for that one and later ones); the shares of the bytes' time on v5e, and of the plain way's cycles on
v6e; a minute of processor time and 4 GB to compile; one operation that reads the logits beside the
gather of the given tokens', and no temporaries of the logits' size. On both sides of the limits of
`kernel_is_faster`, what it chooses must take fewer cycles than the other. And in the
worker's programs, split over 2 x 2 devices, the kernel must be there, and nothing else may sort or
search the vocabulary (`bench.tpu.steps`).
"""

import argparse
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.tpu.grid import LIMITED, STEPS, name, programs, steps_name
from bench.tpu.programs import BANDWIDTHS, CLOCKS, TOPOLOGIES, WAYS, Compiled
from bench.tpu.steps import Step, sizes
from pallas_kernels.backends.mosaic_tpu.limits import kernel_is_faster
from pallas_kernels.testing.shapes import Shape

KEPT = Path(__file__).parent / "tpu" / "cycles.json"
SLACK = 0.05
SECONDS = 60
GIGABYTES = 4.0
READS = 2  # the kernel's, and the gather of the given tokens' logits
# By K: of the bytes' time on v5e, and how many times better than the plain way on v6e.
OF_BYTES = {0: 1.3, 20: 1.5}
THAN_PLAIN = {0: 2.0, 20: 14.0, 64: 22.0}
# Of these shapes the plain way is quick, and the vector unit is full (docs/kernels_model.md): what
# is reached in place of twice. A row's sum of its groups, for the same bits in every call, takes
# 1.3 times the cycles of one that is added in any order.
REACHED = {
    Shape(64, 151_936, 0, "bfloat16"): 1.55,
    Shape(256, 131_072, 0, "bfloat16"): 1.55,
    Shape(256, 151_936, 0, "bfloat16"): 1.65,
    Shape(64, 151_936, 0, "float32"): 1.55,
    Shape(256, 131_072, 0, "float32"): 1.4,
    Shape(256, 151_936, 0, "float32"): 1.55,
    # A short row, and one that fills one of sixteen places.
    Shape(64, 32_768, 0, "float32"): 1.2,
    Shape(1, 131_072, 20, "bfloat16"): 1.85,
}
OUTPUTS = 512  # columns that outputs may have
BESIDE = 1 << 20  # bytes of other temporaries
OPTIONS: dict[str, dict[str, Any]] = {
    "--quick": {"action": "store_true", "help": "few shapes, on v5e and v6e"},
    "--keep": {"action": "store_true", "help": "write the cycles to compare with"},
    "--chip": {"choices": TOPOLOGIES, "help": "the programs of one chip"},
    "--way": {"choices": (*WAYS, "steps"), "help": "the programs of one way"},
    "--shape": {"metavar": "'R V K DTYPE'", "help": "whose shapes begin so: '64 131072'"},
}
AS_FAST = 0.01  # of the cycles of the plain way: what finding invalid rows may cost
UNDECIDED = 0.1  # of the cycles: by so much the choice may be the slower one


def broken(options: argparse.Namespace) -> int:
    """Compile every shape; returns how many programs break a limit."""
    if importlib.util.find_spec("libtpu") is None:
        print("NOT RUN: libtpu is not installed: pip install -e '.[aot-tpu]'")
        return 1
    kept = kept_cycles()
    wanted = [one for one in programs(options.quick) if is_wanted(name(*one), options)]
    begin = time.monotonic()
    results: list[Compiled] = []
    failed = 0
    for number, program in enumerate(wanted, 1):
        try:
            one = compiled(*program)
        except RuntimeError as error:
            print(f"FAILED {error}", flush=True)
            failed += 1
            continue
        results.append(one)
        place = f"{time.monotonic() - begin:6.0f} s  {number}/{len(wanted)}"
        print(f"{place} {key(one)}: {one.cycles:,} cycles, {one.seconds} s", flush=True)
        if options.keep:
            file = kept_files(libtpu_version())[-1]
            more = json.loads(file.read_text()) if file.exists() else {}
            more |= {key(one): one.cycles}
            file.write_text(json.dumps(dict(sorted(more.items())), indent=1) + "\n")
    chips = [] if options.quick else [one for one in STEPS if is_wanted(steps_name(*one), options)]
    failed += print_table(results, kept) + sum(print_steps(*one) for one in chips)
    slowest = max((one.seconds for one in results), default=0)
    largest = max((one.gigabytes for one in results), default=0)
    print(f"to compile: at most {slowest} s and {largest} GB")
    return failed


def is_wanted(program: str, options: argparse.Namespace) -> bool:
    """Whether a program of this name is to be compiled."""
    chip, way, shape = program.split(" ", 2)
    if (options.chip or chip) != chip or (options.way or way) != way:
        return False
    return options.shape is None or f"{shape} ".startswith(f"{options.shape} ")


def kept_cycles() -> dict[str, int]:
    """The cycles to compare with, by the programs' names."""
    kept: dict[str, int] = {}
    for file in kept_files(libtpu_version()):
        kept |= json.loads(file.read_text()) if file.exists() else {}
    return kept


def kept_files(version: tuple[int, ...]) -> list[Path]:
    """The files of cycles for this libtpu: of the oldest, and what later ones have of their own."""
    own = {}
    for file in KEPT.parent.glob(f"{KEPT.stem}-*.json"):
        own[tuple(map(int, file.stem.removeprefix(f"{KEPT.stem}-").split(".")))] = file
    return [KEPT, *(own[number] for number in sorted(own) if number <= version)]


def libtpu_version() -> tuple[int, ...]:
    """Of the compiler at hand; () where there is none."""
    try:
        return tuple(map(int, importlib.metadata.version("libtpu").split(".")[:3]))
    except importlib.metadata.PackageNotFoundError:
        return ()


def compiled(chip: str, way: str, shape: Shape) -> Compiled:
    """One program, compiled by a process of its own."""
    given = chip, way, shape.rows, shape.vocabulary, shape.k, shape.dtype
    return Compiled(**run("programs", *given)[-1])


def run(module: str, *arguments: object) -> list[dict[str, Any]]:
    """The objects that a module of `bench.tpu` prints, in a process of its own.

    Raises:
      RuntimeError: it failed.
    """
    command = [sys.executable, "-m", f"bench.tpu.{module}", *map(str, arguments)]
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode:
        raise RuntimeError(f"{' '.join(command[2:])} failed:\n{found.stderr[-2000:]}")
    return [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]


def key(one: Compiled) -> str:
    """The name of a program that was compiled."""
    return name(one.chip, one.way, Shape(one.rows, one.vocabulary, one.k, one.dtype))


def bytes_cycles(one: Compiled) -> float:
    """Cycles in which the chip reads the logits."""
    size = one.rows * one.vocabulary * (4 if one.dtype == "float32" else 2)
    return size / BANDWIDTHS[one.chip] * CLOCKS[one.chip]


def faults(
    one: Compiled, plain: Compiled | None, kept: int | None, xla: Compiled | None = None
) -> list[str]:
    """What breaks a limit; the plain way and XLA of the same shape, where they were compiled."""
    if one.way == "plain":
        return []
    found = []
    if kept is None:
        found.append("no cycles are kept to compare with")
    elif one.cycles > kept * (1 + SLACK):
        found.append(f"{one.cycles / kept - 1:.1%} more cycles than {kept}")
    if one.way in ("xla", "linear"):
        slower = plain is not None and one.cycles > plain.cycles * (1 + AS_FAST)
        return [*found, "more cycles than the plain way"] if slower else found
    if one.seconds > SECONDS or one.gigabytes > GIGABYTES:
        found.append(f"{one.seconds} s and {one.gigabytes} GB to compile")
    if one.reads > READS and one.vocabulary > OUTPUTS:  # else outputs look like logits
        found.append(f"{one.reads} operations read the logits")
    if one.temporaries > one.rows * one.vocabulary + BESIDE:
        found.append(f"{one.temporaries} bytes of temporaries: the logits are written")
    if one.way != "kernel":
        return found
    if xla is not None:
        chosen, other = one, xla
        if not kernel_is_faster(one.rows, one.vocabulary, one.k, one.dtype):
            chosen, other = other, chosen
        if chosen.cycles > other.cycles * (1 + UNDECIDED):
            found.append(f"None takes {chosen.way}, where {other.way} takes fewer cycles")
    share = one.cycles / bytes_cycles(one)
    shape = Shape(one.rows, one.vocabulary, one.k, one.dtype)
    if one.chip == "v5e" and shape in LIMITED and share > OF_BYTES.get(one.k, share):
        found.append(f"{share:.2f} of the bytes' time, {OF_BYTES[one.k]} are allowed")
    better = REACHED.get(shape, THAN_PLAIN.get(one.k, 0.0))
    if plain is not None and plain.cycles < better * one.cycles:
        found.append(f"{plain.cycles / one.cycles:.2f}x, {better}x are wanted")
    return found


def print_table(results: list[Compiled], kept: dict[str, int]) -> int:
    """Every program's cycles; returns how many break a limit."""
    by_key = {key(one): one for one in results}
    table = Table()
    for header in ("chip", "R, V, K, dtype", "way", "cycles", "us", "of the bytes", "than plain",
                   ""):  # fmt: skip
        table.add_column(header, justify="right")
    broken = 0
    for one in results:
        plain, xla = (by_key.get(key(one).replace(one.way, way)) for way in ("plain", "xla"))
        plain = plain if one.way in ("kernel", "xla") else None
        wrong = faults(one, plain, kept.get(key(one)), xla if one.way == "kernel" else None)
        broken += bool(wrong)
        table.add_row(
            one.chip,
            f"{one.rows} {one.vocabulary} {one.k} {one.dtype}",
            one.way,
            f"{one.cycles:,}",
            f"{one.cycles / CLOCKS[one.chip] / 1000:.1f}",
            f"{one.cycles / bytes_cycles(one):.2f}",
            "" if plain is None else f"{plain.cycles / one.cycles:.1f}x",
            "; ".join(wrong),
        )
    Console(width=160).print(table)
    return broken


def print_steps(chip: str, devices: int, vocabulary: int) -> int:
    """The worker's programs on a chip; returns how many break a limit."""
    try:
        steps = [Step(**fields) for fields in run("steps", chip, devices, vocabulary)]
    except RuntimeError as error:
        print(f"FAILED {error}")
        return 1
    broken = 0
    for step in steps:
        wrong = step_faults(step)
        broken += bool(wrong)
        carried = ", ".join(f"{count} {what}" for what, count in step.collectives.items())
        print(f"{chip} x {devices}, {step.program}: {step.kernels} kernels; {carried}")
        print(f"  {step.seconds} s to compile", *wrong, sep="\n  ", flush=True)
    return broken


def step_faults(step: Step) -> list[str]:
    """What of a worker's program breaks a limit."""
    columns = step.vocabulary // step.devices
    found = [f"{one}, of the vocabulary's size" for one in (*step.searched, *step.looped)]
    found += [
        f"{one} is large" for one in step.collectives if max(sizes(one), default=0) >= columns
    ]
    return found if step.kernels else [*found, "the kernel is not in it"]
