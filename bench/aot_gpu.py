"""Compile the GPU kernels for a chip on a machine without one, and check the compiler's output.

python -m bench.aot            a table: registers, spills, instructions per logit, temporaries,
                               and the time by a model (`bench.gpu.model`), in microseconds
python -m bench.aot --accept   the times of this run are the limits from now on
python -m bench.aot --only N   every N-th shape of each path
python -m bench.aot --chip A100        or another of `chips.GPUS`; below 9.0 with jax from 0.11 on
"""

import argparse
import functools
import re
import sys
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.stages import Lowered
from rich.console import Console
from rich.table import Table

from bench.gpu import after_read, estimates, model, sampled, sass, trips
from pallas_kernels import use_implementation
from pallas_kernels.backends.mosaic_gpu import cluster_kernel
from pallas_kernels.backends.mosaic_gpu.schedule import Schedule, choose_schedule
from pallas_kernels.contract.changes import Changes
from pallas_kernels.contract.rows import Outputs, Rows
from pallas_kernels.testing import chips, compile_target
from pallas_kernels.testing.shapes import VOCABULARIES, Shape
from pallas_kernels.topk.call import topk_of_whole_rows

# 168 registers a thread let 3 warpgroups share a multiprocessor: 48 KiB of loads in flight.
REGISTERS = 168
# A cluster's program of many such rows: five fit on a multiprocessor.
OF_CLUSTER, CLUSTERED = 96, tuple(Shape(1536, v, 20, "bfloat16") for v in (32_000, 128_256))

# What is compiled for a GPU where there is none: every vocabulary, dtype and kind of schedule.
AOT = (
    *(Shape(1536, vocabulary, 20, "bfloat16") for vocabulary in VOCABULARIES.values()),
    *(Shape(64, vocabulary, 20, "float32") for vocabulary in VOCABULARIES.values()),
    *(Shape(256, 151_936, k, dtype) for k in (0, 1, 64, 128) for dtype in ("bfloat16", "float32")),
    *(Shape(1536, 50_257, 64, dtype) for dtype in ("bfloat16", "float32")),
    # Rows with edges, whose programs take places too.
    *(Shape(64, vocabulary, 20, "bfloat16") for vocabulary in (128_256, 131_072, 151_936)),
    Shape(4, 131_072, 20, "bfloat16"),
    Shape(4, 50_257, 128, "float32"),
    Shape(1, 32_000, 128, "float16"),
    Shape(2048, 262_144, 5, "float16"),
    # What the model of the time holds promises for, and a K above that of any server.
    *(Shape(1536, 131_072, 128, dtype) for dtype in ("bfloat16", "float32")),
    *(Shape(1536, 151_936, k, "bfloat16") for k in (64, 128)),
    *(Shape(256, 131_072, 20, dtype) for dtype in ("bfloat16", "float32")),
    *(Shape(64, 131_072, k, "float32") for k in (20, 256, 512)),
    *(Shape(rows, 131_072, 20, "bfloat16") for rows in (528, 560)),
    Shape(64, 131_072, 512, "bfloat16"),
)


@dataclass(frozen=True)
class Limits:
    """What a compiled call may have."""

    per_logit: float  # instructions
    temporaries: float  # of the logits' bytes
    # Each costs microseconds. Three: pass 1, pass 2, and the extra ids' logprobs; or two, where a
    # row's programs are a cluster. Where logits are changed, XLA makes the results of a few numbers
    # a row.
    launches: int
    once: float | None = None  # instructions of the loop with one exponential, beside one with two


