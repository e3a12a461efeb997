"""How a kernel is launched, from the host code (LLVM) that Mosaic GPU compiled for it.

Mosaic's function takes the buffers of XLA's custom call, inputs then outputs, and hands some of
them to the kernel, in another order. jax 0.10 launches there, jax 0.11 too and returns a status,
jax 0.12 describes the launch to XLA. All three name the same numbers in the same order; the later
two also say whether the kernel may start before the one ahead of it ends, which must not be: the
machine runs launches one after the other.
"""

import re
from typing import NamedTuple

from .parser import PtxError

FUNCTION = re.compile(
    r"define (?:void|i32) @\w+_mosaic_gpu\(ptr %0, ptr %1(?:, ptr (%2))?\) \{\n(.*?)\n\}", re.DOTALL
)
LAUNCH = re.compile(
    r"(?:%\d+ = )?call (?:void|i32) @mosaic_gpu_(launch_kernel|build_kernel_spec)"
    r"\(ptr %0, (i32 -?\d+(?:, i32 -?\d+)*), ptr %\d+, ptr %\d+\)$"
)
PLACE = re.compile(r"(%\d+) = getelementptr (.+), ptr %\d+,(?: i32 0,)? i32 (\d+)$")
LOAD = re.compile(r"(%\d+) = load ptr, ptr (%\d+), align 8$")
STORE = re.compile(r"store ptr (%\d+), ptr (%\d+), align 8$")
KIND = re.compile(r"store i32 (\d+), ptr %\d+, align 4$")  # of a parameter; 0 is a buffer
RETURN = re.compile(r"ret (?:void|i32 %\d+)$")


class HostCode(NamedTuple):
    """The one launch in a host function."""

    grid: tuple[int, int, int]  # CTAs
    cluster: int  # CTAs
    threads: int
    shared_bytes: int
    buffers: tuple[int, ...]  # for each parameter of the kernel the number of its buffer


def read(text: str) -> HostCode:
    """Read a module's LLVM; an error if it is not as Mosaic GPU 0.10 to 0.12 writes it."""
    name = FUNCTION.search(text)
    if name is None:
        raise PtxError("there is no host function with a launch")
    launch = None
    arrays = name[1] or "%1"  # the buffers' pointers
    places = {arrays: ("ptr", 0)}  # of arrays and records: of what, and which one
    stored: dict[tuple[str, int], int] = {}  # there: the number of what is stored
    kinds = 0
    for line in map(str.strip, name[2].splitlines()):
        if found := PLACE.match(line):
            places[found[1]] = found[2], int(found[3])
        elif found := LOAD.match(line):
            places[found[1]] = places[found[2]]
        elif found := STORE.match(line):
            stored[places[found[2]]] = places[found[1]][1]
        elif found := KIND.match(line):
            if found[1] != "0":
                raise PtxError(f"a parameter of kind {found[1]} is no buffer")
            kinds += 1
        elif numbers := _launch(line):
            if launch is not None:
                raise PtxError("there are two launches")
            launch = numbers
        elif "alloca" not in line and not RETURN.match(line):
            raise PtxError(f"host code is not understood: {line}")
    if launch is None:
        raise PtxError("there is no launch")
    *grid, a, b, c, x, y, z, shared, early, count = launch
    if ((a, b, c) != (0, 0, 0) and (b, c) != (1, 1)) or (y, z) != (1, 1):
        raise PtxError(f"clusters {a, b, c} or a block of {x, y, z} threads are not known")
    if early:
        raise PtxError("the kernel may start before the one ahead of it ends: not known")
    slots = {number: field for (kind, number), field in stored.items() if kind == "i64"}
    fields = {number: buffer for (kind, number), buffer in stored.items() if kind != "i64"}
    buffers = tuple(fields[slots[i]] for i in range(len(slots)))
    if count is not None and (count, kinds) != (len(buffers), len(buffers)):
        raise PtxError(f"{count} parameters of {kinds} kinds are announced, {len(buffers)} stored")
    return HostCode((grid[0], grid[1], grid[2]), max(a, 1), x, shared, buffers)


def _launch(line: str) -> list[int | None] | None:
    """The ten numbers of a launch, whether it may be early, and how many parameters, if said."""
    found = LAUNCH.match(line)
    if found is None:
        return None
    numbers: list[int | None] = [int(part.split()[1]) for part in found[2].split(",")]
    wanted = (12,) if found[1] == "build_kernel_spec" else (10, 11)
    if len(numbers) not in wanted:
        raise PtxError(f"a launch with {len(numbers)} numbers, not {wanted}: {line}")
    return [*numbers, *(0, None)[len(numbers) - 10 :]]
