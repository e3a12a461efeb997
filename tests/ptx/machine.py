"""CTAs of one launch, executed: all their threads in step, one NumPy lane each, until they diverge.

Threads that diverge run apart, those that are furthest behind in the program first, and join where
they meet. A barrier lets a CTA on when all its threads wait at it; threads that leave before, or
wait at another one, are an error. Warp instructions need every lane that their mask names.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.ptx import undefined
from tests.ptx.arithmetic import KINDS, OPERATIONS, TYPES, Errors
from tests.ptx.memory import Buffer, Lanes
from tests.ptx.parser import (
    SHARED_VARIABLE,
    Immediate,
    Instruction,
    Operand,
    Program,
    PtxError,
    Register,
    Sink,
    Symbol,
)

WARP = 32
REGION = 36  # an address: the buffer's number from this bit on, then its base and an offset
SHARED_BASE = 1024  # where dynamic shared memory starts; the driver has what lies before
MAX_INSTRUCTIONS = 20_000_000

Get = Callable[[], np.ndarray]


@dataclass(frozen=True)
class Launch:
    """What the host says, beside the program."""

    grid: tuple[int, int, int]
    shared_bytes: int
    buffers: tuple[Buffer, ...]  # one a parameter of the kernel


@dataclass(frozen=True)
class Hardware:
    """What the PTX ISA leaves open."""

    leader: int = 0  # of the lanes that elect.sync may choose: this one, counted from the first
    garbage: int = 0  # the byte in registers and shared memory that nobody wrote
    errors: Errors = field(default_factory=Errors)


@dataclass
class Counts:
    """What a run did, summed over its batches."""

    instructions: int = 0  # issued, for all threads at once
    barriers: int = 0  # passed by the CTA that passed most


class Machine:
    """Some CTAs of a launch, run together; global memory outlives it."""

    def __init__(
        self, program: Program, launch: Launch, ctas: Sequence[int], hardware: Hardware
    ) -> None:
        self.program, self.launch, self.hardware = program, launch, hardware
        if len(launch.buffers) != len(program.parameters):
            raise PtxError(
                f"{len(launch.buffers)} buffers for {len(program.parameters)} parameters"
            )
        self.num_threads = program.threads
        if launch.shared_bytes % 16 or program.threads % WARP:
            raise PtxError("only whole warps, and shared memory of whole 16 bytes, are known")
        lane = np.arange(len(ctas) * self.num_threads)
        self.local_cta = lane // self.num_threads
        self.tid = lane % self.num_threads
        self.cta = np.asarray(ctas)[self.local_cta].astype(np.int32)
        self.thread = (self.cta * self.num_threads + self.tid).astype(np.int32)
        self.epochs = np.zeros(len(ctas), np.int32)
        self.lanes = len(lane)
        self.registers: dict[str, np.ndarray] = {}
        self.undefined: dict[str, np.ndarray] = {}  # bits of registers without a defined value
        for name in undefined.never_written(program):
            dtype = TYPES[KINDS[program.kind(name)]]
            raw = np.full(self.lanes * dtype().itemsize, hardware.garbage, np.uint8)
            self.registers[name] = raw.view(dtype)
            self.undefined[name] = undefined.all_bits(self.lanes, dtype)
        self.shared = Buffer(
            "shared memory",
            np.full(max(launch.shared_bytes, 16) * len(ctas), hardware.garbage, np.uint8),
            SHARED_BASE,
            writable=True,
        )
        self.mask: np.ndarray | None = None  # of the threads that run; None: all
        self.everyone = np.ones(self.lanes, bool)
        self.steps = [self._bind(instruction) for instruction in program.instructions]
        self.counts = Counts()

    # Scheduling

    def run(self) -> Counts:
        with np.errstate(all="ignore"):
            self._run()
        self.counts.barriers = int(self.epochs.max())
        return self.counts

    def _run(self) -> None:
        """`groups`: threads that can run, by program counter; `waiting` at barriers, alike."""
        groups: dict[int, np.ndarray] = {0: self.everyone}
        waiting: dict[int, np.ndarray] = {}
        code = self.program.instructions
        while groups:
            pc = min(groups)
            mask = groups.pop(pc)
            limit = min(groups, default=len(code))
            self.mask = None if mask.all() else mask
            # Straight on to the next branch, barrier or place where others are.
            while pc < len(code) and self.steps[pc] is not None:
                self._step(pc)
                pc += 1
                if pc == limit:
                    break
            if pc >= len(code):
                raise PtxError("threads run past the end of the program")
            if pc == limit:
                groups[pc] = groups[pc] | mask
                continue
            self.counts.instructions += 1
            self._control(code[pc], pc, mask, groups, waiting)
        if waiting:
            raise code[min(waiting)].error("threads wait for others that left, or wait elsewhere")

    def _step(self, pc: int) -> None:
        self.counts.instructions += 1
        if self.counts.instructions > MAX_INSTRUCTIONS:
            raise PtxError(f"more than {MAX_INSTRUCTIONS} instructions")
        instruction = self.program.instructions[pc]
        mask = self.mask
        try:
            if instruction.guard is not None:
                self.mask = self._guarded(instruction)
                if self.mask.any():
                    self.steps[pc]()
            else:
                self.steps[pc]()
        except PtxError as error:
            raise instruction.error(str(error)) from None
        finally:
            self.mask = mask

    def _guarded(self, instruction: Instruction) -> np.ndarray:
        """Of the threads that run, those whose guard holds."""
        assert instruction.guard is not None
        chosen = self.read(instruction.guard)
        self.must_be_defined(instruction.guard, "a branch or a guard")
        if instruction.negated:
            chosen = ~chosen
        return chosen & self.active()

    def _control(
        self,
        instruction: Instruction,
        pc: int,
        mask: np.ndarray,
        groups: dict[int, np.ndarray],
        waiting: dict[int, np.ndarray],
    ) -> None:
        """A branch, an end or a barrier of the threads in `mask`."""

        def go(to: int, who: np.ndarray) -> None:
            if who.any():
                groups[to] = groups[to] | who if to in groups else who

        opcode = instruction.opcode
        taken = mask if instruction.guard is None else self._guarded(instruction)
        if opcode in ("bra", "bra.uni"):
            (target,) = instruction.operands
            if opcode == "bra.uni" and (taken != mask).any():
                raise instruction.error("not all threads take a uniform branch")
            assert isinstance(target, Symbol)
            if target.name not in self.program.labels:
                raise instruction.error("there is no such label")
            go(self.program.labels[target.name], taken)
            go(pc + 1, mask & ~taken)
        elif opcode == "ret":
            go(pc + 1, mask & ~taken)
        else:
            if instruction.guard is not None:
                raise instruction.error("a barrier with a guard")
            self._check_barrier(instruction)
            waits = waiting.pop(pc, False) | mask
            complete = waits.reshape(-1, self.num_threads).all(axis=1)
            self.epochs += complete
            released = complete[self.local_cta]
            go(pc + 1, waits & released)
            if (waits & ~released).any():
                waiting[pc] = waits & ~released

    def _check_barrier(self, instruction: Instruction) -> None:
        """bar.sync a{, b}: barrier a from 0 to 15, for b threads; here always the whole CTA."""
        here = self.active()
        values = [
            np.unique(np.broadcast_to(self.source(x, "w")(), here.shape)[here])
            for x in instruction.operands
        ]
        if len(values) == 2 and (values[1] != self.num_threads).any():
            raise instruction.error(f"a barrier of fewer threads than {self.num_threads}")
        if len(values) not in (1, 2) or values[0].size != 1 or values[0][0] > 15:
            raise instruction.error("not the same barrier, from 0 to 15, for all threads")

    # Registers

    def active(self) -> np.ndarray:
        return self.everyone if self.mask is None else self.mask

    def read(self, name: str) -> np.ndarray:
        try:
            return self.registers[name]
        except KeyError:
            raise PtxError(f"{name} was never written") from None

    def must_be_defined(self, name: str, use: str) -> None:
        """In the threads that run."""
        bits = self.undefined.get(name)
        if bits is not None and (bits[self.active()] != 0).any():
            raise PtxError(f"{use} depends on {name}, which holds what nobody wrote")

    def write(
        self, operand: Operand, value: np.ndarray, letter: str, bits: np.ndarray | None = None
    ) -> None:
        """In the threads that run; bits: those that are undefined, None if none is."""
        if isinstance(operand, Sink):
            return
        assert isinstance(operand, Register)
        value = np.asarray(value)
        assert value.dtype == TYPES[letter], (operand, value.dtype)
        if value.shape != (self.lanes,):
            value = np.broadcast_to(value, (self.lanes,))
        if self.mask is not None:
            old = self.registers.get(operand.name, TYPES[letter](0))
            value = np.where(self.mask, value, old)
        self.registers[operand.name] = value
        before = self.undefined.pop(operand.name, None)
        if self.mask is not None and (bits is not None or before is not None):
            zero = TYPES[letter](0)
            bits = np.where(
                self.mask, zero if bits is None else bits, zero if before is None else before
            )
        if bits is not None and bits.any():
            self.undefined[operand.name] = bits

    def source(self, operand: Operand, letter: str) -> Get:
        """How an operand is read, as raw bits of this kind."""
        dtype = TYPES[letter]
        if isinstance(operand, Immediate):
            if letter == "p":
                constant = np.asarray(bool(operand.value))
            else:
                size = 8 * dtype().itemsize
                if not -(2 ** (size - 1)) <= operand.value < 2**size:
                    raise PtxError(f"{operand.value} does not fit into {size} bits")
                constant = np.asarray(operand.value % 2**size, dtype)
            return lambda: constant
        if isinstance(operand, Symbol) and operand.name == SHARED_VARIABLE:
            base = np.asarray(SHARED_BASE, dtype)
            return lambda: base
        if not isinstance(operand, Register):
            raise PtxError(f"operand {operand} is no value")
        name = operand.name
        if name in ("%tid.x", "%ctaid.x", "%ctaid.y", "%ctaid.z"):
            value = self._special(name).astype(dtype)
            return lambda: value
        if KINDS[self.program.kind(name)] != letter:
            raise PtxError(f"{name} is {self.program.kind(name)}, wanted {letter}")
        return lambda: self.read(name)

    def destination(self, operand: Operand, letter: str) -> Operand:
        """The operand, if it can take such a result."""
        if isinstance(operand, Sink):
            return operand
        if not isinstance(operand, Register) or KINDS[self.program.kind(operand.name)] != letter:
            raise PtxError(f"{operand} cannot take a result of kind {letter}")
        return operand

    def _special(self, name: str) -> np.ndarray:
        x, y, _ = self.launch.grid
        return {
            "%tid.x": self.tid,
            "%ctaid.x": self.cta % x,
            "%ctaid.y": self.cta // x % y,
            "%ctaid.z": self.cta // (x * y),
        }[name]

    def lanes_at(self, index: np.ndarray) -> Lanes:
        return Lanes(self.thread[index], self.cta[index], self.epochs[self.local_cta[index]])

    # Instructions

    def _bind(self, instruction: Instruction) -> Callable[[], None] | None:
        """What executes an instruction; None for those that the scheduler does."""
        from tests.ptx import transfers

        opcode = instruction.opcode
        if opcode in ("bra", "bra.uni", "ret", "bar.sync"):
            return None
        try:
            if opcode in OPERATIONS and not transfers.moves_parts(instruction):
                return self._compute(instruction)
            return transfers.bind(self, instruction)
        except PtxError as error:
            raise instruction.error(str(error)) from None

    def _compute(self, instruction: Instruction) -> Callable[[], None]:
        operation = OPERATIONS[instruction.opcode]
        to, *rest = instruction.operands
        if len(rest) != len(operation.sources):
            raise PtxError(f"{len(operation.sources)} sources wanted")
        to = self.destination(to, operation.result)
        gets = [self.source(x, letter) for x, letter in zip(rest, operation.sources, strict=True)]
        function, letter = operation.function, operation.result
        arguments = (self.hardware.errors,) if operation.approximate else ()
        spread = undefined.rule(instruction.opcode, letter)

        def compute() -> None:
            values = [get() for get in gets]
            bits = None
            if self.undefined:
                masks = [self.undefined_bits(x) for x in rest]
                if any(mask is not None for mask in masks):
                    bits = spread(self.lanes, values, masks)
            self.write(to, function(*arguments, *values), letter, bits)

        return compute

    def undefined_bits(self, operand: Operand) -> np.ndarray | None:
        return self.undefined.get(operand.name) if isinstance(operand, Register) else None


def run(
    program: Program, launch: Launch, batches: Sequence[Sequence[int]], hardware: Hardware
) -> Counts:
    """All CTAs of a launch, a batch after the other, those of a batch in step."""
    total = Counts()
    for batch in batches:
        counts = Machine(program, launch, batch, hardware).run()
        total.instructions += counts.instructions
        total.barriers = max(total.barriers, counts.barriers)
    return total