LIMITS = {
    # 9.3 and 7.3 where parts are wide, and rows begin at vectors. Temporaries are groups' numbers.
    "separate": Limits(10.4, 0.045, 3),
    # Separate calls with all optional results, a bit mask, and a mask and a bias of 64 tokens.
    "results": Limits(12.5, 0.03, 3),
    "mask": Limits(12.7, 0.03, 11),
    "bias": Limits(12.7, 0.10, 24),  # one fewer with jax 0.10.2
    # Rows that are sampled; XLA cuts what the kernels leave to the groups and candidates there are.
    "sampled": Limits(9.3, 0.03, 7),
    "sampled, raw": Limits(12.5, 0.04, 8, once=9.3),
    # Two sets of sums; XLA makes the words of tokens without a bias, and puts the others back.
    "sampled, mask, raw": Limits(20.0, 0.04, 9, once=17.0),
    "sampled, bias, raw": Limits(25.0, 0.12, 17, once=21.5),
    # What follows their read: it has no loop over all logits.
    after_read.PATH: Limits(0, 0.01, 2),
}
OF_OPTIONS = ("results", "mask", "bias")
OPTION_SHAPES = (
    Shape(1536, 131_072, 20, "bfloat16"),
    Shape(64, 131_072, 20, "float32"),
    Shape(64, 50_257, 20, "bfloat16"),
)
BIASES = 64
OPTIONS: dict[str, dict[str, Any]] = {
    "--accept": {"action": "store_true", "help": "write the limits of the time"},
    "--only": {"type": int, "default": 1, "metavar": "N", "help": "every N-th shape of a path"},
    "--chip": {"choices": tuple(chips.GPUS), "default": "H100"},
}
OPERATION = re.compile(r"^ *(?:ROOT )?%\S+ = (.+?) ([a-z-]+)\(", re.MULTILINE)
NO_LAUNCH = {"parameter", "constant", "bitcast", "get-tuple-element", "tuple"}
SORT = re.compile(r"= [^=\n]* (?:sort|topk)\(|custom_call_target=\"[^\"]*(?:TopK|topk|sort|Sort)")


@dataclass(frozen=True)
class Result:
    """One compiled call: the path, its shape, its kernels and the whole program's temporaries."""

    path: str
    shape: Shape
    schedule: Schedule
    kernels: tuple[sass.Kernel, ...]
    per_logit: tuple[float, ...]  # instructions in pass 1's main loops, ascending; often one
    temporaries: int  # bytes
    sorts: int  # sort and TopK operations in the compiled program
    launches: int  # kernels, XLA's among them
    estimate: estimates.Estimate

    @property
    def name(self) -> str:
        """The path and the shape."""
        shape = self.shape
        return f"{self.path} R={shape.rows} V={shape.vocabulary} K={shape.k} {shape.dtype}"

    @property
    def share(self) -> float:
        """Temporaries over the logits' bytes."""
        size = self.shape.rows * self.shape.vocabulary * jnp.dtype(self.shape.dtype).itemsize
        return self.temporaries / size


def broken(options: argparse.Namespace) -> int:
    """Compile every shape of the table; returns how many limits are broken."""
    device, chip = compile_target.find(options.chip), model.chip(options.chip)
    seen: dict[tuple[Any, ...], sass.Kernel] = {}
    groups: list[tuple[tuple[Shape, ...], tuple[str, ...]]] = [
        (AOT, ("separate",)),
        (OPTION_SHAPES, OF_OPTIONS),
        (sampled.SHAPES, sampled.PATHS),
        (after_read.SHAPES, (after_read.PATH,)),
    ]
    calls = [
        (path, shape)
        for shapes, paths in groups
        for shape in shapes[:: options.only]
        for path in paths
    ]
    results = []
    for number, (path, shape) in enumerate(calls, 1):
        results.append(measure(path, shape, device, chip, seen))
        print(f"{number} of {len(calls)}: {results[-1].name}", file=sys.stderr, flush=True)
    print_table(results, options.chip)
    modelled = options.chip == "H100"  # the chip of the limits
    if options.accept and modelled:
        estimates.accept({result.name: result.estimate for result in results})
    texts = [
        text for result in results for text in broken_limits(result, chip if modelled else None)
    ]
    for text in texts:
        print(f"BROKEN {text}")
    return len(texts)


