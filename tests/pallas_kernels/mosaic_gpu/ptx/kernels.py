"""Calls of `pallas_kernels` whose kernels are compiled for an H100 and executed here as PTX.

Only `GPU.kernel` is replaced, where `pallas_kernels` uses it: each kernel, with the shapes of the
call, is compiled by Mosaic GPU on this machine, and its PTX is run on the arrays. Everything
between kernels is the project's own code and JAX's on a CPU. A kernel is compiled alone; that a
whole program has the same is checked by `others_in_program`. In a jitted program the kernels run in
callbacks, where every byte of an input counts as written.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from pallas_kernels.backends.mosaic_gpu import compat, finish_kernel, rows_kernel
from pallas_kernels.backends.mosaic_gpu import rows as run
from pallas_kernels.contract.rows import Outputs
from pallas_kernels.testing import compile_target
from tests.pallas_kernels.mosaic_gpu.ptx import alignment
from tests.ptx_machine import host, machine, threads
from tests.ptx_machine.memory import Buffer
from tests.ptx_machine.parser import Program, PtxError, parse
from tests.support import kernel_calls

BASE = 4096  # of every buffer's addresses: no buffer lies before it


@dataclass(frozen=True)
class Compiled:
    """One kernel; a mutation has another `program`."""

    name: str
    ptx: str
    program: Program
    host: host.HostCode


@dataclass(frozen=True)
class Conditions:
    """Choices of the hardware, the driver and the allocator."""

    name: str
    batches: Callable[[int], list[list[int]]]  # number of CTAs -> which run together, in order
    base: int = BASE  # of arguments and results; XLA aligns arguments to `alignment.ARGUMENT`
    hardware: threads.Hardware = field(default_factory=threads.Hardware)

    @property
    def between(self) -> int:
        """The place of what lies between kernels, which XLA aligns to `alignment.BETWEEN` bytes."""
        return BASE if self.base == BASE else BASE + alignment.BETWEEN


@dataclass(frozen=True)
class Run:
    """One launch that was executed."""

    kernel: Compiled
    counts: machine.Counts
    shapes: tuple[str, ...]


class Stand:
    """A stand-in for `compat.GPU` whose kernels run as PTX."""

    def __init__(self, conditions: Conditions, compile_kernel: Callable[..., Compiled]) -> None:
        self.conditions, self.compile = conditions, compile_kernel
        self.runs: list[Run] = []
        self.defined: dict[int, tuple[Any, np.ndarray]] = {}  # outputs by id: which granules are

    def __getattr__(self, name: str) -> Any:
        return getattr(compat.GPU, name)

    def kernel(self, body: Callable[..., None], **options: Any) -> Callable[..., list[Any]]:
        def call(*args: Any) -> list[Any]:
            compiled = self.compile(body, options, args)
            if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args)):
                return self._in_program(compiled, options["out_type"], jax.tree.leaves(args))
            inputs = [np.asarray(x) for x in jax.tree.leaves(args)]
            known = [self.defined.get(id(x), (None, None))[1] for x in jax.tree.leaves(args)]
            outputs, counts = execute(compiled, inputs, known, options["out_type"], self.conditions)
            shapes = tuple(f"{x.dtype}{list(x.shape)}" for x in inputs)
            self.runs.append(Run(compiled, counts, shapes))
            arrays = [jax.numpy.asarray(out.array) for out in outputs]
            # The array is kept too: otherwise another one may get its id.
            for array, out in zip(arrays, outputs, strict=True):
                self.defined[id(array)] = array, out.defined
            return arrays

        return call

    def _in_program(self, compiled: Compiled, out_types: Any, leaves: list[Any]) -> list[Any]:
        def run(*given: Any) -> list[np.ndarray]:
            inputs = [np.asarray(x) for x in given]
            known: list[None] = [None] * len(inputs)
            outputs, counts = execute(compiled, inputs, known, out_types, self.conditions)
            shapes = tuple(f"{x.dtype}{list(x.shape)}" for x in inputs)
            self.runs.append(Run(compiled, counts, shapes))
            return [out.array for out in outputs]

        return list(jax.pure_callback(run, list(out_types), *leaves))


@contextlib.contextmanager
def executed(
    stand: Stand, modules: tuple[Any, ...] = (rows_kernel, finish_kernel)
) -> Iterator[None]:
    """Run the kernels that these modules make as PTX, within the context."""
    before = [module.GPU for module in modules]
    for module in modules:
        module.GPU = stand
    try:
        yield
    finally:
        for module, gpu in zip(modules, before, strict=True):
            module.GPU = gpu


class Compiler:
    """Compiles each kernel once."""

    def __init__(self, chip: str = "H100") -> None:
        self.device = compile_target.find(chip)
        self.known: dict[Any, Compiled] = {}

    def __call__(self, body: Any, options: dict[str, Any], args: Any) -> Compiled:
        types = [(x.shape, str(x.dtype)) for x in jax.tree.leaves(args)]
        key = (
            str(jax.tree.structure(args)),
            str(types),
            str(body.keywords),
            str(options["out_type"]),
            options["kernel_name"],
        )
        if key not in self.known:
            wanted = jax.tree.map(lambda x: self.device.array(x.shape, x.dtype), args)
            found = self.kernels(compat.GPU.kernel(body, **options), *wanted)
            if list(found) != [options["kernel_name"]]:
                raise PtxError(f"compiled were {list(found)}, not one {options['kernel_name']}")
            self.known[key] = found[options["kernel_name"]]
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

    Mosaic GPU compiles a kernel once a process, known by a hash of its code: a whole program whose
    kernels were all compiled alone before adds none.
    """
    rows, vocabulary, k = 4, 8448, 2
    numbers = (rows,), "int32"
    kinds = [((rows, vocabulary), "bfloat16"), numbers, numbers, ((), "int32")]
    kinds += [((rows,), "float32"), ((rows, 2), "int32")]

    def call(logits: Any, ids: Any, row_ids: Any, count: Any, temperatures: Any, extra: Any) -> Any:
        return kernel_calls.topk_logprobs(
            run, logits, ids, Outputs(k), row_ids, count, temperatures, extra
        )

    stand = Stand(Conditions("", lambda ctas: [list(range(ctas))]), compiler)
    with executed(stand):
        call(*(jax.numpy.zeros(shape, dtype) for shape, dtype in kinds))
    return list(compiler.kernels(call, *(compiler.device.array(*kind) for kind in kinds)))


