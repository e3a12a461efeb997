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
PLACE = re.compile(r"(%\d+) = getelementptr (.+), ptr %\d+,(?: i32 0,)? i32 (\d+)$")
LOAD = re.compile(r"(%\d+) = load ptr, ptr (%\d+), align 8$")
STORE = re.compile(r"store ptr (%\d+), ptr (%\d+), align 8$")


@dataclass(frozen=True)
class HostCode:
    """The one launch in a host function."""

    grid: tuple[int, int, int]  # CTAs
    cluster: int  # CTAs
    threads: int
    shared_bytes: int
    buffers: tuple[int, ...]  # for each parameter of the kernel the number of its buffer


def read(text: str) -> HostCode:
    """Read a module's LLVM; an error if it is not as Mosaic GPU 0.10.2 writes it."""
    name = FUNCTION.search(text)
    if name is None:
        raise PtxError("there is no host function with a launch")
    launch = None
    places = {"%2": ("ptr", 0)}  # of arrays and records: of what, and which one
    stored: dict[tuple[str, int], int] = {}  # there: the number of what is stored
    for line in map(str.strip, name[2].splitlines()):
        if found := PLACE.match(line):
            places[found[1]] = found[2], int(found[3])
        elif found := LOAD.match(line):
            places[found[1]] = places[found[2]]
        elif found := STORE.match(line):
            stored[places[found[2]]] = places[found[1]][1]
        elif found := LAUNCH.match(line):
            if launch is not None:
                raise PtxError("there are two launches")
            launch = [int(part.split()[1]) for part in found[1].split(",")]
        elif "alloca" not in line and line != "ret void":
            raise PtxError(f"host code is not understood: {line}")
    if launch is None:
        raise PtxError("there is no launch")
    *grid, a, b, c, x, y, z, shared = launch
    if ((a, b, c) != (0, 0, 0) and (b, c) != (1, 1)) or (y, z) != (1, 1):
        raise PtxError(f"clusters {a, b, c} or a block of {x, y, z} threads are not known")
    slots = {number: field for (kind, number), field in stored.items() if kind == "i64"}
    fields = {number: buffer for (kind, number), buffer in stored.items() if kind != "i64"}
    buffers = tuple(fields[slots[i]] for i in range(len(slots)))
    return HostCode((grid[0], grid[1], grid[2]), max(a, 1), x, shared, buffers)
