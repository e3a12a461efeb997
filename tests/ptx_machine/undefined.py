"""Values that were never written: memory without a store, and LLVM's undefined values.

They may be loaded, moved and computed with, as long as nothing depends on them: no branch, no
address, no global memory. Each register has a mask of its undefined bits, as Valgrind's memcheck
has (Seward, Nethercote 2005), but coarser: a computed value is undefined as a whole, save that of
`and` and `or`, which one source may settle.
"""

from collections.abc import Callable, Sequence

import numpy as np

from .arithmetic import TYPES
from .parser import Address, Operand, Program, Register, Vector

Masks = Sequence[np.ndarray | None]  # a source each
Rule = Callable[[int, Sequence[np.ndarray], Masks], np.ndarray]


def rule(opcode: str, letter: str) -> Rule:
    """How an instruction hands undefined bits on: rule(lanes, source values, source masks)."""
    dtype = TYPES[letter]
    full = all_bits(1, dtype)[0]

    def whole(lanes: int, values: Sequence[np.ndarray], masks: Masks) -> np.ndarray:
        """Undefined where any source is."""
        some = np.zeros(lanes, bool)
        for mask in masks:
            if mask is not None:
                some = some | (mask != 0)
        return np.where(some, full, dtype(0))

    def moved(lanes: int, values: Sequence[np.ndarray], masks: Masks) -> np.ndarray:
        (mask,) = masks
        assert mask is not None
        return mask.astype(dtype)

    def selected(lanes: int, values: Sequence[np.ndarray], masks: Masks) -> np.ndarray:
        """The mask of the chosen source; all undefined where the choice is."""
        a, b, p = masks
        zero = dtype(0)
        chosen = np.where(values[2], zero if a is None else a, zero if b is None else b)
        return chosen if p is None else np.where(p, full, chosen)

    def halves(lanes: int, values: Sequence[np.ndarray], masks: Masks) -> np.ndarray:
        out = np.zeros(lanes, dtype)
        width = 4 * dtype().itemsize
        low = dtype((1 << width) - 1)
        for half in (low, ~low):
            for mask in masks:
                if mask is not None:
                    out = np.where(mask & half != 0, out | half, out)
        return out

    def settled(lanes: int, values: Sequence[np.ndarray], masks: Masks) -> np.ndarray:
        """Bit by bit: a defined 0 settles an `and`, a defined 1 an `or`."""
        unknown, open_bits = np.zeros(lanes, dtype), all_bits(lanes, dtype)
        for value, mask in zip(values, masks, strict=True):
            bits = dtype(0) if mask is None else mask
            unknown = unknown | bits
            open_bits = open_bits & (bits | (value if opcode.startswith("and.") else ~value))
        return unknown & open_bits

    if opcode.startswith(("and.", "or.")):
        return settled
    if opcode.startswith("mov.") or opcode in ("cvt.u16.u32", "cvt.u32.u64", "cvt.u64.u32"):
        return moved
    if opcode.startswith("selp."):
        return selected
    return halves if opcode.endswith("x2") else whole


def all_bits(lanes: int, dtype: type) -> np.ndarray:
    return np.invert(np.zeros(lanes, dtype))


def never_written(program: Program) -> list[str]:
    """Registers that are read and never written: LLVM knows that they are undefined."""
    sources: set[str] = set()
    results: set[str] = set()
    for instruction in program.instructions:
        for i, operand in enumerate(instruction.operands):
            written = i == 0 and not instruction.opcode.startswith(("st.", "bar."))
            (results if written else sources).update(names(operand))
    special = ("%tid", "%ctaid")
    return sorted(name for name in sources - results if not name.startswith(special))


def names(operand: Operand) -> list[str]:
    """The registers in an operand."""
    if isinstance(operand, Vector):
        return [name for item in operand.items for name in names(item)]
    if isinstance(operand, Address):
        return [operand.base] if operand.base.startswith("%") else []
    return [operand.name] if isinstance(operand, Register) else []
