"""What XLA promises of the places of buffers on a GPU, read from programs that it compiles.

XLA tells LLVM of each buffer of a kernel of its own how its address is aligned, and refuses to run
a program whose buffers are not (`CheckAlignment` in xla/service/gpu). A buffer that XLA allocates
is promised as much as Mosaic GPU promises LLVM, a program's argument less.
"""

import re
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp

from pallas_kernels.testing import compile_target

ARGUMENT = 16  # bytes: arguments of a program, which another library may have allocated
BETWEEN = 256  # bytes: what lies between kernels, and results
PROMISE = re.compile(r"align (\d+) dereferenceable")


def promised(device: compile_target.CompileTarget) -> set[int]:
    """All alignments that kernels of a program with arguments, results and more rely on."""

    def program(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        between = jnp.sort(x, axis=1)[:, :3]  # sorted, and so not fused with what comes after
        return jnp.cumsum(between, axis=0) + y, jnp.sort(between * y, axis=0)

    with tempfile.TemporaryDirectory() as directory:
        lowered = jax.jit(program).lower(device.array((3, 7), "float32"), device.array((), "int32"))
        options = {"xla_dump_to": directory, "xla_dump_hlo_as_text": True}
        lowered.compile(compiler_options=options)
        texts = [path.read_text() for path in Path(directory).glob("*ir-no-opt.ll")]
    return {int(found) for text in texts for found in PROMISE.findall(text)}


def report(device: compile_target.CompileTarget) -> int:
    """Print what is promised; 1 if it is not what the machine of the tests takes for granted."""
    found = promised(device)
    print(f"XLA aligns buffers to {sorted(found)} bytes")
    return int(found != {ARGUMENT, BETWEEN})
