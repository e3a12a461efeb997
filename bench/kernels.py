"""Benchmark of `topk_logprobs` on a CPU; `jax-specdec check-device` measures a GPU or TPU.

The peers are the plain way and a copy. K, the batch and the vocabulary change one at a
time: a whole grid of shapes would take far longer than a minute.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from bench.timing import BenchError, Comparison, Target, compare
from pallas_kernels import topk_logprobs
from pallas_kernels.testing import checks, times
from pallas_kernels.testing import plain as reference
from pallas_kernels.testing.shapes import CPU_SPEED, VOCABULARIES, Shape
from pallas_kernels.testing.times import COPY, PLAIN

QUICK = (
    CPU_SPEED,
    replace(CPU_SPEED, dtype="bfloat16"),
    *(replace(CPU_SPEED, k=k) for k in (0, 128)),  # three make a line against K
)
# Two vocabularies of nearly one size would be one point of a plot.
APART = [size for name, size in VOCABULARIES.items() if name != "Llama 3"]
SHAPES = tuple(
    dict.fromkeys(
        (
            *QUICK,
            Shape(64, 50_257, 5, "float32"),
            Shape(24, 257, 20, "float32"),
            *(replace(CPU_SPEED, k=k) for k in (0, 1, 5, 20, 64, 128)),
            *(replace(CPU_SPEED, rows=rows) for rows in (1, 4, 16, 64, 256)),
            *(replace(CPU_SPEED, vocabulary=vocabulary) for vocabulary in APART),
        )
    )
)


def run(quick: bool) -> list[Comparison]:
    """Measure every shape of this machine's table; `quick` takes a few of them."""
    if jax.default_backend() != "cpu":
        raise BenchError("this suite is for a CPU: run `jax-specdec check-device` here")
    copy = measure_copy()
    found = [measure(shape) for shape in (QUICK if quick else SHAPES)]
    return [copy, *(beside(one, copy.figures[COPY]["GB/s"]) for one in found)]


def measure(shape: Shape, rounds: int = 7) -> Comparison:
    """Compare the plain way with the XLA implementation on the same arrays."""
    logits = checks.random_logits(shape, seed=0)
    token_ids = checks.random_ids(shape)

    def bind(program: Callable[[jax.Array, jax.Array], Any]) -> Callable[[], Any]:
        compiled = jax.jit(program)
        return lambda: jax.block_until_ready(compiled(logits, token_ids))  # type: ignore[no-untyped-call]

    found = compare(
        f"topk_logprobs R={shape.rows} V={shape.vocabulary} K={shape.k} {shape.dtype}",
        {
            PLAIN: bind(lambda x, t: reference.topk_logprobs(x, t, shape.k)),
            "xla": bind(lambda x, t: topk_logprobs(x, t, shape.k, implementation="xla")),
        },
        check=times.check,
        rounds=rounds,
        settings={
            "shape": str(shape), "bytes": logits.nbytes, "device": jax.devices()[0].device_kind,
        },
    )  # fmt: skip
    targets = targets_of(found) if shape == CPU_SPEED else ()
    return replace(found, suite="kernels", targets=targets)


def targets_of(found: Comparison) -> tuple[Target, ...]:
    """The project's promise for `CPU_SPEED` on a CPU."""
    return (Target(f"speed over {PLAIN}", 2, found.speedup("xla", PLAIN), "x", at_least=True),)


def measure_copy() -> Comparison:
    """Measure the memory's bandwidth by a copy of the logits of `CPU_SPEED`."""
    x = checks.random_logits(CPU_SPEED, seed=0)
    copy = jax.jit(lambda x: -x)
    found = compare(
        f"copy of {x.nbytes >> 20} MiB",
        {COPY: lambda: jax.block_until_ready(copy(x))},  # type: ignore[no-untyped-call]
        check=None,
        settings={"device": jax.devices()[0].device_kind},
    )
    figures = {COPY: {"GB/s": 2 * x.nbytes / found[COPY].median / 1e9}}  # read and written
    return replace(found, suite="kernels", figures=figures)


def beside(one: Comparison, bandwidth: float) -> Comparison:
    """The comparison with the GB/s of logits that each contender reads, and its share of a copy."""
    figures = {}
    for timing in one.timings:
        speed = one.settings["bytes"] / timing.median / 1e9
        figures[timing.name] = {"GB/s": speed, "% of a copy": 100 * speed / bandwidth}
    return replace(one, figures=figures)
