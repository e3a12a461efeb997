"""The threads of some CTAs of a launch: their registers, shared memory, and which of them run."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from . import parser, undefined
from .arithmetic import Hardware, halves, joined
from .memory import Buffer, stamp
from .parser import KINDS, TYPES, Operand, PtxError, Register, Symbol, Vector

WARP = 32
SHARED_BASE = 1024  # where dynamic shared memory starts; the driver has the memory before it
SPECIAL = ("%tid.x", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%clusterid.x", "%cluster_ctaid.x")

HALVES = {"w": "h", "d": "w"}

Bits = tuple[np.ndarray, np.ndarray | None]  # raw ones, [lanes] or one for all; the undefined ones
Get = Callable[[], Bits]
Put = Callable[..., None]  # of a value, and of its undefined bits if there are any


class Launch(NamedTuple):
    """The host's part of a launch."""

    grid: tuple[int, int, int]
    shared_bytes: int
    buffers: tuple[Buffer, ...]  # one a parameter of the kernel
    # Where buffers lie whatever the kernel's parameters promise: whether it relies on that shows.
    alignment: int = 1 << 30


class _Registers(dict[str, np.ndarray]):
    def __missing__(self, name: str) -> np.ndarray:
        raise PtxError(f"{name} was never written")


class Threads:
    """A lane for each thread of a batch of CTAs; `start` begins with other CTAs."""

    def __init__(self, program: parser.Program, launch: Launch, hardware: Hardware) -> None:
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
        cluster = self.program.cluster
        ids = self.cta % x, self.cta // x % y, self.cta // (x * y)
        values = self.tid, *ids, ids[0] // cluster, ids[0] % cluster
        self.special = dict(zip(SPECIAL, values, strict=True))
        self.registers = _Registers()
        self.undefined: dict[str, np.ndarray] = {}  # bits of registers without a defined value
        garbage = self.hardware.garbage
        for name in self.never_written:
            dtype = TYPES[KINDS[self.program.kind(name)]]
            raw = np.full(self.lanes * dtype().itemsize, garbage, np.uint8)
            self.registers[name] = raw.view(dtype)
            self.undefined[name] = np.invert(np.zeros(self.lanes, dtype))
        memory = np.full(max(self.launch.shared_bytes, 16) * len(ctas), garbage, np.uint8)
        self.shared = Buffer("shared memory", memory, SHARED_BASE, writable=True)
        self.everyone = np.ones(self.lanes, bool)
        self.ended = np.zeros(self.lanes, bool)
        self.arrived = np.zeros(self.lanes, bool)  # at the barrier of their cluster
        self.releases = np.zeros(self.lanes, bool)  # what they wrote before is seen behind it
        self.mask: np.ndarray | None = None  # of the threads that run; None: all

    def pass_barrier(self, ctas: np.ndarray) -> None:
        """ctas: [CTAs] bool."""
        self.epochs = self.epochs + ctas
        self.stamps = stamp(self.cta, self.epochs[self.local_cta], self.tid)

    def pass_cluster_barrier(self) -> np.ndarray:
        """The threads [lanes] of clusters of which all that have not ended have arrived.

        What a cluster has accessed counts as its first CTA's from then on, with a barrier behind
        it. So another CTA that goes on, and touches it, is an error.
        """
        size = self.program.threads * self.program.cluster
        here = (self.arrived | self.ended).reshape(-1, size)
        arrived = self.arrived.reshape(-1, size)
        complete = here.all(axis=1) & arrived.any(axis=1)
        released = complete & (self.releases.reshape(-1, size) | ~arrived).all(axis=1)
        first = np.arange(len(complete)) * self.program.cluster  # among the CTAs of the batch
        ctas = self.cta[:: self.program.threads]
        for buffer in self.launch.buffers:
            for i in first[released]:
                buffer.give(ctas[i : i + self.program.cluster], ctas[i], self.epochs[i])
        self.pass_barrier(np.isin(np.arange(len(ctas)), first[released]))
        threads = np.repeat(complete, size)
        self.arrived = self.arrived & ~threads
        return threads

    def active(self) -> np.ndarray:
        return self.everyone if self.mask is None else self.mask

    def _write(
        self, name: str, dtype: type, value: np.ndarray, bits: np.ndarray | None = None
    ) -> None:
        """Write in the running threads; bits: the undefined ones, None if all are defined."""
        assert value.dtype == dtype, (name, value.dtype)
        old, before = self.registers.get(name, dtype(0)), self.undefined.pop(name, None)
        self.registers[name] = self._merged(value, old)
        if bits is not None or before is not None:
            bits = self._merged(*(dtype(0) if x is None else x for x in (bits, before)))
            if bits.any():
                self.undefined[name] = bits

    def _merged(self, new: np.ndarray, old: np.ndarray) -> np.ndarray:
        """The new value in the running threads."""
        if self.mask is not None:
            return np.where(self.mask, new, old)
        return new if new.shape == (self.lanes,) else np.broadcast_to(new, (self.lanes,))

    def source(self, operand: Operand, letter: str, use: str = "") -> Get:
        """How an operand is read. `use`: what may not depend on a value that was never written."""
        dtype = TYPES[letter]
        if isinstance(operand, Vector) and len(operand.items) == 2 and letter in HALVES:
            parts = [self.source(x, HALVES[letter], use) for x in operand.items]
            return lambda: self._joined([get() for get in parts], dtype)
        if isinstance(operand, parser.Immediate):
            size = parser.BITS[letter]
            if not -(2 ** (size - 1)) <= operand.value < 2**size:
                raise PtxError(f"{operand.value} does not fit into {size} bits")
            constant = np.asarray(operand.value % 2**size, dtype)
            return lambda: (constant, None)
        if isinstance(operand, Symbol) and operand.name == parser.SHARED_VARIABLE:
            base = np.asarray(SHARED_BASE, dtype)
            return lambda: (base, None)
        if not isinstance(operand, Register):
            raise PtxError(f"operand {operand} is no value")
        name = operand.name
        if name in SPECIAL:
            return lambda: (self.special[name].astype(dtype), None)
        if KINDS[self.program.kind(name)] != letter:
            raise PtxError(f"{name} is {self.program.kind(name)}, wanted {letter}")
        if not use:
            return lambda: (self.registers[name], self.undefined.get(name))

        def defined() -> Bits:
            bits = self.undefined.get(name)
            if bits is not None and (bits[self.active()] != 0).any():
                raise PtxError(
                    f"{use} depends on {name}, which holds a value that was never written"
                )
            return self.registers[name], bits

        return defined

    def _joined(self, parts: Sequence[Bits], dtype: type) -> Bits:
        (low, high), masks = zip(*parts, strict=True)
        bits = [np.zeros_like(low) if mask is None else mask for mask in masks]
        undefined = any(mask is not None for mask in masks)
        return joined(low, high, dtype), joined(*bits, dtype) if undefined else None

    def destination(self, operand: Operand, letter: str) -> Put:
        """How a result of this kind is written in the running threads."""
        if operand == Symbol("_"):
            return lambda value, bits=None: None
        if isinstance(operand, Vector) and len(operand.items) == 2 and letter in HALVES:
            parts = [self.destination(x, HALVES[letter]) for x in operand.items]

            def put(value: np.ndarray, bits: np.ndarray | None = None) -> None:
                missing = (None, None) if bits is None else halves(bits).T
                for part, half, lost in zip(parts, halves(value).T, missing, strict=True):
                    part(half, lost)

            return put
        if not isinstance(operand, Register) or KINDS[self.program.kind(operand.name)] != letter:
            raise PtxError(f"{operand} cannot take a result of kind {letter}")
        return partial(self._write, operand.name, TYPES[letter])
