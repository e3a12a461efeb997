"""Instructions, bound to threads: what computes, and what moves data to and from memory."""

import re
from collections.abc import Callable
from functools import partial

import numpy as np

from . import arithmetic, parser, undefined, warps
from .memory import Buffer
from .parser import KINDS, TYPES, Operand, PtxError, Register, Symbol, Vector
from .threads import SHARED_BASE, Threads

ACCESS = re.compile(r"(ld|st)(?:\.relaxed\.gpu)?(\.global|\.shared)?(?:\.v(2|4))?\.(b16|b32|b64)$")
REGION = 36  # an address: the buffer's number from this bit on, then its base and an offset
# Of the barrier of a cluster. Without a word for it, an arrival releases and a wait acquires.
ARRIVE = ("barrier.cluster.arrive.relaxed.aligned", "barrier.cluster.arrive.release.aligned")
WAIT = ("barrier.cluster.wait.aligned", "barrier.cluster.wait.acquire.aligned")

Step = Callable[[], None]
Places = Callable[[], list[tuple[Buffer, np.ndarray, np.ndarray]]]


def bind(threads: Threads, instruction: parser.Instruction) -> Step | None:
    """The function that executes an instruction; None if the scheduler does."""
    opcode, operands = instruction.opcode, instruction.operands
    if opcode in ("bra", "bra.uni", "ret", "bar.sync", *ARRIVE, *WAIT):
        return None
    try:
        if opcode in arithmetic.OPERATIONS or opcode in warps.OPERATIONS:
            return _compute(threads, opcode, *operands)
        if opcode == "fence.mbarrier_init.release.cluster":
            return lambda: None  # the machine has no mbarriers
        if opcode in ("ld.param.b64", "ld.param::entry.b64"):
            return _parameter(threads, *operands)
        if opcode == "atom.shared.add.u32":
            return _atomic_addition(threads, *operands)
        if found := ACCESS.match(opcode):
            kind, space, count, width = found.groups()
            access = _load if kind == "ld" else _store
            return access(threads, *operands, space == ".shared", int(count or 1), KINDS[width])
        raise PtxError(f"unknown instruction {opcode}")
    except PtxError as error:
        raise instruction.error(str(error)) from None


def _elements(operand: Operand, count: int) -> tuple[Operand, ...]:
    """One operand, which may be a register's two halves, or several."""
    items = operand.items if isinstance(operand, Vector) and count > 1 else (operand,)
    if len(items) != count:
        raise PtxError(f"{count} elements wanted")
    return items


def _compute(threads: Threads, opcode: str, to: Operand, *sources: Operand) -> Step:
    of_warps = opcode in warps.OPERATIONS
    table = (warps if of_warps else arithmetic).OPERATIONS
    operation = table.get(f"{opcode},{len(sources)}", table[opcode])
    if len(sources) != len(operation.sources):
        raise PtxError(f"{len(operation.sources)} sources wanted")
    gets = [
        threads.source(x, letter.lower(), "a warp's work" if letter.isupper() else "")
        for x, letter in zip(sources, operation.sources, strict=True)
    ]
    results = _elements(to, len(operation.results))
    puts = [threads.destination(x, k) for x, k in zip(results, operation.results, strict=True)]
    function, one = operation.function, len(puts) == 1
    given = (threads.hardware,) if operation.of_hardware else ()
    spread = operation.spread or partial(undefined.spread, opcode, operation.results[0])

    def compute() -> None:
        pairs = [get() for get in gets]
        values, bits = [value for value, _ in pairs], None
        if of_warps:
            warps.check(threads, values[-1])
            values[0] = np.broadcast_to(values[0], threads.lanes).reshape(-1, 32)
        if threads.undefined and any(mask is not None for _, mask in pairs):
            masks = [np.zeros_like(x) if mask is None else mask for x, mask in pairs]
            bits = spread(values, masks)
        results = function(*given, *values)
        if one:
            puts[0](results.reshape(-1), bits)
            return
        for i, put in enumerate(puts):
            put(results[i].reshape(-1), None if bits is None else bits[i])

    return compute