def measure(
    path: str,
    shape: Shape,
    device: compile_target.CompileTarget,
    chip: model.Chip,
    seen: dict[tuple[Any, ...], sass.Kernel],
) -> Result:
    """Compile one path at one shape, and read the compiler's output.

    Args:
      path: of `LIMITS`.
      shape: of the logits.
      device: what is compiled for.
      chip: the same, to the model.
      seen: the kernels that this process has compiled; new ones are added.
    """
    compiled = device.compile(lowered(path, shape, device))
    rows, is_after = shape.rows, path == after_read.PATH
    masked, is_sampled = path in ("mask", "bias"), path in sampled.PATHS
    schedule = choose_schedule(rows, shape.vocabulary, shape.k, shape.dtype)
    schedule = sampled.schedule_of(shape) if is_sampled or is_after else schedule
    kind = "mask" if masked else path  # a bias is a mask to the kernels
    # Sampled rows: whether tokens are masked.
    of_pass2 = ("sampled", path in sampled.PATHS[2:]) if is_sampled else (kind,)
    wanted: dict[str, tuple[Any, ...]] = {
        "read_groups": (schedule, rows, kind),
        "finish_rows": (schedule, rows, shape.k, *of_pass2),
    }
    clustered = not is_sampled and cluster_kernel.fits_cluster(schedule)
    if clustered:  # which sums the groups of biased tokens again
        wanted = {"topk_rows": (schedule, rows, shape.k, path)}
    elif path == "bias":
        wanted["biased_groups"] = (shape,)
    if is_after:
        wanted = {"draw": (shape,), "count_larger": (replace(shape, k=0),)}
    for ptx in device.dump.glob("*.ptx"):
        name = next(name for name in wanted if ptx.stem.startswith(name))
        seen[name, *wanted[name]] = sass.read(ptx)
    kernels = tuple(seen[name, *key] for name, key in wanted.items())
    if is_after:
        loops: tuple[float, ...] = ()
        time = after_read.estimate(shape, kernels, chip)
    else:
        more = sampled.bytes_besides(path, schedule) if is_sampled else 0  # of a row, by pass 1
        more += shape.vocabulary // 8 if masked else 0
        loops = tuple(sampled.loops_per_logit(kernels[0], schedule))
        apart = path == "bias" and not clustered
        passes, others = (kernels[:-1], kernels[-1:]) if apart else (kernels, ())
        again = trips.BIASES if path == "bias" and clustered else 0
        time = estimates.estimate(shape, schedule, passes, chip, more, again)
        for kernel in others:
            time = estimates.with_biased(time, shape, kernel, chip)
    text, temporaries = compiled.as_text() or "", compiled.memory_analysis()
    assert temporaries is not None
    return Result(
        path, shape, schedule, kernels, loops, temporaries.temp_size_in_bytes,
        len(SORT.findall(text)), count_launches(text), time,
    )  # fmt: skip


