"""Calls of `pallas_kernels` whose kernels are compiled for an H100 and executed here as PTX.

Only `GPU.kernel` is replaced: each kernel, with the shapes of the
call, is compiled by Mosaic GPU on this machine, and its PTX is run on the arrays. Everything
between kernels is the project's own code and JAX's on a CPU. A kernel is compiled alone; that a
whole program has the same is checked by `others_in_program`. In a jitted program the kernels run in
callbacks, where every byte of an input counts as written.
"""

import re
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.backends.mosaic_gpu import rows as run
from pallas_kernels.backends.mosaic_gpu.compat import GPU
from pallas_kernels.contract.rows import Outputs
from pallas_kernels.testing import compile_target
from tests.ptx_machine import host, machine, threads
from tests.ptx_machine.memory import Buffer
from tests.ptx_machine.parser import Program, PtxError, parse
from tests.support import kernel_calls

BASE = 4096  # of every buffer's addresses: no buffer lies before it
# What XLA promises LLVM of buffers' places, and refuses to run without (`CheckAlignment` in
# xla/service/gpu); of a buffer that it allocates as much as Mosaic GPU promises.
ARGUMENT = 16  # bytes: arguments of a program, which another library may have allocated
BETWEEN = 256  # bytes: what lies between kernels, and results
PROMISE = re.compile(r"align (\d+) dereferenceable")


def report_alignment(device: compile_target.CompileTarget) -> int:
    """Print what alignments kernels of a program with arguments, results and more rely on.

    1 if they are not what the machine of the tests takes for granted. From jax 0.11 on XLA may dump
    no LLVM IR to read them in.
    """

    def program(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        between = jnp.sort(x, axis=1)[:, :3]  # sorted, and so not fused with what comes after
        return jnp.cumsum(between, axis=0) + y, jnp.sort(between * y, axis=0)

    with tempfile.TemporaryDirectory() as directory:
        lowered = jax.jit(program).lower(device.array((3, 7), "float32"), device.array((), "int32"))
        options = {"xla_dump_to": directory, "xla_dump_hlo_as_text": True}
        lowered.compile(compiler_options=options)
        texts = [path.read_text() for path in Path(directory).glob("*ir-no-opt.ll")]
    promised = {int(found) for text in texts for found in PROMISE.findall(text)}
    print(f"XLA aligns buffers to {sorted(promised)} bytes")
    if jax.__version_info__ >= (0, 11) and not promised:
        print("XLA dumps no LLVM IR here: how it aligns buffers is known by jax 0.10 alone")
        return 0
    return int(promised != {ARGUMENT, BETWEEN})


class Compiled(NamedTuple):
    """One kernel; a mutation has another `program`."""

    name: str
    ptx: str
    program: Program
    host: host.HostCode


class Conditions(NamedTuple):
    """Choices of the hardware, the driver and the allocator."""

    name: str
    batches: Callable[[int], list[list[int]]]  # number of CTAs -> which run together, in order
    base: int = BASE  # of arguments and results; XLA aligns arguments to `ARGUMENT`
    hardware: threads.Hardware = threads.Hardware()

    @property
    def between(self) -> int:
        """The place of what lies between kernels, which XLA aligns to `BETWEEN` bytes."""
        return BASE if self.base == BASE else BASE + BETWEEN


class Run(NamedTuple):
    """One launch that was executed."""

    kernel: Compiled
    counts: machine.Counts


class Stand:
    """Its `kernel` is a stand-in for `GPU.kernel`: kernels run as PTX."""

    def __init__(self, conditions: Conditions, compile_kernel: Callable[..., Compiled]) -> None:
        self.conditions, self.compile = conditions, compile_kernel
        self.runs: list[Run] = []
        self.defined: dict[int, tuple[Any, np.ndarray]] = {}  # outputs by id: which granules are

    def kernel(self, body: Callable[..., None], **options: Any) -> Callable[..., list[Any]]:
        def call(*args: Any) -> list[Any]:
            compiled, leaves = self.compile(body, options, args), jax.tree.leaves(args)

            def launched(*given: Any) -> tuple[list[np.ndarray], list[np.ndarray | None]]:
                known = [self.defined.get(id(x), (None, None))[1] for x in given]
                inputs = [np.asarray(x) for x in given]
                arrays, defined, counts = execute(
                    compiled, inputs, known, options["out_type"], self.conditions
                )
                self.runs.append(Run(compiled, counts))
                return arrays, defined

            if any(isinstance(x, jax.core.Tracer) for x in leaves):
                types = list(options["out_type"])
                return list(jax.pure_callback(lambda *x: launched(*x)[0], types, *leaves))
            outputs, defined = launched(*leaves)
            arrays = [jnp.asarray(x) for x in outputs]
            # The array is kept too: otherwise another one may get its id.
            self.defined |= {id(x): (x, known) for x, known in zip(arrays, defined, strict=True)}
            return arrays

        return call


KERNEL = GPU.kernel


def executed(stand: Stand) -> AbstractContextManager[Any]:
    """Run all kernels as PTX, within the context."""
    return mock.patch.object(GPU, "kernel", stand.kernel)


def bits_of(case: Any, stand: Stand) -> list[bytes]:
    """The bits of a case's results, which were checked."""
    with executed(stand):
        result = case.call()
    case.check(result)
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(result)]


