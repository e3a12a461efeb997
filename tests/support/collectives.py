"""The collectives of a compiled program, and the bytes that they carry."""

import re
from typing import NamedTuple

import numpy as np

BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4,
         "f32": 4, "s64": 8, "u64": 8, "f64": 8}  # fmt: skip
KINDS = (
    "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast"
    "|ragged-all-to-all|send|recv"
)
LINE = re.compile(rf"= (.*?) ({KINDS})(-start)?\((.*)")
SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
NAME = re.compile(r'op_name="([^"]*)"')


class Collective(NamedTuple):
    """One collective instruction of a program."""

    kind: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]  # dtype and dimensions of its results
    op_name: str  # the JAX operation that it came from

    @property
    def num_bytes(self) -> int:
        """The bytes of its results on one device, each time that it runs."""
        return sum(BYTES[dtype] * int(np.prod(dims, dtype=int)) for dtype, dims in self.shapes)


def collectives(compiled):
    """Every collective of a compiled JAX program, also those in loops and branches, once each."""
    return [c for line in compiled.as_text().splitlines() if (c := collective(line))]


def collective(line):
    """The collective of a line of a program's text, or None."""
    match = LINE.search(line)
    if match is None:
        return None
    shapes = tuple(
        (dtype, tuple(int(d) for d in dims.split(",") if d))
        for dtype, dims in SHAPE.findall(match[1])
    )
    name = NAME.search(line)
    return Collective(match[2], shapes, name[1] if name else "")


def longest_axis(compiled):
    """The longest axis of what any collective carries; 0 if there is none."""
    shapes = [shape for one in collectives(compiled) for _, shape in one.shapes]
    return max((max(shape, default=1) for shape in shapes), default=0)


def bytes_of_a_run(compiled, branch=max):
    """The bytes that the collectives of one run carry; see `of_a_run`."""
    return of_a_run(compiled, lambda one: one.num_bytes, branch)


def of_a_run(compiled, weigh, branch=max):
    """The sum of `weigh(collective)` over one run; a loop counts as often as it goes round.

    Of every two branches, `branch` picks one by its sum.

    Raises:
      ValueError: a loop with a collective that weighs has no known number of trips.
    """
    parts, entry = {}, None
    for line in compiled.as_text().splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line):
            name = head[2]
            entry = name if head[1] else entry
            parts[name] = []
        elif line.startswith("  "):
            parts[name].append(line)

    def of(name):
        total = 0
        for line in parts[name]:
            if found := collective(line):
                total += weigh(found)
            elif " while(" in line:
                body = of(re.search(r"body=%?([\w.-]+)", line)[1])
                trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
                if body and not trips:
                    raise ValueError(f"a loop of unknown trips: {line.strip()[:200]}")
                total += body * int(trips[1]) if body else 0
            elif " conditional(" in line:
                if named := re.search(r"branch_computations=\{([^}]*)\}", line):
                    branches = re.findall(r"[\w.-]+", named[1])
                else:
                    branches = re.findall(r"(?:true|false)_computation=%?([\w.-]+)", line)
                total += branch(map(of, branches))
            elif " call(" in line:
                total += of(re.search(r"to_apply=%?([\w.-]+)", line)[1])
        return total

    return of(entry)
