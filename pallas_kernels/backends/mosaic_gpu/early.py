"""Loads that stay where a kernel says: what needs no other number comes before any branch.

Other loads the compilers move to where their results are used, behind a branch that waits for
another load: then one latency follows the other. A relaxed load of the memory model stays.
"""

from math import gcd
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.backends.mosaic_gpu import thread
from pallas_kernels.backends.mosaic_gpu.compat import GPU
from pallas_kernels.backends.mosaic_gpu.tiling import WARPGROUP


def load_at_once(ref: Any, index: Any, interpreted: bool) -> Any:
    """A number of 32 bits in global memory."""
    if interpreted:
        return ref[index]
    dtype = jnp.dtype(ref.dtype)
    integer = dtype == jnp.int32

    def body(here: Any, at: Any) -> Any:
        kind, letter = (thread.i32(), "r") if integer else (thread.ir.F32Type.get(), "f")
        address = thread.place(here, thread.word(at), kind)
        text = "ld.relaxed.gpu.global.b32 $0, [$1];"
        found = thread.llvm.inline_asm(kind, [address], text, f"={letter},l", has_side_effects=True)
        return thread.mgpu.FragmentedArray.splat(found, (), is_signed=True if integer else None)

    kind = thread.result((), dtype, GPU.Layout.WG_SPLAT)
    return thread.inline(body, (ref, index), (None, "scalar"), kind)


def load_run_at_once(ref: Any, start: Any, size: int, layout: Any) -> Any:
    """`load_at_once` of a vector in a `compat.run_layout` whose threads load whole words."""
    dtype = jnp.dtype(ref.dtype)
    run = size // WARPGROUP
    vector = gcd(run, 16 // dtype.itemsize)
    number = vector * dtype.itemsize // 4  # of words
    letters = ", ".join(f"${i}" for i in range(number))
    form = {1: "b32 $0", 2: f"v2.b32 {{{letters}}}", 4: f"v4.b32 {{{letters}}}"}[number]

    def body(here: Any, at: Any) -> Any:
        element = thread.ir.MemRefType(here.type).element_type
        first = thread.word(at) + thread.thread() * run
        loaded = []
        for i in range(0, run, vector):
            address = thread.place(here, first + i, element)
            kinds = [thread.i32()] * number
            whole = thread.i32() if number == 1 else thread.llvm.StructType.get_literal(kinds)
            text = f"ld.relaxed.gpu.global.{form}, [${number}];"
            constraints = ",".join(["=r"] * number) + ",l"
            found = thread.llvm.inline_asm(
                whole, [address], text, constraints, has_side_effects=True
            )
            if number > 1:
                several = thread.llvm.mlir_undef(thread.ir.VectorType.get((number,), thread.i32()))
                for j in range(number):
                    one = thread.llvm.extractvalue(thread.i32(), found, [j])
                    several = thread.llvm.insertelement(several, one, thread.word(j).value)
                found = several
            loaded.append(thread.llvm.bitcast(thread.ir.VectorType.get((vector,), element), found))
        tiled = layout.to_mgpu()
        registers = np.array(loaded, dtype=object).reshape(tiled.registers_shape((size,)))
        return thread.mgpu.FragmentedArray(_registers=registers, _layout=tiled, _is_signed=None)

    return thread.inline(
        body, (ref, start), (None, "scalar"), thread.result((size,), dtype, layout)
    )
