"""Compile the XLA implementation for chips without one, and count its launches.

`python -m bench.aot xla` prints a line for each program, for A100 and L40S.

The limits: the plain way's launches plus 4, for each block of 256 rows; temporaries of a tenth of
the logits' bytes, beyond one float32 copy of such a block; one reduction that takes the logits.
"""

import argparse
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from bench.comparison import Target
from bench.tpu.loops import by_name
from pallas_kernels import topk_logprobs
from pallas_kernels.backends.xla import block_rows
from pallas_kernels.testing import plain as reference
from pallas_kernels.testing.chips import GPUS
from pallas_kernels.testing.shapes import Shape

BLOCK = 256
MORE_LAUNCHES = 4
SHARE = 0.1
NO_LAUNCH = {
    "parameter", "constant", "bitcast", "get-tuple-element", "tuple", "while", "after-all",
    "slice-done", "copy-done",
}  # fmt: skip
OPERATION = re.compile(r"^ *(?:ROOT )?%?\S+ = (?:\(.*?\)|\S+) ([a-z\-]+)\(")
# Nothing is launched for an array of no element.
EMPTY = re.compile(r"^ *(?:ROOT )?%?\S+ = \w+\[(?:\d+,)*0[,\]]")
ENTRY = re.compile(r"^ENTRY %([\w.\-]+)", re.MULTILINE)

CHIPS = ("A100", "L40S")
SHAPES = tuple(
    Shape(rows, vocabulary, k, dtype)
    for rows, vocabulary, dtype in (
        (1, 151_936, "bfloat16"),
        (64, 131_072, "bfloat16"),
        (256, 50_257, "float32"),
        (1536, 131_072, "bfloat16"),
    )
    for k in (0, 5, 20, 128)
)


def broken(_: argparse.Namespace) -> int:
    """Compile every shape for every chip; returns how many programs break a limit."""
    jax.config.update("jax_platforms", "cpu")
    begin, number_broken = time.monotonic(), 0
    for chip in CHIPS:
        sharding = gpu(chip)
        for shape in SHAPES:
            for dynamic in (False, True) if shape.rows > BLOCK else (False,):
                found = measure(shape, dynamic, sharding)
                number_broken += any(one.verdict == "MISSED" for one in found)
                took, said = time.monotonic() - begin, "; ".join(map(str, found))
                print(f"{took:6.0f} s  {chip}  {shape}  dynamic: {dynamic}: {said}", flush=True)
    return number_broken


def gpu(chip: str) -> NamedSharding:
    """A GPU that need not exist."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=GPUS[chip].target, topology="1x1x1"
    )
    mesh = jax.sharding.Mesh(topology.devices[:1], ("x",))
    return NamedSharding(mesh, PartitionSpec())


def measure(shape: Shape, dynamic: bool, sharding: NamedSharding) -> tuple[Target, ...]:
    """Compile one shape for a chip, by the plain way and by the XLA implementation.

    `dynamic`: the number of rows is an argument of the program.
    """

    def array(size: tuple[int, ...], dtype: str) -> Any:
        return jax.ShapeDtypeStruct(size, jnp.dtype(dtype), sharding=sharding)

    def compiled(program: Callable[..., Any]) -> Any:
        return jax.jit(program).trace(*given).lower(lowering_platforms=("cuda",)).compile()

    given = (
        array((shape.rows, shape.vocabulary), shape.dtype),
        array((shape.rows,), "int32"),
        array((), "int32"),
    )
    plain = compiled(lambda x, t, _: reference.topk_logprobs(x, t, shape.k))
    ours = compiled(
        lambda x, t, count: topk_logprobs(
            x, t, shape.k, num_rows=count if dynamic else None, implementation="xla"
        )
    )
    text = ours.as_text()
    block = block_rows.rows_on_gpu(given[0], shape.rows, shape.k, dynamic)
    trips = -(-shape.rows // block)  # where the program does not tell
    temporaries = ours.memory_analysis().temp_size_in_bytes
    counts = launches(plain.as_text(), trips), launches(text, trips)
    return targets_of(shape, *counts, temporaries, reads(text, shape.vocabulary))


def targets_of(
    shape: Shape, plain_launches: int, launches: int, temporaries: int, reads: int
) -> tuple[Target, ...]:
    """The limits of a program, and what it takes."""
    rows, size = shape.rows, shape.rows * shape.vocabulary * jnp.dtype(shape.dtype).itemsize
    most = 4 * min(rows, BLOCK) * shape.vocabulary + SHARE * size
    return (
        Target("launches", (plain_launches + MORE_LAUNCHES) * -(-rows // BLOCK), launches, ""),
        Target("temporaries", most / 2**20, temporaries / 2**20, "MiB"),
        Target("reads of the logits", 1, reads, ""),
    )


def reads(text: str, vocabulary: int) -> int:
    """The reductions of a compiled program that take arrays of so many columns."""
    lines = (line for line in text.split("\n") if line.startswith("%fused_reduce"))
    return sum(f",{vocabulary}]" in line for line in lines)


def launches(text: str, trips: int) -> int:
    """The operations that a compiled program executes, those of a loop as often as it turns.

    `trips` counts for loops whose number of turns is not in the text.
    """
    computations, entry = by_name(text), ENTRY.search(text)
    assert entry is not None

    def executed(name: str) -> int:
        total = 0
        for line in computations[name]:
            operation = OPERATION.match(line)
            if operation is None or EMPTY.match(line):
                continue
            if operation[1] == "while":
                known = re.search(r"known_trip_count[^0-9]*(\d+)", line)
                parts = re.findall(r"(?:body|condition)=%?([\w.\-]+)", line)
                total += (int(known[1]) if known else trips) * sum(map(executed, parts))
            elif operation[1] not in NO_LAUNCH:
                total += 1
        return total

    return executed(entry[1])
