"""The machine code of a kernel for NVIDIA GPUs since Volta, read from nvdisasm's listing.

An instruction has 128 bits. The upper ones tell the scheduler what ptxas decided: for how many
clocks the warp stalls after it, which of six scoreboards its result or its operands hold, and for
which scoreboards it waits. (Z. Jia et al., "Dissecting the NVIDIA Volta GPU architecture via
microbenchmarking", 2018, section 2.1; the layout is that of Hopper too.)
"""

import functools
import re
from dataclasses import dataclass

LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s*/\* (0x[0-9a-f]{16}) \*/")
UPPER = re.compile(r"^/\* (0x[0-9a-f]{16}) \*/$")
LABEL = re.compile(r"^(\.L_x_\d+):")
BRANCH = re.compile(r"\bBRA\b.*?(\.L_x_\d+)")
NO_SCOREBOARD = 7


@dataclass(frozen=True)
class Instruction:
    """One instruction of a warp."""

    text: str  # with its predicate
    stall: int  # clocks until the warp may issue the next one
    sets: tuple[int, ...]  # scoreboards that are free once its result is there
    reads: tuple[int, ...]  # scoreboards that are free once its operands have been read
    waits: tuple[int, ...]  # scoreboards that must be free

    @functools.cached_property
    def name(self) -> str:
        """The operation with its modifiers, without its predicate."""
        return re.sub(r"^@!?U?P\w+\s+", "", self.text).split()[0]


@dataclass(frozen=True)
class Loop:
    """Instructions from the target of a backward branch to the branch, by their indices."""

    begin: int
    end: int  # the index after the branch


@dataclass(frozen=True)
class Code:
    """A kernel's instructions as they lie in memory, and its loops, outer ones first."""

    instructions: tuple[Instruction, ...]
    loops: tuple[Loop, ...]
    skipped: tuple[Loop, ...] = ()  # what forward branches leave out

    def until_exit(self) -> "Code":
        """The code up to the first EXIT without a condition behind all loops.

        What follows it is the other side of a branch that leaves a kernel early.
        """
        last = max((loop.end for loop in self.loops), default=0)
        for i, x in enumerate(self.instructions):
            if i >= last and x.text.startswith("EXIT"):
                return Code(self.instructions[: i + 1], self.loops)
        return self

    def between(self, begin: int, end: int) -> "Code":
        """Some of the instructions, with the loops and branches among them."""

        def inside(found: tuple[Loop, ...]) -> tuple[Loop, ...]:
            return tuple(Loop(x.begin - begin, x.end - begin) for x in found
                         if begin <= x.begin and x.end <= end)  # fmt: skip

        return Code(self.instructions[begin:end], inside(self.loops), inside(self.skipped))

    def around_cluster_barrier(self) -> tuple["Code", "Code"]:
        """What all programs of a cluster do, and what the one does that waits for the others."""
        (*_, arrive), (*_, wait) = (
            [i for i, x in enumerate(self.instructions) if x.name.startswith(name)]
            for name in ("UCGABAR_ARV", "UCGABAR_WAIT")
        )
        return self.between(0, arrive + 1), self.between(wait, len(self.instructions))

    def names(self, loop: Loop) -> tuple[str, ...]:
        """The operations in a loop."""
        return self._names[loop.begin : loop.end]

    @functools.cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(x.name for x in self.instructions)


def parse(listing: str) -> Code:
    """The code in `nvdisasm -c -hex`'s listing of one kernel.

    Code behind the last EXIT is left out: padding, and the way of warps whose lanes have diverged
    through shuffles.
    """
    labels: dict[str, int] = {}
    found: list[tuple[str, int]] = []
    for line in map(str.strip, listing.splitlines()):
        if label := LABEL.match(line):
            labels[label[1]] = len(found)
        elif instruction := LINE.search(line):
            found.append((instruction[2], 0))
        elif (upper := UPPER.match(line)) and found:
            found[-1] = found[-1][0], int(upper[1], 16)
    instructions = [_decoded(text, upper) for text, upper in found]
    ends = [i + 1 for i, x in enumerate(instructions) if x.name == "EXIT"]
    instructions = instructions[: ends[-1]] if ends else instructions
    loops, skipped = [], []
    for i, x in enumerate(instructions):
        target = BRANCH.search(x.text)
        place = labels.get(target[1], i) if target else i
        if place < i:
            loops.append(Loop(place, i + 1))
        elif place > i:
            skipped.append(Loop(i + 1, place))
    loops.sort(key=lambda loop: (loop.begin, -loop.end))
    return Code(tuple(instructions), tuple(loops), tuple(skipped))


def _decoded(text: str, upper: int) -> Instruction:
    control = upper >> 41
    result, operands, waits = control >> 5 & 7, control >> 8 & 7, control >> 11 & 63
    return Instruction(
        text,
        control & 15,
        () if result == NO_SCOREBOARD else (result,),
        () if operands == NO_SCOREBOARD else (operands,),
        tuple(i for i in range(6) if waits >> i & 1),
    )
