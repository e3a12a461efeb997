"""The machine's instructions that move data: loads, stores, shuffles, votes, packed moves."""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from tests.ptx.arithmetic import BITS, TYPES
from tests.ptx.memory import Buffer
from tests.ptx.parser import (
    SHARED_VARIABLE,
    Address,
    Immediate,
    Instruction,
    Operand,
    PtxError,
    Register,
    Vector,
)

if TYPE_CHECKING:
    from tests.ptx.machine import Machine

ACCESS = re.compile(r"(ld|st)(\.global|\.shared)?(?:\.v(2|4))?\.(b16|b32|b64)$")
LETTERS = {"b16": "h", "b32": "w", "b64": "d"}
ALL_LANES = 0xFFFFFFFF
# They order memory for the asynchronous proxy and for mbarriers; the machine has neither.
FENCES = ("fence.proxy.async.shared::cta", "fence.mbarrier_init.release.cluster")


def bind(machine: "Machine", instruction: Instruction) -> Callable[[], None]:
    """What executes an instruction; an error for one that is not known."""
    opcode, operands = instruction.opcode, instruction.operands
    if opcode in FENCES:
        return lambda: None
    if opcode == "ld.param.b64":
        return _parameter(machine, operands)
    if opcode == "mov.b32":
        return _packed_move(machine, operands)
    if opcode in ("shfl.sync.bfly.b32", "shfl.sync.idx.b32"):
        return _shuffle(machine, opcode.split(".")[2], operands)
    if opcode == "redux.sync.max.s32":
        return _redux(machine, operands)
    if opcode == "elect.sync":
        return _elect(machine, operands)
    if found := ACCESS.match(opcode):
        kind, space, count, width = found.groups()
        letter, number = LETTERS[width], int(count or 1)
        if kind == "ld":
            return _load(machine, operands, space == ".shared", number, letter)
        return _store(machine, operands, space == ".shared", number, letter)
    raise PtxError(f"unknown instruction {opcode}")


def moves_parts(instruction: Instruction) -> bool:
    """Whether it is a mov of a register from or to its halves."""
    return any(isinstance(x, Vector) for x in instruction.operands)


def _parameter(machine: "Machine", operands: tuple[Operand, ...]) -> Callable[[], None]:
    from tests.ptx.machine import REGION

    to, place = operands
    if (
        not isinstance(place, Address)
        or place.base not in machine.program.parameters
        or place.offset
    ):
        raise PtxError("no such parameter")
    number = machine.program.parameters.index(place.base)
    value = np.uint64(((number + 1) << REGION) + machine.launch.buffers[number].base)
    to = machine.destination(to, "d")
    return lambda: machine.write(to, np.asarray(value), "d")


def _packed_move(machine: "Machine", operands: tuple[Operand, ...]) -> Callable[[], None]:
    """mov.b32 {a, b}, c and mov.b32 c, {a, b}: the first is the lower half."""
    to, source = operands
    half = np.uint32(16)
    if isinstance(to, Vector) and len(to.items) == 2:
        low, high = (machine.destination(x, "h") for x in to.items)
        get = machine.source(source, "w")

        def unpack() -> None:
            value, bits = get(), machine.undefined_bits(source)
            lower = None if bits is None else bits.astype(np.uint16)
            upper = None if bits is None else (bits >> half).astype(np.uint16)
            machine.write(low, value.astype(np.uint16), "h", lower)
            machine.write(high, (value >> half).astype(np.uint16), "h", upper)

        return unpack
    if not isinstance(source, Vector) or len(source.items) != 2:
        raise PtxError("not two halves")
    parts = [machine.source(x, "h") for x in source.items]
    to = machine.destination(to, "w")

    def pack() -> None:
        low, high = (get().astype(np.uint32) for get in parts)
        masks = [machine.undefined_bits(x) for x in source.items]
        lower, upper = (np.uint32(0) if m is None else m.astype(np.uint32) for m in masks)
        missing = any(m is not None for m in masks)
        bits = np.broadcast_to(lower | (upper << half), (machine.lanes,)) if missing else None
        machine.write(to, low | (high << half), "w", bits)

    return pack


def _whole_warps(machine: "Machine", mask: Operand) -> Callable[[], None]:
    """Every lane of the warps that run must be here: Mosaic GPU names all lanes."""
    get = machine.source(mask, "w")

    def check() -> None:
        active = machine.active()
        if (np.broadcast_to(get(), active.shape)[active] != ALL_LANES).any():
            raise PtxError("the member mask does not name all lanes: not known to the machine")
        warps = active.reshape(-1, 32)
        if (warps.any(axis=1) != warps.all(axis=1)).any():
            raise PtxError("a lane that the member mask names is not here")

    return check


def _shuffle(machine: "Machine", kind: str, operands: tuple[Operand, ...]) -> Callable[[], None]:
    to, value, by, clamp, mask = operands
    if not isinstance(by, Immediate) or not 0 <= by.value < 32 or clamp != Immediate(31):
        raise PtxError("only shuffles of whole warps by a constant are known to the machine")
    lane = np.arange(32)
    source = lane ^ by.value if kind == "bfly" else np.full(32, by.value)
    to, get = machine.destination(to, "w"), machine.source(value, "w")
    check = _whole_warps(machine, mask)

    def shuffle() -> None:
        check()
        whole = np.broadcast_to(get(), (machine.lanes,)).reshape(-1, 32)
        bits = machine.undefined_bits(value)
        if bits is not None:
            bits = bits.reshape(-1, 32)[:, source].reshape(-1)
        machine.write(to, whole[:, source].reshape(-1), "w", bits)

    return shuffle


