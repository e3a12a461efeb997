"""Pass 1's time by events: programs on multiprocessors, and memory as one queue. No measurement.

The bound of `bench.gpu.model` takes the longest of three times, as if a kernel's start, its first
load and the tail of its last programs cost nothing. Of few rows they are what there is. Here a
program starts in a free place of a multiprocessor, waits for its first values, asks the memory for
a step, waits until those who asked before have theirs and for the latency of a load, computes the
step on pipes that it shares, and asks for the next.

It rests on the machine code's stalls and scoreboards (ptxas), and on what `Chip` assumes: the
latency of a load, the share of the bandwidth that large copies reach.
"""

import heapq
from collections import deque
from typing import NamedTuple

from bench.gpu import model
from bench.gpu.machine_code import Code, Instruction, Loop


class Parts(NamedTuple):
    """A program: turns of its main loop, and clocks."""

    turns: float
    start: float  # until the main loop begins
    of_edges: float  # until a program that reads a row's edges is where the others begin
    turn: float  # of one program alone, from its loads to the next ones
    end: float
    issue: float  # of a turn, on the pipe that it occupies most


def pass1(kernel: model.Launched, edges: int, rows: int, chip: model.Chip) -> float:
    """Seconds from the first program's start to the last one's end.

    Args:
      kernel: pass 1; its main loop is the one that turns most.
      edges: programs of a row, its last ones, that read no step.
      rows: R.
      chip: what it runs on.
    """
    parts, of_row = _parts(kernel, chip), kernel.programs // rows
    readers = of_row - edges
    reads = kernel.bytes / (rows * readers * parts.turns)
    seconds = reads / (chip.bandwidth * chip.efficiency)
    step, pipes = seconds * chip.clock, [0.0] * chip.multiprocessors
    waiting = deque(i % of_row < readers for i in range(kernel.programs))
    events: list[tuple[float, int, float]] = []

    def begin(now: float, place: int) -> None:
        if waiting:
            reader = waiting.popleft()
            then = now + (parts.start if reader else parts.of_edges)
            heapq.heappush(events, (then, place, parts.turns if reader else 0))

    for i in range(chip.multiprocessors * model.resident(kernel, chip)):
        begin(0.0, i % chip.multiprocessors)
    memory = last = 0.0
    while events:
        now, place, left = heapq.heappop(events)
        if left > 0:
            memory = max(now, memory) + step
            pipes[place] = max(memory, pipes[place]) + parts.issue
            heapq.heappush(events, (max(memory + parts.turn, pipes[place]), place, left - 1))
        else:
            last = max(last, now + parts.end)
            begin(now + parts.end, place)
    return last / chip.clock


def _parts(kernel: model.Launched, chip: model.Chip) -> Parts:
    """What the machine code says of a program; one of a single step has no loop."""
    code = kernel.code
    turns = max((kernel.trips(code, loop) for loop in code.loops), default=0)

    def with_turns(times: float) -> model.Block:
        return model.structure(code, lambda _, loop: times if loop == main else trips(loop))

    def trips(loop: Loop) -> float:
        return kernel.trips(code, loop)

    def issued(block: model.Block) -> float:
        counts = model.counts(code, block)
        return max(sum(counts.values()), *(chip.pipes[name] * n for name, n in counts.items()))

    main = next((loop for loop in code.loops if turns and trips(loop) == turns), None)
    if main is None:
        block = with_turns(1)
        return Parts(1, 0.0, 0.0, model.chain(code, block, chip), 0.0, issued(block))

    def alone(instructions: tuple[Instruction, ...]) -> float:
        part = Code(instructions, ())
        return model.chain(part, model.structure(part, lambda *_: 1), chip)

    # Of the branches before the loop, the one around most is around the edges.
    before = [skipped for skipped in code.skipped if skipped.end <= main.begin]
    around = max(before, key=lambda x: x.end - x.begin, default=Loop(0, 0))
    own = code.instructions[: around.begin] + code.instructions[around.end : main.begin]
    start, of_edges = alone(own), alone(code.instructions[: main.begin])
    one, two = (model.chain(code, with_turns(times), chip) for times in (1, 2))
    issue = issued(with_turns(2)) - issued(with_turns(1))
    return Parts(turns, start, of_edges, two - one, max(0.0, 2 * one - two - of_edges), issue)
