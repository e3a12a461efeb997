"""The machine's instructions that move data: loads, stores, shuffles, votes, packed moves."""

import functools
import re
from collections.abc import Callable

import numpy as np

from . import undefined
from .arithmetic import BITS, OPERATIONS, TYPES, largest
from .memory import Buffer
from .parser import (
    SHARED_VARIABLE,
    Address,
    Immediate,
    Instruction,
    Operand,
    PtxError,
    Register,
    Vector,
)
from .threads import SHARED_BASE, Threads

ACCESS = re.compile(r"(ld|st)(?:\.relaxed\.gpu)?(\.global|\.shared)?(?:\.v(2|4))?\.(b16|b32|b64)$")
PAIR = re.compile(r"setp\.(\w+)\.(b?f16)x2$")
LETTERS = {"b16": "h", "b32": "w", "b64": "d"}
REGION = 36  # an address: the buffer's number from this bit on, then its base and an offset
ALL_LANES = 0xFFFFFFFF
# Of a warp's words [warps, 32]: raw bits in, raw bits out.
REDUCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "redux.sync.max.s32": lambda x: x.view(np.int32).max(axis=1).view(np.uint32),
    "redux.sync.add.s32": lambda x: x.sum(axis=1, dtype=np.uint32),
    "redux.sync.max.NaN.f32": lambda x: functools.reduce(largest("f32"), x.T),
}
# They order memory for the asynchronous proxy and for mbarriers; the machine has neither.
FENCES = ("fence.proxy.async.shared::cta", "fence.mbarrier_init.release.cluster")


def bind(threads: Threads, instruction: Instruction) -> Callable[[], None] | None:
    """The function that executes an instruction; None if the scheduler does."""
    if instruction.opcode in ("bra", "bra.uni", "ret", "bar.sync"):
        return None
    try:
        if instruction.opcode in OPERATIONS and not moves_parts(instruction):
            return _compute(threads, instruction)
        return _transfer(threads, instruction)
    except PtxError as error:
        raise instruction.error(str(error)) from None


def _compute(threads: Threads, instruction: Instruction) -> Callable[[], None]:
    operation = OPERATIONS[instruction.opcode]
    to, *rest = instruction.operands
    if len(rest) != len(operation.sources):
        raise PtxError(f"{len(operation.sources)} sources wanted")
    to = threads.destination(to, operation.result)
    gets = [threads.source(x, letter) for x, letter in zip(rest, operation.sources, strict=True)]
    function, letter = operation.function, operation.result
    arguments = (threads.hardware.errors,) if operation.approximate else ()
    spread = undefined.rule(instruction.opcode, letter)

    def compute() -> None:
        values = [get() for get in gets]
        bits = None
        if threads.undefined:
            masks = [threads.undefined_bits(x) for x in rest]
            if any(mask is not None for mask in masks):
                bits = spread(threads.lanes, values, masks)
        threads.write(to, function(*arguments, *values), letter, bits)

    return compute


def _transfer(threads: Threads, instruction: Instruction) -> Callable[[], None]:
    """Or an error, for an instruction that is not known."""
    opcode, operands = instruction.opcode, instruction.operands
    if opcode in FENCES:
        return lambda: None
    if opcode == "ld.param.b64":
        return _parameter(threads, operands)
    if opcode in ("mov.b32", "mov.b64"):
        return _packed_move(threads, opcode, operands)
    if opcode in ("shfl.sync.bfly.b32", "shfl.sync.idx.b32", "shfl.sync.up.b32"):
        return _shuffle(threads, opcode.split(".")[2], operands)
    if opcode in REDUCTIONS:
        return _redux(threads, REDUCTIONS[opcode], operands)
    if opcode == "atom.shared.add.u32":
        return _atomic_addition(threads, operands)
    if opcode == "elect.sync":
        return _elect(threads, operands)
    if found := PAIR.match(opcode):
        return _paired_comparison(threads, *found.groups(), operands)
    if found := ACCESS.match(opcode):
        kind, space, count, width = found.groups()
        letter, number = LETTERS[width], int(count or 1)
        if kind == "ld":
            return _load(threads, operands, space == ".shared", number, letter)
        return _store(threads, operands, space == ".shared", number, letter)
    raise PtxError(f"unknown instruction {opcode}")


