"""The threads of some CTAs of a launch: their registers, shared memory, and which of them run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from . import undefined
from .arithmetic import KINDS, TYPES, Errors
from .memory import Buffer, stamp
from .parser import SHARED_VARIABLE, Immediate, Operand, Program, PtxError, Register, Sink, Symbol

WARP = 32
SHARED_BASE = 1024  # where dynamic shared memory starts; the driver has the memory before it
SPECIAL = ("%tid.x", "%ctaid.x", "%ctaid.y", "%ctaid.z")

Get = Callable[[], np.ndarray]  # raw bits, [lanes] or one for all


@dataclass(frozen=True)
class Launch:
    """The host's part of a launch."""

    grid: tuple[int, int, int]
    shared_bytes: int
    buffers: tuple[Buffer, ...]  # one a parameter of the kernel
    # Where buffers lie whatever the kernel's parameters promise: whether it relies on that shows.
    alignment: int = 1 << 30


@dataclass(frozen=True)
class Hardware:
    """Choices that the PTX ISA leaves open."""

    leader: int = 0  # of the lanes that elect.sync may choose: this one, counted from the first
    garbage: int = 0  # the byte in registers and shared memory before they are written
    errors: Errors = field(default_factory=Errors)
    max_instructions: int = 20_000_000  # of one batch: a spoiled program may not end


class Threads:
    """A lane for each thread of a batch of CTAs; `start` begins with other CTAs."""

    def __init__(self, program: Program, launch: Launch, hardware: Hardware) -> None:
        self.program, self.launch, self.hardware = program, launch, hardware
        if len(launch.buffers) != len(program.parameters):
            raise PtxError(
                f"{len(launch.buffers)} buffers for {len(program.parameters)} parameters"
            )
        for buffer, alignment in zip(launch.buffers, program.parameters.values(), strict=True):
            promised = min(alignment, launch.alignment)
            if buffer.base % promised:
                raise PtxError(f"{buffer.name} is not aligned to {promised} bytes, as promised")
        if launch.shared_bytes % 16 or program.threads % WARP:
            raise PtxError("only whole warps, and shared memory of whole 16 bytes, are known")
        self.never_written = undefined.never_written(program)
        self.start([0])

    def start(self, ctas: Sequence[int]) -> None:
        """Before the first instruction of these CTAs."""
        size = self.program.threads
        lane = np.arange(len(ctas) * size)
        self.lanes = len(lane)
        self.local_cta = lane // size
        self.tid = lane % size
        self.cta = np.asarray(ctas)[self.local_cta]
        self.epochs = np.zeros(len(ctas), np.int64)  # barriers passed
        self.pass_barrier(np.zeros(len(ctas), bool))
        x, y, _ = self.launch.grid
        values = self.tid, self.cta % x, self.cta // x % y, self.cta // (x * y)
        self.special = dict(zip(SPECIAL, values, strict=True))
        self.registers: dict[str, np.ndarray] = {}
        self.undefined: dict[str, np.ndarray] = {}  # bits of registers without a defined value
        garbage = self.hardware.garbage
        for name in self.never_written:
            dtype = TYPES[KINDS[self.program.kind(name)]]
            raw = np.full(self.lanes * dtype().itemsize, garbage, np.uint8)
            self.registers[name] = raw.view(dtype)
            self.undefined[name] = undefined.all_bits(self.lanes, dtype)
        memory = np.full(max(self.launch.shared_bytes, 16) * len(ctas), garbage, np.uint8)
        self.shared = Buffer("shared memory", memory, SHARED_BASE, writable=True)
        self.everyone = np.ones(self.lanes, bool)
        self.mask: np.ndarray | None = None  # of the threads that run; None: all

    def pass_barrier(self, ctas: np.ndarray) -> None:
        """ctas: [CTAs] bool."""
        self.epochs = self.epochs + ctas
        self.stamps = stamp(self.cta, self.epochs[self.local_cta], self.tid)

    def active(self) -> np.ndarray:
        return self.everyone if self.mask is None else self.mask

    def read(self, name: str) -> np.ndarray:
        try:
            return self.registers[name]
        except KeyError:
            raise PtxError(f"{name} was never written") from None

    def must_be_defined(self, name: str, use: str) -> None:
        """Raise where a running thread's register is undefined; `use` says what depends on it."""
        bits = self.undefined.get(name)
        if bits is not None and (bits[self.active()] != 0).any():
            raise PtxError(f"{use} depends on {name}, which holds a value that was never written")

    def write(
        self, operand: Operand, value: np.ndarray, letter: str, bits: np.ndarray | None = None
    ) -> None:
        """Write in the running threads; bits: the undefined ones, None if all are defined."""
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
        if name in SPECIAL:
            return lambda: self.special[name].astype(dtype)
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

    def undefined_bits(self, operand: Operand) -> np.ndarray | None:
        return self.undefined.get(operand.name) if isinstance(operand, Register) else None