def lowered(path: str, shape: Shape, device: compile_target.CompileTarget) -> Lowered:
    """One path's program at one shape, before it is compiled."""
    if path == after_read.PATH:
        return after_read.lowered(shape, device)
    if path in sampled.PATHS:
        return sampled.lowered(path, shape, device)
    rows = shape.rows
    logits = device.array((rows, shape.vocabulary), shape.dtype)
    ids, count = device.array((rows,), "int32"), device.array((), "int32")
    extra, temperatures = device.array((rows, 2), "int32"), device.array((rows,), "float32")
    every = path == "results"
    wanted = Outputs(shape.k, log_sum_exp=every, entropy=every, top_logits=every)
    words = device.array((rows, -(-shape.vocabulary // 32)), "int32")
    kinds = ("int32", "float32") if path == "bias" else ()
    biases = (device.array((rows, BIASES), dtype) for dtype in kinds)
    changes = Changes(words, *biases) if path in ("mask", "bias") else None
    return program_of(wanted, Rows(logits, ids, ids, count, temperatures, extra, changes))


def program_of(outputs: Outputs, rows: Rows) -> Lowered:
    """A call by the GPU kernels, lowered for CUDA."""
    call = jax.jit(functools.partial(topk_of_whole_rows, outputs))
    with use_implementation("mosaic_gpu"):
        made: Lowered = call.trace(rows).lower(lowering_platforms=("cuda",))
    return made


def count_launches(text: str) -> int:
    """The operations of a compiled program that may be kernels; a loop has none of them."""
    entry = text[text.index("\nENTRY") :]
    return sum(name not in NO_LAUNCH for _, name in OPERATION.findall(entry))


def broken_limits(result: Result, chip: model.Chip | None = None) -> list[str]:
    """A sentence for each limit that is broken; `chip`: those of the model's time on it too."""
    name, limits = result.name, LIMITS[result.path]
    out = []
    for kernel in result.kernels:
        if kernel.spills:
            out.append(f"{name}: {kernel.name} spills {kernel.spills} bytes of registers")
        if kernel.registers > REGISTERS:
            out.append(f"{name}: {kernel.name} uses {kernel.registers} registers > {REGISTERS}")
        if chip and result.shape in CLUSTERED and kernel.registers > OF_CLUSTER:
            out.append(f"{name}: {kernel.name} uses {kernel.registers} registers > {OF_CLUSTER}")
    # A program that reads a single step has no loop.
    looped = result.schedule.num_steps > result.schedule.splits
    counts = [limits.per_logit] if limits.once is None else [limits.once, limits.per_logit]
    counts = counts if limits.per_logit and chip else []
    if looped and counts and len(result.per_logit) != len(counts):
        out.append(f"{name}: pass 1 has {len(result.per_logit)} main loops, not {len(counts)}")
    for found, most in zip(result.per_logit, counts, strict=False):
        if found > most:
            out.append(f"{name}: {found} instructions per logit > {most}")
    if result.share > limits.temporaries:
        share = f"{result.share:.1%} of the logits > {limits.temporaries:.0%}"
        out.append(f"{name}: temporaries {share}")
    if result.launches > limits.launches:
        out.append(f"{name}: {result.launches} kernels are launched > {limits.launches}")
    sorts = "mask", "bias", sampled.PATHS[3]  # a few numbers a row
    if result.sorts and result.path not in sorts:
        out.append(f"{name}: the compiled program has {result.sorts} sort or TopK operations")
    if chip:
        missed = estimates.slower(name, result.estimate)
        if result.path == "separate":
            missed += estimates.missed(result.shape, result.estimate, chip)
        out += [f"{name}: {text}" for text in missed]
    return out


def print_table(results: list[Result], chip: str) -> None:
    """Print a line for each compiled program."""
    made = f"Compiled for {chip} with jax {jax.__version__}"
    title = f"{made}. Microseconds: a model's, not measured"
    table = Table(title=title, title_justify="left")
    for column in ("path", "R", "V", "K", "dtype", "group", "splits"):
        table.add_column(column)
    numbers = "registers", "spills", "instr / logit", "temporaries", "launches"
    for column in (*numbers, "us, a bound", "us, all of it by events"):
        table.add_column(column, justify="right")
    for r in results:
        table.add_row(
            r.path,
            *map(str, (r.shape.rows, r.shape.vocabulary, r.shape.k, r.shape.dtype)),
            *map(str, (r.schedule.part_width, r.schedule.splits)),
            " + ".join(str(kernel.registers) for kernel in r.kernels),
            str(sum(kernel.spills for kernel in r.kernels)),
            ", ".join(f"{count:.2f}" for count in r.per_logit) or "no loop",
            f"{r.share:.2%}",
            str(r.launches),
            f"{r.estimate.pass1.total * 1e6:.1f} + {r.estimate.pass2.total * 1e6:.1f}",
            f"{r.estimate.total * 1e6:.1f}",
        )
    Console(width=140).print(table)
