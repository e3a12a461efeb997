"""Values that were never written: memory without a store, and LLVM's undefined values.

They may be loaded, moved and computed with, as long as nothing depends on them: no branch, no
address, no global memory. Each register has a mask of its undefined bits, as Valgrind's memcheck
has (Seward, Nethercote 2005), but coarser: a computed value is undefined as a whole, save that of
`and` and `or`, which one source may settle.
"""

import re
from collections.abc import Sequence
from functools import reduce

import numpy as np

from .parser import TYPES, Address, Operand, Program, Register, Vector

UNSIGNED = re.compile(r"cvt\.[us]\d+\.u\d+$")  # bits are moved, and zeros come above them


def spread(
    opcode: str, letter: str, values: Sequence[np.ndarray], masks: Sequence[np.ndarray]
) -> np.ndarray:
    """How an instruction hands undefined bits on: the mask of a result of this kind.

    Args:
      values: of the sources, each [lanes]. masks: their undefined bits.
    """
    dtype = TYPES[letter]
    full = ~dtype(0)
    if opcode.startswith(("and.", "or.")):  # bit by bit: a defined 0 settles an `and`, a 1 an `or`
        is_and, pairs = opcode.startswith("and."), zip(values, masks, strict=True)
        open_bits = [mask | (value if is_and else ~value) for value, mask in pairs]
        return reduce(np.bitwise_or, masks) & reduce(np.bitwise_and, open_bits)
    if opcode.startswith("mov.") or UNSIGNED.match(opcode):
        return masks[0].astype(dtype)
    if opcode.startswith("selp."):  # of the chosen source; all undefined where the choice is
        return np.where(masks[2], full, np.where(values[2], masks[0], masks[1]))
    if opcode.endswith("x2"):
        some, low = reduce(np.bitwise_or, masks), dtype((1 << 4 * dtype().itemsize) - 1)
        return np.where(some & low, low, dtype(0)) | np.where(some & ~low, ~low, dtype(0))
    return np.where(reduce(np.logical_or, masks), full, dtype(0))


def never_written(program: Program) -> list[str]:
    """Registers that are read and never written: LLVM knows that they are undefined."""
    sources: set[str] = set()
    results: set[str] = set()
    for instruction in program.instructions:
        for i, operand in enumerate(instruction.operands):
            written = i == 0 and not instruction.opcode.startswith(("st.", "bar."))
            (results if written else sources).update(names(operand))
    special = ("%tid", "%ctaid", "%cluster")
    return sorted(name for name in sources - results if not name.startswith(special))


def names(operand: Operand) -> list[str]:
    """The registers in an operand."""
    if isinstance(operand, Vector):
        return [name for item in operand.items for name in names(item)]
    if isinstance(operand, Address):
        return [operand.base] if operand.base.startswith("%") else []
    return [operand.name] if isinstance(operand, Register) else []
