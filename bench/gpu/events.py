"""The time of reading rows by events: programs on multiprocessors, memory as one queue.

No measurement. The bound of `bench.gpu.model` takes the longest of three times, as if a kernel's
start, its first load and the tail of its last programs cost nothing. Of few rows they are what
there is. Here a program starts in a free place of a multiprocessor, waits for its first values,
asks the memory for a step, waits until those who asked before have theirs and for the latency of a
load, computes the step on pipes that it shares, and asks for the next. Where a row's programs are a
cluster, they start together, and the first of them goes on once all have read.

It rests on the machine code's stalls and scoreboards (ptxas), and on what `Chip` assumes: the
latency of a load, the share of the bandwidth that large copies reach, the second-level cache.
"""

import heapq
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from bench.gpu import model
from bench.gpu.machine_code import Code, Loop


class Parts(NamedTuple):
    """A program: turns of its main loop, and clocks."""

    turns: float
    start: float  # until the main loop begins
    of_edges: float  # until a program that reads a row's edges is where the others begin
    turn: float  # of one program alone, from its loads to the next ones
    end: float
    issue: float  # of a turn, on the pipe that it occupies most


class Then(NamedTuple):
    """What the first program of a row does when all have read it."""

    clocks: float  # of a program alone
    issue: float  # of these, on the pipe that it occupies most
    bytes: float  # that it reads from memory


SLICES = 8  # of what a first program does, between which others use its pipes


def seconds(
    kernel: model.Launched, edges: int, rows: int, chip: model.Chip, then: Then | None = None
) -> float:
    """From the first program's start to the last one's end.

    Args:
      kernel: what reads; its main loop is the one that turns most.
      edges: programs of a row, its last ones, that read no step.
      rows: R.
      chip: what it runs on.
      then: None: a row's programs are no cluster.
    """
    parts, of_row = _parts(kernel, chip), kernel.programs // rows
    readers, together = of_row - edges, of_row if then else 1
    per_clock = chip.bandwidth * chip.efficiency / chip.clock
    step = kernel.bytes / (rows * readers * parts.turns) / per_clock
    free = deque(
        i % chip.multiprocessors for i in range(chip.multiprocessors * model.resident(kernel, chip))
    )
    pipes, left, first = [0.0] * chip.multiprocessors, [of_row] * rows, [0] * rows
    waiting = deque(range(kernel.programs))
    events: list[tuple[float, int, float, int]] = []  # when, which program, turns, its place

    def begin(now: float) -> None:
        while waiting and len(free) >= together:
            for _ in range(together):
                program = waiting.popleft()
                reads = program % of_row < readers
                then = now + (parts.start if reads else parts.of_edges)
                heapq.heappush(events, (then, program, parts.turns if reads else 0, free.popleft()))

    def end(now: float, place: int) -> None:
        free.append(place)
        begin(now)

    begin(0.0)
    memory = last = 0.0
    while events:
        now, program, turns, place = heapq.heappop(events)
        row = program // of_row
        if turns > 0:
            memory = max(now, memory) + step
            pipes[place] = max(memory, pipes[place]) + parts.issue
            turn = max(memory + parts.turn, pipes[place])
            heapq.heappush(events, (turn, program, turns - 1, place))
        elif turns == 0 and then is None:
            last = max(last, now + parts.end)
            end(now + parts.end, place)
        elif turns == 0:
            left[row] -= 1
            if program % of_row:
                end(now + parts.end, place)
            else:
                first[row] = place
            if not left[row]:
                heapq.heappush(events, (now + parts.end, row * of_row, -1.0, first[row]))
        elif then is not None and turns >= -SLICES:
            if turns == -1:
                memory = max(now, memory) + then.bytes / per_clock
            pipes[place] = max(now, pipes[place]) + then.issue / SLICES
            turn = max(now + then.clocks / SLICES, pipes[place], memory if turns == -1 else 0.0)
            heapq.heappush(events, (turn, program, turns - 1, place))
        else:
            last = max(last, now)
            end(now, place)
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

    def alone(places: Iterable[int]) -> float:
        part = Code(tuple(code.instructions[i] for i in places), ())
        return model.chain(part, model.structure(part, lambda *_: 1), chip, ends=False)

    # Of the branches around no loops in loops, the one around most is around the edges.
    outer = [
        x for x in code.loops if x == main or (trips(x) and any(_within(y, x) for y in code.loops))
    ]
    branches = [
        x for x in code.skipped if all(x.end <= loop.begin or x.begin >= loop.end for loop in outer)
    ]
    around = max(branches, key=lambda x: x.end - x.begin, default=Loop(0, 0))
    edges = range(around.begin, around.end)
    start = alone(i for i in range(main.begin) if i not in edges)
    never = {
        i for x in code.loops if trips(x) == 0 and any(_within(x, y) for y in code.loops)
        for i in range(x.begin, x.end)
    }  # fmt: skip
    end = alone(i for i in range(main.end, len(code.instructions)) if i not in (*edges, *never))
    one, two = (model.chain(code, with_turns(times), chip) for times in (1, 2))
    issue = issued(with_turns(2)) - issued(with_turns(1))
    return Parts(turns, start, start + alone(edges), two - one, end, issue)


def _within(a: Loop, b: Loop) -> bool:
    return a != b and b.begin <= a.begin and a.end <= b.end