class Compiler:
    """Compiles each kernel once."""

    def __init__(self, chip: str = "H100") -> None:
        self.device = compile_target.find(chip)
        self.known: dict[Any, Compiled] = {}

    def __call__(self, body: Any, options: dict[str, Any], args: Any) -> Compiled:
        types = [(x.shape, str(x.dtype)) for x in jax.tree.leaves(args)]
        out, name = options["out_type"], options["kernel_name"]
        key = *map(str, (jax.tree.structure(args), types, body.keywords, out)), name
        if key not in self.known:
            wanted = jax.tree.map(lambda x: self.device.array(x.shape, x.dtype), args)
            found = self.kernels(KERNEL(body, **options), *wanted)
            if list(found) != [name]:
                raise PtxError(f"compiled were {list(found)}, not one {name}")
            self.known[key] = found[name]
        return self.known[key]

    def kernels(self, function: Any, *args: Any) -> dict[str, Compiled]:
        """The new kernels in a function's program, by name; args are `CompileTarget.array`s."""
        self.device.compile(jax.jit(function).lower(*args))
        out = {}
        for path in sorted(self.device.dump.glob("*.ptx")):
            ptx = path.read_text()
            code = host.read(path.with_suffix(".ll").read_text())
            name = path.stem.rsplit("_", 1)[0]
            out[name] = Compiled(name, ptx, parse(ptx), code)
        return out


def others_in_program(compiler: Compiler) -> list[str]:
    """Kernels of a jitted call, compiled as one program, that are not those compiled alone.

    Mosaic GPU compiles a kernel once a process, known by a hash of its code: of a whole program
    whose kernels were all compiled alone before it compiles none again. By jax 0.11.2 the hashes of
    `topk_rows` differ: what is compiled again must be the same text.
    """
    rows = 4
    numbers = (rows,), "int32"
    kinds = [((rows, 8448), "bfloat16"), numbers, numbers, ((), "int32")]
    kinds += [((rows,), "float32"), ((rows, 2), "int32")]

    def call(logits: Any, ids: Any, *rest: Any) -> Any:
        return kernel_calls.topk_logprobs(run, logits, ids, Outputs(2), *rest)

    stand = Stand(Conditions("", lambda ctas: [list(range(ctas))]), compiler)
    with executed(stand):
        call(*(jnp.zeros(shape, dtype) for shape, dtype in kinds))
    alone = [(kernel.ptx, kernel.host) for kernel in compiler.known.values()]
    again = compiler.kernels(call, *(compiler.device.array(*kind) for kind in kinds))
    return [name for name, kernel in again.items() if (kernel.ptx, kernel.host) not in alone]


def execute(
    compiled: Compiled,
    inputs: list[np.ndarray],
    defined: list[np.ndarray | None],
    out_types: Any,
    conditions: Conditions,
) -> tuple[list[np.ndarray], list[np.ndarray | None], machine.Counts]:
    """Execute one launch; bytes that it does not write hold the conditions's fill byte.

    defined: for each input which of its granules are, None for all of them; returned of outputs.
    """
    code, hardware = compiled.host, conditions.hardware
    if code.threads != compiled.program.threads:
        raise PtxError(f"launched with {code.threads} threads")
    buffers = []
    for i, (x, known) in enumerate(zip(inputs, defined, strict=True)):
        data = np.ascontiguousarray(x)
        base = conditions.base if known is None else conditions.between
        buffers.append(Buffer(f"input {i}", data, base, writable=False, defined=known))
    # A result may lie where a donated argument lay.
    base = conditions.base if not compiled.name.startswith("read") else conditions.between
    arrays = [np.empty(kind.shape, kind.dtype) for kind in out_types]
    for i, out in enumerate(arrays):
        out.reshape(-1).view(np.uint8)[:] = hardware.garbage
        buffers.append(Buffer(f"output {i}", out, base, writable=True))
    ordered = tuple(buffers[i] for i in code.buffers)
    # Mosaic promises LLVM 256 bytes of all of them, which is more than XLA does of arguments.
    launch = threads.Launch(code.grid, code.shared_bytes, ordered, alignment=ARGUMENT)
    each = code.cluster
    batches = [
        [cta for cluster in batch for cta in range(cluster * each, (cluster + 1) * each)]
        for batch in conditions.batches(int(np.prod(code.grid)) // each)
    ]
    counts = machine.run(compiled.program, launch, batches, hardware)
    return arrays, [buffer.defined for buffer in buffers[len(inputs) :]], counts