@dataclass(frozen=True)
class Output:
    """An output of a launch: an array, and which of its granules were written."""

    array: np.ndarray
    defined: np.ndarray


def execute(
    compiled: Compiled,
    inputs: list[np.ndarray],
    defined: list[np.ndarray | None],
    out_types: Any,
    conditions: Conditions,
) -> tuple[list[Output], machine.Counts]:
    """Execute one launch; bytes that it does not write hold the conditions's fill byte.

    defined: for each input which of its granules are, None for all of them.
    """
    code = compiled.host
    if code.threads != compiled.program.threads:
        raise PtxError(f"launched with {code.threads} threads")
    buffers = []
    for i, (x, known) in enumerate(zip(inputs, defined, strict=True)):
        data = np.ascontiguousarray(x)
        base = conditions.base if known is None else conditions.between
        buffers.append(Buffer(f"input {i}", data, base, writable=False, defined=known))
    arrays = []
    for i, kind in enumerate(out_types):
        out = np.empty(kind.shape, kind.dtype)
        out.reshape(-1).view(np.uint8)[:] = conditions.hardware.garbage
        arrays.append(out)
        # A result may lie where a donated argument lay.
        base = conditions.base if compiled.name.startswith("finish") else conditions.between
        buffers.append(Buffer(f"output {i}", out, base, writable=True))
    ordered = tuple(buffers[i] for i in code.buffers)
    # Mosaic promises LLVM 256 bytes of all of them, which is more than XLA does of arguments.
    launch = threads.Launch(code.grid, code.shared_bytes, ordered, alignment=alignment.ARGUMENT)
    batches = conditions.batches(int(np.prod(code.grid)))
    counts = machine.run(compiled.program, launch, batches, conditions.hardware)
    written = [buffer.defined for buffer in buffers[len(inputs) :]]
    return [Output(x, known) for x, known in zip(arrays, written, strict=True)], counts
