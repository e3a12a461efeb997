"""Small programs for the tests: a module around a body, and a run of it."""

import numpy as np

from . import machine, threads
from .memory import Buffer
from .parser import parse

THREADS = 128

MODULE = """
.version 9.0
.target sm_90a
.address_size 64
.visible .entry kernel(
	.param .u64 .ptr .align 256 in,
	.param .u64 .ptr .align 256 out
)
.maxntid 128, 1, 1
.minnctapersm 1
{cluster}{{
	.reg .pred 	%p<9>;
	.reg .b16 	%rs<9>;
	.reg .b32 	%r<40>;
	.reg .b64 	%rd<9>;
	// demoted variable
	.shared .align 16 .b8 __dynamic_shmem__0;
	ld.param.b64 	%rd1, [in];
	ld.param.b64 	%rd2, [out];
	mov.u32 	%r1, %tid.x;
	mul.wide.u32 	%rd3, %r1, 4;
	add.s64 	%rd4, %rd1, %rd3; // where this thread reads
	add.s64 	%rd5, %rd2, %rd3; // where it writes
{body}
}}
"""


def words(values):
    """The bits of float32 values."""
    return np.asarray(values, np.float32).view(np.uint32)


def run(body, values=None, *, grid=1, cluster=1, shared=64, batches=None, **hardware):
    """Run `body` with `values` [128] as words; returns a word of output a thread, NumPy uint32."""
    values = np.zeros(THREADS * grid, np.uint32) if values is None else np.asarray(values)
    out = np.zeros(THREADS * grid, np.uint32)
    inputs = Buffer("in", values.copy(), 4096, writable=False)
    buffers = inputs, Buffer("out", out, 4096, writable=True)
    launch = threads.Launch((grid, 1, 1), shared, buffers)
    size = f".explicitcluster\n.reqnctapercluster {cluster}, 1, 1\n" if cluster > 1 else ""
    program = parse(MODULE.format(body=body, cluster=size))
    machine.run(program, launch, batches or [list(range(grid))], threads.Hardware(**hardware))
    return out
