"""How a kernel is launched, from the host code (LLVM) that Mosaic GPU compiled for it.

Mosaic's function takes the buffers of XLA's custom call, inputs then outputs, and hands some of
them to the kernel, in another order.
"""

import re
from dataclasses import dataclass

from .parser import PtxError

FUNCTION = re.compile(
    r"define void @(\w+_mosaic_gpu)\(ptr %0, ptr %1, ptr %2\) \{\n(.*?)\n\}", re.DOTALL
)
LAUNCH = re.compile(r"call void @mosaic_gpu_launch_kernel\(ptr %0, (.*), ptr %1, ptr %\d+\)")
BUFFER = re.compile(r"(%\d+) = getelementptr ptr, ptr %2, i32 (\d+)$")
LOAD = re.compile(r"(%\d+) = load ptr, ptr (%\d+), align 8$")
FIELD = re.compile(r"(%\d+) = getelementptr \{[ptr, ]+\}, ptr %\d+, i32 0, i32 (\d+)$")
SLOT = re.compile(r"(%\d+) = getelementptr i64, ptr %\d+, i32 (\d+)$")
STORE = re.compile(r"store ptr (%\d+), ptr (%\d+), align 8$")


@dataclass(frozen=True)
class HostCode:
    """The one launch in a host function."""

    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    buffers: tuple[int, ...]  # for each parameter of the kernel the number of its buffer


def read(text: str) -> HostCode:
    """Read a module's LLVM; an error if it is not as Mosaic GPU 0.10.2 writes it."""
    name = FUNCTION.search(text)
    if name is None:
        raise PtxError("there is no host function with a launch")
    launch = None
    buffers, fields, slots = {"%2": 0}, {}, {}
    pointers: dict[str, int] = {}  # what was loaded from which buffer
    parameters: dict[int, int] = {}
    order: dict[int, int] = {}
    for line in map(str.strip, name[2].splitlines()):
        if found := BUFFER.match(line):
            buffers[found[1]] = int(found[2])
        elif found := LOAD.match(line):
            pointers[found[1]] = buffers[found[2]]
        elif found := FIELD.match(line):
            fields[found[1]] = int(found[2])
        elif found := SLOT.match(line):
            slots[found[1]] = int(found[2])
        elif found := STORE.match(line):
            what, where = found.groups()
            if where in fields:
                parameters[fields[where]] = pointers[what]
            else:
                order[slots[where]] = fields[what]
        elif found := LAUNCH.match(line):
            if launch is not None:
                raise PtxError("there are two launches")
            launch = [int(part.split()[1]) for part in found[1].split(",")]
        elif "alloca" not in line and line != "ret void":
            raise PtxError(f"host code is not understood: {line}")
    if launch is None:
        raise PtxError("there is no launch")
    *grid, a, b, c, x, y, z, shared = launch
    if (a, b, c) != (0, 0, 0) or (y, z) != (1, 1):
        raise PtxError(f"clusters {a, b, c} or a block of {x, y, z} threads are not known")
    return HostCode(
        (grid[0], grid[1], grid[2]),
        x,
        shared,
        tuple(parameters[order[i]] for i in range(len(order))),
    )
