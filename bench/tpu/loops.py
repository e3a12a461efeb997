"""Loops of a compiled program that read the vocabulary in each of many turns."""

import re
from collections.abc import Iterator

COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.\-]+) \(.*\{$")
CALLED = re.compile(
    r"(?:body|condition|calls|to_apply|true_computation|false_computation)=%([\w.\-]+)"
)
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
OPERATION = re.compile(r"^\s*(?:ROOT )?(%[\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^)]*)")
LOOP = re.compile(r" while\(.*condition=%([\w.\-]+), body=%([\w.\-]+)")
BOUND = re.compile(r"= s32\[\]\S* constant\((\d+)\)")
# These touch a part of their operands, or none; what fusions and branches do is looked at inside.
CHEAP = {
    "parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "fusion", "call",
    "dynamic-slice", "gather",
}  # fmt: skip


def looped(text: str, columns: int, turns: int) -> list[str]:
    """Loops of so many turns or more that work on so many columns or more in each.

    Loops whose number of turns is no constant are not among them: those over the rows of a list.
    """
    computations = by_name(text)
    found = []
    for lines in computations.values():
        for line in lines:
            loop = LOOP.search(line)
            if loop is None:
                continue
            bounds = [int(n) for x in computations[loop[1]] for n in BOUND.findall(x)]
            if max(bounds, default=0) < turns:
                continue
            every = _reached(loop[2], computations)
            work = [x for name in every for x in _work(computations[name], columns)]
            if work:
                found.append(f"{max(bounds)} turns of {loop[2]}: {', '.join(sorted(work)[:3])}")
    return found


def by_name(text: str) -> dict[str, list[str]]:
    """The lines of each computation of a compiled program."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        begin = COMPUTATION.match(line)
        if begin:
            lines = found.setdefault(begin[1], [])
        elif line.startswith("}"):
            lines = []
        else:
            lines.append(line)
    return found


def _reached(name: str, computations: dict[str, list[str]]) -> set[str]:
    """The computation, and all that it calls."""
    found: set[str] = set()
    left = [name]
    while left:
        one = left.pop()
        if one in found or one not in computations:
            continue
        found.add(one)
        for line in computations[one]:
            left += CALLED.findall(line)
            for names in BRANCHES.findall(line):
                left += re.findall(r"%([\w.\-]+)", names)
    return found


def _work(lines: list[str], columns: int) -> Iterator[str]:
    """The operations of a computation that take or make so many columns."""
    every = [found.groups() for line in lines if (found := OPERATION.match(line))]
    shapes = {name: shape for name, shape, *_ in every}
    for name, shape, kind, operands in every:
        given = [shapes.get(one, "") for one in re.findall(r"%[\w.\-]+", operands)]
        if kind not in CHEAP and max(map(_largest, [shape, *given])) >= columns:
            yield f"{kind} {name}"


def _largest(shape: str) -> int:
    dimensions = re.findall(r"\[([\d,]+)\]", re.sub(r"\{[^}]*\}", "", shape))
    return max((int(n) for one in dimensions for n in one.split(",")), default=0)
