"""A model of the GPU kernels' time, from their machine code. It is no measurement.

What it knows: the instructions of each kernel by pipe, the clocks that ptxas makes a warp stall and
the scoreboards that it makes it wait for, the bytes that are read and written, the programs and how
many run at once. What it assumes is in `Chip`, whose figures are those of `chips.GPUS`,
and in `Trips`.

Programs run in rounds of as many as fit at once. A round takes the longest of three times:

- its bytes over the memory's speed;
- its instructions over the speed of the busiest pipe, on the multiprocessor with most programs;
- the chain of one program: what ptxas makes it stall, and what it waits for.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from bench.gpu.machine_code import Code, Instruction, Loop
from pallas_kernels.testing.chips import GPUS

WARPS = 4  # of a program: one on each quarter of a multiprocessor


@dataclass(frozen=True)
class Chip:
    """A GPU. Throughputs: CUDA C++ Programming Guide, "Arithmetic Instructions", 8.0 to 9.0."""

    multiprocessors: int
    clock: float
    bandwidth: float
    cache: float  # bytes of the second level that are kept for sure: half of it
    most_warps: int
    # Clocks of a quarter's pipe for one instruction of a warp.
    pipes: dict[str, float]
    efficiency: float = 0.90  # of the bandwidth, as large copies reach
    registers: int = 65536
    launch: float = 1.0e-6  # from the end of the kernel before to the first instruction of the next
    # Clocks until a result is there, of an H100 and taken for the others too. Memory: loads of pass
    # 2 come from the second-level cache for few rows; the model has them all from memory.
    latencies: dict[str, int] = field(
        default_factory=lambda: {
            "LDG": 650, "LD.": 650, "LDS": 30, "ATOMS": 70, "SHFL": 24, "REDUX": 24, "MUFU": 22,
            "POPC": 18, "FLO": 18, "S2R": 40, "S2UR": 40, "LDC": 30, "ULDC": 30, "BAR": 30,
            "F2I": 18, "I2F": 18, "VOTE": 12,
        }
    )  # fmt: skip
    cached: int = 40  # of what was loaded just before


def chip(name: str) -> Chip:
    """A GPU of `chips.GPUS`, by the name that it has there."""
    gpu = GPUS[name]
    pipes = {"fma": 128 / gpu.fma_lanes, "integer": 2, "special": 8, "memory": 4, "other": 1}
    return Chip(
        gpu.multiprocessors, gpu.busy_ghz * 1e9, gpu.bandwidth, gpu.cache / 2, gpu.threads // 32,
        pipes,
    )  # fmt: skip


FMA = ("FFMA", "FMUL", "FADD", "HADD2", "HMUL2", "HFMA2", "MOV", "NOP")
SPECIAL = ("MUFU", "POPC", "FLO", "F2I", "I2F", "F2F", "BREV")
MEMORY = ("LDG", "LD.", "LDS", "STG", "ST.", "STS", "ATOM", "SHFL", "LDC", "RED.")
OTHER = ("BRA", "BSSY", "BSYNC", "EXIT", "BAR", "WARPSYNC", "S2R", "S2UR", "ELECT", "U", "R2UR")


def pipe(instruction: Instruction) -> str:
    """The pipe that an instruction occupies."""
    name = instruction.name
    for kind, names in (("fma", FMA), ("special", SPECIAL), ("memory", MEMORY), ("other", OTHER)):
        if name.startswith(names):
            return kind
    return "integer"  # integers, comparisons, selections, minima; IMAD has their speed


Trips = Callable[[Code, Loop], float]  # how often a warp runs through a loop


@dataclass(frozen=True)
class Block:
    """Instructions that a warp runs `times` times for each time it runs what is around them."""

    begin: int
    end: int
    times: float
    inner: tuple["Block", ...]
    reads_again: bool  # what was loaded just before: an innermost loop with an atomic addition


def structure(code: Code, trips: Trips) -> Block:
    """The kernel as nested loops. Both sides of a branch count, as if it took both."""

    def within(begin: int, end: int, loops: tuple[Loop, ...]) -> tuple[Block, ...]:
        inner, place = [], begin
        while loops:
            first, *others = loops
            inside = tuple(x for x in others if x.begin >= first.begin and x.end <= first.end)
            if first.begin >= place and first.end <= end:
                children = within(first.begin, first.end, inside)
                atomic = any(name.startswith("ATOM") for name in code.names(first))
                block = first.begin, first.end, trips(code, first), children
                inner.append(Block(*block, reads_again=atomic and not children))
                place = first.end
            loops = tuple(x for x in others if x not in inside)
        return tuple(inner)

    size = len(code.instructions)
    return Block(0, size, 1, within(0, size, code.loops), False)


def counts(code: Code, block: Block) -> dict[str, float]:
    """How many instructions a warp issues, by pipe."""
    total: defaultdict[str, float] = defaultdict(float)
    for part in _parts(block):
        if isinstance(part, Block):
            for name, number in counts(code, part).items():
                total[name] += number * part.times
        else:
            total[pipe(code.instructions[part])] += 1
    return total


def _parts(block: Block) -> Iterator[Block | int]:
    place = block.begin
    for inner in block.inner:
        yield from range(place, inner.begin)
        yield inner
        place = inner.end
    yield from range(place, block.end)


def chain(code: Code, block: Block, chip: Chip, ends: bool = True) -> float:
    """The clocks of a warp that has a quarter for itself: stalls, and waits for scoreboards.

    A loop is walked twice; its other turns take as long as the second one.

    Args:
      ends: whether what is under way at the end is waited for.
    """
    busy = [0.0] * 6
    now = 0.0

    def step(instruction: Instruction, again: bool) -> None:
        nonlocal now
        now = max([now, *(busy[i] for i in instruction.waits)])
        latency = _latency(instruction, again, chip)
        for i in instruction.sets:
            busy[i] = max(busy[i], now + latency)
        for i in instruction.reads:
            busy[i] = max(busy[i], now + 12)
        if instruction.name.startswith("BAR"):
            now += latency
        now += max(instruction.stall, 1)

    def walk(part: Block) -> None:
        nonlocal now
        again = part.reads_again
        for x in _parts(part):
            if not isinstance(x, Block):
                step(code.instructions[x], again)
                continue
            turns = x.times
            for _ in range(2):
                if turns <= 0:
                    break
                before = now
                walk(x)
                if turns < 1:
                    now = before + turns * (now - before)
                turns -= 1
            if turns > 0:
                now += turns * (now - before)

    walk(block)
    return max([now, *busy]) if ends else now


def _latency(instruction: Instruction, again: bool, chip: Chip) -> int:
    name = instruction.name
    if name.startswith(("LDG", "LD.")) and again:
        return chip.cached
    return next((x for key, x in chip.latencies.items() if name.startswith(key)), 10)


@dataclass(frozen=True)
class Launched:
    """A kernel and how it is launched."""

    code: Code
    registers: int
    programs: int
    bytes: float  # read and written by all programs
    trips: Trips


@dataclass(frozen=True)
class Time:
    """Seconds of a kernel without its start, and what they are made of."""

    total: float
    memory: float  # all bytes at the memory's speed
    instructions: float  # all instructions on the busiest pipe
    latency: float  # the chain of one program
    per_thread: float  # instructions that a thread issues
    busiest: float  # of one program, on the pipe that it occupies most


def resident(kernel: Launched, chip: Chip) -> int:
    """How many programs share a multiprocessor."""
    return places(kernel.registers, chip)


def places(registers: int, chip: Chip) -> int:
    """How many programs of so many registers a thread a multiprocessor has room for."""
    each = -(-registers // 8) * 8 * 32 * WARPS
    return max(1, min(chip.registers // each, chip.most_warps // WARPS))


def time(kernel: Launched, chip: Chip) -> Time:
    """The model's time of one kernel."""
    block = structure(kernel.code, kernel.trips)
    issued = counts(kernel.code, block)
    each = sum(issued.values())
    busiest = max(each, *(chip.pipes[name] * number for name, number in issued.items()))
    alone = chain(kernel.code, block, chip) / chip.clock

    def memory(programs: int) -> float:
        return kernel.bytes * programs / kernel.programs / (chip.bandwidth * chip.efficiency)

    def instructions(programs: int) -> float:
        return -(-programs // chip.multiprocessors) * busiest / chip.clock

    def together(programs: int) -> float:
        """Of programs that all run at once."""
        return max(memory(programs), instructions(programs), alone) if programs else 0.0

    at_once = chip.multiprocessors * resident(kernel, chip)
    rounds, rest = divmod(kernel.programs, at_once)
    return Time(
        rounds * together(at_once) + together(rest),
        memory(kernel.programs),
        instructions(kernel.programs),
        alone,
        each,
        busiest / chip.clock,
    )