def moves_parts(instruction: Instruction) -> bool:
    """Whether it is a mov of a register from or to its halves."""
    return any(isinstance(x, Vector) for x in instruction.operands)


def _parameter(threads: Threads, operands: tuple[Operand, ...]) -> Callable[[], None]:
    to, place = operands
    if (
        not isinstance(place, Address)
        or place.base not in threads.program.parameters
        or place.offset
    ):
        raise PtxError("no such parameter")
    number = list(threads.program.parameters).index(place.base)
    value = np.uint64(((number + 1) << REGION) + threads.launch.buffers[number].base)
    to = threads.destination(to, "d")
    return lambda: threads.write(to, np.asarray(value), "d")


def _packed_move(
    threads: Threads, opcode: str, operands: tuple[Operand, ...]
) -> Callable[[], None]:
    """mov.b32 {a, b}, c and mov.b32 c, {a, b}, and mov.b64: the first is the lower half."""
    to, source = operands
    letter, part = ("w", "h") if opcode == "mov.b32" else ("d", "w")
    whole, narrow = TYPES[letter], TYPES[part]
    half = whole(BITS[part])
    if isinstance(to, Vector) and len(to.items) == 2:
        low, high = (threads.destination(x, part) for x in to.items)
        get = threads.source(source, letter)

        def unpack() -> None:
            value, bits = get(), threads.undefined_bits(source)
            lower = None if bits is None else bits.astype(narrow)
            upper = None if bits is None else (bits >> half).astype(narrow)
            threads.write(low, value.astype(narrow), part, lower)
            threads.write(high, (value >> half).astype(narrow), part, upper)

        return unpack
    if not isinstance(source, Vector) or len(source.items) != 2:
        raise PtxError("not two halves")
    parts = [threads.source(x, part) for x in source.items]
    to = threads.destination(to, letter)

    def pack() -> None:
        low, high = (get().astype(whole) for get in parts)
        masks = [threads.undefined_bits(x) for x in source.items]
        lower, upper = (whole(0) if m is None else m.astype(whole) for m in masks)
        missing = any(m is not None for m in masks)
        bits = np.broadcast_to(lower | (upper << half), (threads.lanes,)) if missing else None
        threads.write(to, low | (high << half), letter, bits)

    return pack


class MissingLane(PtxError):
    """A warp instruction is not executed by all lanes that its mask names: it waits for them."""


def _whole_warps(threads: Threads, mask: Operand) -> Callable[[], None]:
    """Every lane of the warps that run must be here: Mosaic GPU names all lanes."""
    get = threads.source(mask, "w")

    def check() -> None:
        active = threads.active()
        if (np.broadcast_to(get(), active.shape)[active] != ALL_LANES).any():
            raise PtxError("the member mask does not name all lanes: not known to the machine")
        warps = active.reshape(-1, 32)
        if (warps.any(axis=1) != warps.all(axis=1)).any():
            raise MissingLane("a lane that the member mask names is not here")

    return check


def _shuffle(threads: Threads, kind: str, operands: tuple[Operand, ...]) -> Callable[[], None]:
    to, value, by, clamp, mask = operands
    whole_warp = Immediate(0 if kind == "up" else 31)
    if not isinstance(by, Immediate) or not 0 <= by.value < 32 or clamp != whole_warp:
        raise PtxError("only shuffles of whole warps by a constant are known to the machine")
    lane = np.arange(32)
    below = np.where(lane >= by.value, lane - by.value, lane)
    source = {"bfly": lane ^ by.value, "idx": np.full(32, by.value), "up": below}[kind]
    to, get = threads.destination(to, "w"), threads.source(value, "w")
    check = _whole_warps(threads, mask)

    def shuffle() -> None:
        check()
        whole = np.broadcast_to(get(), (threads.lanes,)).reshape(-1, 32)
        bits = threads.undefined_bits(value)
        if bits is not None:
            bits = bits.reshape(-1, 32)[:, source].reshape(-1)
        threads.write(to, whole[:, source].reshape(-1), "w", bits)

    return shuffle