def _parameter(threads: Threads, to: Operand, place: Operand) -> Step:
    names = list(threads.program.parameters)
    if not isinstance(place, parser.Address) or place.base not in names or place.offset:
        raise PtxError("no such parameter")
    number = names.index(place.base)
    value = np.uint64(((number + 1) << REGION) + threads.launch.buffers[number].base)
    put = threads.destination(to, "d")
    return lambda: put(np.asarray(value))


def _load(
    threads: Threads, to: Operand, place: Operand, shared: bool, count: int, letter: str
) -> Step:
    puts = [threads.destination(x, letter) for x in _elements(to, count)]
    places, dtype = _places(threads, place, shared), TYPES[letter]

    def load() -> None:
        values = np.zeros((count, threads.lanes), dtype)
        missing = [None] * count
        for buffer, who, offsets in places():
            values[:, who], bad = buffer.load(offsets, dtype, count, threads.stamps[who])
            if bad is not None:
                missing = np.zeros_like(values) if missing[0] is None else missing
                missing[:, who] = np.where(bad, ~dtype(0), dtype(0))
        for put, value, bits in zip(puts, values, missing, strict=True):
            put(value, bits)

    return load


def _store(
    threads: Threads, place: Operand, source: Operand, shared: bool, count: int, letter: str
) -> Step:
    use = "" if shared else "global memory"
    gets = [threads.source(x, letter, use) for x in _elements(source, count)]
    places = _places(threads, place, shared)

    def store() -> None:
        pairs = [get() for get in gets]
        for buffer, who, offsets in places():
            values = [x[who] if x.ndim else np.full(who.shape, x) for x, _ in pairs]
            bad = [None if bits is None else bits[who] != 0 for _, bits in pairs]
            buffer.store(offsets, values, bad, threads.stamps[who])

    return store


def _atomic_addition(threads: Threads, to: Operand, place: Operand, value: Operand) -> Step:
    """One lane after the other; which one is first, the hardware chooses."""
    put, get = threads.destination(to, "w"), threads.source(value, "w", "an atomic addition")
    places = _places(threads, place, True, threads.hardware.leader)

    def add() -> None:
        by = np.broadcast_to(get()[0], threads.lanes)
        before = np.zeros(threads.lanes, np.uint32)
        for buffer, who, offsets in places():
            before[who] = buffer.add(offsets, by[who], threads.stamps[who])
        put(before)

    return add


def _places(threads: Threads, place: Operand, shared: bool, first: int = 0) -> Places:
    """What the running lanes access, beginning with the `first`: buffers, lanes, their offsets."""
    if not isinstance(place, parser.Address):
        raise PtxError("an address wanted")
    if place.base == parser.SHARED_VARIABLE:
        if not shared:
            raise PtxError("shared memory by a generic address: not known to the machine")
        get = threads.source(Symbol(place.base), "d")
    else:
        kind = threads.program.kind(place.base)
        if kind not in (("b64", "b32") if shared else ("b64",)):
            raise PtxError(f"an address in a register of kind {kind}")
        get = threads.source(Register(place.base), KINDS[kind], "an address")

    def places() -> list[tuple[Buffer, np.ndarray, np.ndarray]]:
        lanes = np.flatnonzero(threads.active())
        lanes = np.roll(lanes, first) if first else lanes
        address = get()[0].astype(np.int64) + place.offset
        address = address[lanes] if address.ndim else np.full(lanes.shape, address)
        if shared:
            size = max(threads.launch.shared_bytes, 16)
            offsets = address - SHARED_BASE
            outside = (offsets < 0) | (offsets >= size)
            if outside.any():
                where = int(offsets[np.argmax(outside)])
                raise PtxError(f"shared memory + {where} is outside its {size} bytes")
            return [(threads.shared, lanes, offsets + threads.local_cta[lanes] * size)]
        out = []
        numbers = address >> REGION
        for number in np.unique(numbers):
            here = numbers == number
            if not 1 <= number <= len(threads.launch.buffers):
                raise PtxError(f"{int(address[here][0]):#x} is in no buffer")
            buffer = threads.launch.buffers[number - 1]
            out.append((buffer, lanes[here], address[here] - (number << REGION) - buffer.base))
        return out

    return places
