"""Compile the XLA implementation for chips that run it, without one, and count its launches.

    python -m bench.aot_xla            a line for each program, for A100 and L40S
    python -m bench.aot_xla --check    the same; exit status 1 if a limit is broken

The limits: the plain way's launches plus 4, for each block of 256 rows; temporaries of a tenth of
the logits' bytes, beyond one float32 copy of such a block. It needs the `aot` extra. TPUs have
`bench.aot --tpu`.
"""

import argparse
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels import topk_logprobs
from pallas_kernels.backends.xla import rows
from pallas_kernels.lowering import choose
from pallas_kernels.testing import plain as reference
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
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")

# From NVIDIA's data sheets and the tuning guides of both architectures.
GPU = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {shared} threads_per_core_limit: {threads} core_count: {cores}
  fpus_per_core: {fpus} block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: {bandwidth} l2_cache_size: {l2}
  clock_rate_ghz: {clock} device_memory_size: {memory} shared_memory_per_block_optin: {optin}
  cuda_compute_capability {{ major: 8 minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""
GPUS = {
    "A100": GPU.format(
        name="NVIDIA A100-SXM4-40GB", minor=0, cores=108, fpus=64, threads=2048, clock=1.41,
        shared=167_936, optin=166_912, l2=40 << 20, bandwidth=1_555_200_000_000, memory=40 << 30,
    ),
    "L40S": GPU.format(
        name="NVIDIA L40S", minor=9, cores=142, fpus=128, threads=1536, clock=2.52,
        shared=102_400, optin=101_376, l2=96 << 20, bandwidth=864_000_000_000, memory=45 << 30,
    ),
}  # fmt: skip
CAPABILITIES = {"A100": 8.0, "L40S": 8.9}
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


@dataclass(frozen=True)
class Result:
    """One shape on one chip. `dynamic`: the number of rows is an argument of the program."""

    chip: str
    shape: Shape
    dynamic: bool
    plain_launches: int
    launches: int
    temporaries: int
    has_gpu_kernel: bool

    @property
    def launch_limit(self) -> int:
        """Launches."""
        return (self.plain_launches + MORE_LAUNCHES) * -(-self.shape.rows // BLOCK)

    @property
    def memory_limit(self) -> float:
        """Bytes."""
        rows, vocabulary = self.shape.rows, self.shape.vocabulary
        copy = 4 * min(rows, BLOCK) * vocabulary
        return copy + SHARE * rows * vocabulary * jnp.dtype(self.shape.dtype).itemsize

    @property
    def broken(self) -> bool:
        """Whether a limit is broken, or the program has a kernel that the chip cannot run."""
        too_many = self.launches > self.launch_limit
        return too_many or self.temporaries > self.memory_limit or self.has_gpu_kernel

    def __str__(self) -> str:
        return (
            f"{self.chip}  {self.shape}  dynamic: {self.dynamic}: {self.launches} launches "
            f"({self.plain_launches} plain, limit {self.launch_limit}), "
            f"{self.temporaries / 2**20:.1f} MiB (limit {self.memory_limit / 2**20:.1f})"
            f"{'  BROKEN' if self.broken else ''}"
        )


def main(arguments: list[str] | None = None) -> int:
    """Compile every shape for every chip; exit status 0, or 1 if a checked limit is broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="exit status 1 if a limit is broken")
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")  # type: ignore[no-untyped-call]
    results: list[Result] = []
    begin = time.monotonic()
    for chip in GPUS:
        sharding = gpu(chip)
        for shape in SHAPES:
            for dynamic in (False, True) if shape.rows > BLOCK else (False,):
                one = measure(chip, shape, dynamic, sharding)
                results.append(one)
                print(f"{time.monotonic() - begin:6.0f} s  {one}", flush=True)
    broken = [one for one in results if one.broken]
    print(f"{len(results)} programs compiled, {len(broken)} break a limit")
    return 1 if options.check and broken else 0


def gpu(chip: str) -> NamedSharding:
    """A GPU that need not exist."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=GPUS[chip], topology="1x1x1"
    )
    mesh = jax.sharding.Mesh(topology.devices[:1], ("x",))
    return NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]


def measure(chip: str, shape: Shape, dynamic: bool, sharding: NamedSharding) -> Result:
    """Compile one shape for a chip, by the plain way and by the XLA implementation."""

    def array(size: tuple[int, ...], dtype: str) -> Any:
        return jax.ShapeDtypeStruct(size, jnp.dtype(dtype), sharding=sharding)  # type: ignore[no-untyped-call]

    def compiled(program: Callable[..., Any]) -> Any:
        return jax.jit(program).trace(*given).lower(lowering_platforms=("cuda",)).compile()

    given = (
        array((shape.rows, shape.vocabulary), shape.dtype),
        array((shape.rows,), "int32"),
        array((), "int32"),
    )
    plain = compiled(lambda x, t, _: reference.topk_logprobs(x, t, shape.k))
    # As on a host with this chip: a host without any GPU would export the kernels of newer ones,
    # which the compiler of this one ends the process for.
    with mock.patch.object(choose, "cuda_capability", return_value=CAPABILITIES[chip]):
        ours = compiled(
            lambda x, t, count: topk_logprobs(x, t, shape.k, num_rows=count if dynamic else None)
        )
    text = ours.as_text()
    block = rows.rows_on_gpu(given[0], shape.rows, shape.k, dynamic)
    trips = -(-shape.rows // block)  # where the program does not tell
    return Result(
        chip,
        shape,
        dynamic,
        launches(plain.as_text(), trips),
        launches(text, trips),
        ours.memory_analysis().temp_size_in_bytes,
        "mosaic_gpu" in text,
    )


def launches(text: str, trips: int) -> int:
    """The operations that a compiled program executes, those of a loop as often as it turns.

    `trips` counts for loops whose number of turns is not in the text.
    """
    computations: dict[str, list[str]] = {}
    name = entry = ""
    for line in text.split("\n"):
        if found := COMPUTATION.match(line):
            name = found[2]
            computations[name] = []
            entry = name if found[1] else entry
        elif name:
            computations[name].append(line)

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

    return executed(entry)


if __name__ == "__main__":
    sys.exit(main())