def _redux(
    threads: Threads, reduce: Callable[..., np.ndarray], operands: tuple[Operand, ...]
) -> Callable[[], None]:
    to, value, mask = operands
    to, get = threads.destination(to, "w"), threads.source(value, "w")
    check = _whole_warps(threads, mask)

    def redux() -> None:
        check()
        whole = np.broadcast_to(get(), (threads.lanes,)).reshape(-1, 32)
        bits = threads.undefined_bits(value)
        if bits is not None:
            some = (bits.reshape(-1, 32) != 0).any(axis=1)
            bits = np.repeat(np.where(some, np.uint32(ALL_LANES), np.uint32(0)), 32)
        threads.write(to, np.repeat(reduce(whole), 32), "w", bits)

    return redux


def _paired_comparison(
    threads: Threads, name: str, kind: str, operands: tuple[Operand, ...]
) -> Callable[[], None]:
    """A predicate for each half of two words: the lower one first."""
    both, *sources = operands
    opcode = f"setp.{name}.{kind}"
    if not isinstance(both, Vector) or len(both.items) != 2 or opcode not in OPERATIONS:
        raise PtxError("two results of a known comparison wanted")
    flags = [threads.destination(x, "p") for x in both.items]
    gets = [threads.source(x, "w") for x in sources]
    function = OPERATIONS[opcode].function

    def compare() -> None:
        for half, flag in enumerate(flags):
            by = np.uint32(16 * half)
            values = [(get() >> by).astype(np.uint16) for get in gets]
            some = np.zeros(threads.lanes, bool)
            for x in sources:
                bits = threads.undefined_bits(x)
                if bits is not None:
                    some = some | ((bits >> by).astype(np.uint16) != 0)
            threads.write(flag, function(*values), "p", some if some.any() else None)

    return compare


def _atomic_addition(threads: Threads, operands: tuple[Operand, ...]) -> Callable[[], None]:
    """One lane after the other; which one is first, the hardware chooses."""
    to, place, value = operands
    to, get = threads.destination(to, "w"), threads.source(value, "w")
    address = _addresses(threads, place, True)

    def add() -> None:
        index = np.roll(np.flatnonzero(threads.active()), threads.hardware.leader)
        _defined_address(threads, place)
        if isinstance(value, Register):
            threads.must_be_defined(value.name, "an atomic addition")
        by = np.broadcast_to(get(), (threads.lanes,))
        before = np.zeros(threads.lanes, np.uint32)
        for buffer, who, offsets in _buffers(threads, address()[index], index, True):
            before[who] = buffer.add(offsets, by[who], threads.stamps[who])
        threads.write(to, before, "w")

    return add


def _elect(threads: Threads, operands: tuple[Operand, ...]) -> Callable[[], None]:
    both, mask = operands
    if not isinstance(both, Vector) or len(both.items) != 2:
        raise PtxError("two results wanted")
    to, flag = threads.destination(both.items[0], "w"), threads.destination(both.items[1], "p")
    leader = threads.hardware.leader % 32
    check = _whole_warps(threads, mask)

    def elect() -> None:
        check()
        threads.write(to, np.asarray(np.uint32(leader)), "w")
        threads.write(flag, threads.tid % 32 == leader, "p")

    return elect


def _elements(operand: Operand, count: int) -> tuple[Operand, ...]:
    items = operand.items if isinstance(operand, Vector) else (operand,)
    if len(items) != count:
        raise PtxError(f"{count} elements wanted")
    return items