def _redux(machine: "Machine", operands: tuple[Operand, ...]) -> Callable[[], None]:
    to, value, mask = operands
    to, get = machine.destination(to, "w"), machine.source(value, "w")
    check = _whole_warps(machine, mask)

    def redux() -> None:
        check()
        whole = np.broadcast_to(get(), (machine.lanes,)).reshape(-1, 32).view(np.int32)
        bits = machine.undefined_bits(value)
        if bits is not None:
            some = (bits.reshape(-1, 32) != 0).any(axis=1)
            bits = np.repeat(np.where(some, np.uint32(ALL_LANES), np.uint32(0)), 32)
        machine.write(to, np.repeat(whole.max(axis=1), 32).view(np.uint32), "w", bits)

    return redux


def _elect(machine: "Machine", operands: tuple[Operand, ...]) -> Callable[[], None]:
    both, mask = operands
    if not isinstance(both, Vector) or len(both.items) != 2:
        raise PtxError("two results wanted")
    to, flag = machine.destination(both.items[0], "w"), machine.destination(both.items[1], "p")
    leader = machine.hardware.leader % 32
    check = _whole_warps(machine, mask)
    elected = np.arange(machine.lanes) % 32 == leader

    def elect() -> None:
        check()
        machine.write(to, np.asarray(np.uint32(leader)), "w")
        machine.write(flag, elected, "p")

    return elect


def _elements(operand: Operand, count: int) -> tuple[Operand, ...]:
    items = operand.items if isinstance(operand, Vector) else (operand,)
    if len(items) != count:
        raise PtxError(f"{count} elements wanted")
    return items


def _load(
    machine: "Machine", operands: tuple[Operand, ...], shared: bool, count: int, letter: str
) -> Callable[[], None]:
    to, place = operands
    results = [machine.destination(x, letter) for x in _elements(to, count)]
    address = _addresses(machine, place, shared)
    width, dtype = BITS[letter] // 8, TYPES[letter]

    def load() -> None:
        index = np.flatnonzero(machine.active())
        _defined_address(machine, place)
        values = [np.zeros(machine.lanes, dtype) for _ in results]
        missing: list[np.ndarray | None] = [None] * count
        for buffer, who, offsets in _buffers(machine, address()[index], index, shared):
            found, bad = buffer.load(offsets, width, count, machine.lanes_at(who))
            for i in range(count):
                values[i][who] = found[i]
                if bad is not None:
                    missing[i] = (
                        np.zeros(machine.lanes, dtype) if missing[i] is None else missing[i]
                    )
                    missing[i][who] = np.where(bad[i], ~dtype(0), dtype(0))
        for result, value, bits in zip(results, values, missing, strict=True):
            machine.write(result, value, letter, bits)

    return load


def _store(
    machine: "Machine", operands: tuple[Operand, ...], shared: bool, count: int, letter: str
) -> Callable[[], None]:
    place, source = operands
    sources = _elements(source, count)
    gets = [machine.source(x, letter) for x in sources]
    address = _addresses(machine, place, shared)
    width = BITS[letter] // 8

    def store() -> None:
        index = np.flatnonzero(machine.active())
        _defined_address(machine, place)
        values = [np.broadcast_to(get(), (machine.lanes,)) for get in gets]
        missing = [machine.undefined_bits(x) for x in sources]
        if not shared:
            for x in sources:
                if isinstance(x, Register):
                    machine.must_be_defined(x.name, "global memory")
        for buffer, who, offsets in _buffers(machine, address()[index], index, shared):
            parts = [value[who] for value in values]
            bad = [None if bits is None else bits[who] != 0 for bits in missing]
            buffer.store(offsets, width, parts, bad, machine.lanes_at(who))

    return store


def _defined_address(machine: "Machine", place: Operand) -> None:
    assert isinstance(place, Address)
    if place.base != SHARED_VARIABLE:
        machine.must_be_defined(place.base, "an address")


def _addresses(machine: "Machine", place: Operand, shared: bool) -> Callable[[], np.ndarray]:
    """[lanes] int64."""
    from tests.ptx.machine import SHARED_BASE

    if not isinstance(place, Address):
        raise PtxError("an address wanted")
    if place.base == SHARED_VARIABLE:
        if not shared:
            raise PtxError("shared memory by a generic address: not known to the machine")
        fixed = np.full(machine.lanes, SHARED_BASE + place.offset, np.int64)
        return lambda: fixed
    kind = machine.program.kind(place.base)
    if kind not in ("b64", "b32") or (kind == "b32" and not shared):
        raise PtxError(f"an address in a register of kind {kind}")
    get = machine.source(Register(place.base), LETTERS[kind])
    return lambda: get().astype(np.int64) + place.offset


def _buffers(
    machine: "Machine", address: np.ndarray, index: np.ndarray, shared: bool
) -> list[tuple[Buffer, np.ndarray, np.ndarray]]:
    """The buffers that lanes `index` access: buffer, lanes, offsets in it."""
    from tests.ptx.machine import REGION, SHARED_BASE

    if shared:
        size = max(machine.launch.shared_bytes, 16)
        offsets = address - SHARED_BASE
        outside = (offsets < 0) | (offsets >= size)
        if outside.any():
            where = int(offsets[np.argmax(outside)])
            raise PtxError(f"shared memory + {where} is outside its {size} bytes")
        return [(machine.shared, index, offsets + machine.local_cta[index] * size)]
    out = []
    numbers = address >> REGION
    for number in np.unique(numbers):
        if not 1 <= number <= len(machine.launch.buffers):
            raise PtxError(f"{int(address[np.argmax(numbers == number)]):#x} is in no buffer")
        buffer = machine.launch.buffers[number - 1]
        here = numbers == number
        offsets = address[here] - (int(number) << REGION) - buffer.base
        out.append((buffer, index[here], offsets))
    return out
