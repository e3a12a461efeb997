"""Cycles of a TPU program, from the compiler's listings of its VLIW bundles.

A TensorCore issues one bundle a clock, in order. So the bundles of a loop times its turns are the
time of its arithmetic; waits for copies are not in it. Both branches of a condition are counted.

libtpu writes a listing for each operation of a program. Bundles of loops are marked by one `>` for
each loop around them, the first one of a loop by `LB`. A loop's last bundles have its exit test,
which names the number of turns where it is a constant.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

BUNDLE = re.compile(
    r"^\s*(?:0x[0-9a-f]+|0)\s+(?P<labels>(?:[A-Z]{2} ?)*)\s*:(?P<depth>[ >]*)\{(?P<empty>\})?"
)
TEST = re.compile(r"= scmp\.\w+\.[su]32\.totalorder (?:\([^)]*\), )?%\w+, (%?\w+) /\* loop exit")


@dataclass
class Loop:
    """A loop, or the whole program: its own bundles, and the loops in it."""

    inner: list["Loop"] = field(default_factory=list)
    bundles: int = 0
    turns: int | None = None  # None: no constant
    is_tested: bool = False
    numbers: list[int] = field(default_factory=list)  # of its own bundles

    def cycles(self, unknown: int) -> int:
        """Cycles of all turns; `unknown` for loops whose number of turns is no constant."""
        once = self.bundles + sum(loop.cycles(unknown) for loop in self.inner)
        return once * (unknown if self.turns is None else self.turns)


def read(listing: str) -> Loop:
    """The loops of a listing."""
    root = Loop(turns=1)
    around = [root]  # the loops that a line is in
    number = 0
    for line in listing.splitlines():
        found = BUNDLE.match(line)
        if found is None:
            continue
        # An empty bundle carries no marks.
        depth = len(around) - 1 if found["empty"] else found["depth"].count(">")
        begins = "LB" in found["labels"]
        del around[depth if begins and depth else depth + 1 :]
        while len(around) <= depth:
            # Without a beginning these are the last bundles of the loop before.
            if begins or not around[-1].inner:
                around[-1].inner.append(Loop())
            around.append(around[-1].inner[-1])
        around[-1].bundles += 1
        around[-1].numbers.append(number)
        number += 1
        for turns in TEST.findall(line):  # an inner loop's comes before that of the one around it
            tested = next((loop for loop in reversed(around[1:]) if not loop.is_tested), None)
            if tested is not None:
                tested.is_tested = True
                tested.turns = int(turns) if turns.isdigit() else None
    return root


def kernel_cycles(program: Loop, units: int, batches: int) -> int:
    """Cycles of the kernel: its loop over units has no constant number of turns.

    Where there are several batches, the loop over them has more turns than batches: in the first
    and the last ones only copies start or end.
    """
    grid = next((loop for loop in program.inner if _has_unknown(loop)), None)
    if batches == 1 or grid is None:
        return program.cycles(units)
    others = sum(loop.cycles(1) for loop in program.inner if loop is not grid)
    work = sum(
        loop.cycles(units) if loop.turns is None else batches * loop.cycles(1)
        for loop in grid.inner
    )
    return program.bundles + others + (grid.turns or 1) * grid.bundles + work


def block_cycles(program: Loop, units: int, batches: int, k: int, blocks: int) -> int:
    """Cycles of the kernel where a grid step is a block of a unit: at most so many.

    The loop over blocks has more turns, in which only copies start or end. Its bundles before its
    first inner loop, which are more than a block's own, are counted for every block; what follows,
    for a unit; the order, its loop of k turns, for a batch.
    """
    grid = max(program.inner, key=lambda loop: loop.cycles(1))
    orders = [loop for loop in grid.inner if k and loop.turns == k]
    begin = min(number for loop in grid.inner for number in loop.numbers)
    first = sum(number < begin for number in grid.numbers)
    unit = grid.bundles - first + sum(one.cycles(1) for one in grid.inner if one not in orders)
    others = program.cycles(1) - grid.cycles(1) + batches * sum(one.cycles(1) for one in orders)
    return others + units * (blocks * first + unit)


def plain_cycles(program: Loop, listing: str, k: int) -> int:
    """Cycles of an operation that XLA made: at least so many.

    `TopK` copies a block of rows in one or several turns of its loop and searches K times, in a
    loop of its own, in the last of them. How many turns a block takes stands in a multiplication in
    place of a division (2731 / 8192 is a third). Without one, each turn may be a whole block, but
    for a last turn that only writes; that turn's number stands in the loop's first bundle. Where
    neither is found, one search is counted.
    """
    if k == 0 or not any(inner.turns == k for loop in program.inner for inner in loop.inner):
        return program.cycles(1)
    outer = next(loop for loop in program.inner if any(one.turns == k for one in loop.inner))
    turns = outer.turns or 1
    found = re.search(r"smul\.u32 (\d+), ", listing)
    if found and int(found[1]) < 2**13:
        searches = max(1, turns // max(round(2**13 / int(found[1])), 1))
    else:
        skips = re.search(rf" LB: > .*scmp\.ge\.s32\.totalorder %\w+, {turns - 1} ", listing)
        searches = turns - 1 if skips else 1
    often = sum(one.cycles(1) for one in outer.inner if one.turns == k)
    return program.cycles(1) - (turns - searches) * often


def _has_unknown(loop: Loop) -> bool:
    return any(inner.turns is None for inner in loop.inner)


def listings(folder: Path) -> dict[str, str]:
    """The final listing of every operation in the folder, by name."""
    found = {}
    for path in sorted(folder.glob("*-final_bundles.txt")):
        name = re.fullmatch(r"\d+-(.*)-\d+-final_bundles.txt", path.name)
        if name is not None:  # others are about schedules
            found[name[1]] = path.read_text()
    return found