def _load(
    threads: Threads, operands: tuple[Operand, ...], shared: bool, count: int, letter: str
) -> Callable[[], None]:
    to, place = operands
    results = [threads.destination(x, letter) for x in _elements(to, count)]
    address = _addresses(threads, place, shared)
    width, dtype = BITS[letter] // 8, TYPES[letter]

    def load() -> None:
        index = np.flatnonzero(threads.active())
        _defined_address(threads, place)
        values = [np.zeros(threads.lanes, dtype) for _ in results]
        missing: list[np.ndarray | None] = [None] * count
        for buffer, who, offsets in _buffers(threads, address()[index], index, shared):
            found, bad = buffer.load(offsets, width, count, threads.stamps[who])
            for i in range(count):
                values[i][who] = found[i]
                if bad is not None:
                    missing[i] = (
                        np.zeros(threads.lanes, dtype) if missing[i] is None else missing[i]
                    )
                    missing[i][who] = np.where(bad[i], ~dtype(0), dtype(0))
        for result, value, bits in zip(results, values, missing, strict=True):
            threads.write(result, value, letter, bits)

    return load


def _store(
    threads: Threads, operands: tuple[Operand, ...], shared: bool, count: int, letter: str
) -> Callable[[], None]:
    place, source = operands
    sources = _elements(source, count)
    gets = [threads.source(x, letter) for x in sources]
    address = _addresses(threads, place, shared)
    width = BITS[letter] // 8

    def store() -> None:
        index = np.flatnonzero(threads.active())
        _defined_address(threads, place)
        values = [np.broadcast_to(get(), (threads.lanes,)) for get in gets]
        missing = [threads.undefined_bits(x) for x in sources]
        if not shared:
            for x in sources:
                if isinstance(x, Register):
                    threads.must_be_defined(x.name, "global memory")
        for buffer, who, offsets in _buffers(threads, address()[index], index, shared):
            parts = [value[who] for value in values]
            bad = [None if bits is None else bits[who] != 0 for bits in missing]
            buffer.store(offsets, width, parts, bad, threads.stamps[who])

    return store


def _defined_address(threads: Threads, place: Operand) -> None:
    assert isinstance(place, Address)
    if place.base != SHARED_VARIABLE:
        threads.must_be_defined(place.base, "an address")


def _addresses(threads: Threads, place: Operand, shared: bool) -> Callable[[], np.ndarray]:
    """[lanes] int64."""
    if not isinstance(place, Address):
        raise PtxError("an address wanted")
    if place.base == SHARED_VARIABLE:
        if not shared:
            raise PtxError("shared memory by a generic address: not known to the machine")
        return lambda: np.full(threads.lanes, SHARED_BASE + place.offset, np.int64)
    kind = threads.program.kind(place.base)
    if kind not in ("b64", "b32") or (kind == "b32" and not shared):
        raise PtxError(f"an address in a register of kind {kind}")
    get = threads.source(Register(place.base), LETTERS[kind])
    return lambda: get().astype(np.int64) + place.offset


def _buffers(
    threads: Threads, address: np.ndarray, index: np.ndarray, shared: bool
) -> list[tuple[Buffer, np.ndarray, np.ndarray]]:
    """The buffers that lanes `index` access: buffer, lanes, offsets in it."""
    if shared:
        size = max(threads.launch.shared_bytes, 16)
        offsets = address - SHARED_BASE
        outside = (offsets < 0) | (offsets >= size)
        if outside.any():
            where = int(offsets[np.argmax(outside)])
            raise PtxError(f"shared memory + {where} is outside its {size} bytes")
        return [(threads.shared, index, offsets + threads.local_cta[index] * size)]
    out = []
    numbers = address >> REGION
    for number in np.unique(numbers):
        if not 1 <= number <= len(threads.launch.buffers):
            raise PtxError(f"{int(address[np.argmax(numbers == number)]):#x} is in no buffer")
        buffer = threads.launch.buffers[number - 1]
        here = numbers == number
        offsets = address[here] - (int(number) << REGION) - buffer.base
        out.append((buffer, index[here], offsets))
    return out
