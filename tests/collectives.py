"""The collectives of a compiled program, and the bytes that they carry."""

import re
from typing import NamedTuple

import numpy as np

BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4,
         "f32": 4, "s64": 8, "u64": 8, "f64": 8}  # fmt: skip
KINDS = (
    "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast"
    "|ragged-all-to-all|send|recv"
)
LINE = re.compile(rf"= (.*?) ({KINDS})(-start)?\((.*)")
SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
NAME = re.compile(r'op_name="([^"]*)"')


class Collective(NamedTuple):
    """One collective instruction of a program."""

    kind: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]  # dtype and dimensions of its results
    op_name: str  # the JAX operation that it came from

    @property
    def num_bytes(self) -> int:
        """Of its results, on one device, each time that it runs."""
        return sum(BYTES[dtype] * int(np.prod(dims, dtype=int)) for dtype, dims in self.shapes)


def collectives(compiled):
    """Every collective of a compiled JAX program, also those in loops and branches."""
    found = []
    for line in compiled.as_text().splitlines():
        match = LINE.search(line)
        if match is None:
            continue
        shapes = tuple(
            (dtype, tuple(int(d) for d in dims.split(",") if d))
            for dtype, dims in SHAPE.findall(match[1])
        )
        name = NAME.search(line)
        found.append(Collective(match[2], shapes, name[1] if name else ""))
    return found
