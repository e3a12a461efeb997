"""Benchmark of `topk_logprobs`: against the plain way, and on a GPU against its memory's speed.

A program under test runs several calls on different buffers, so that on a GPU neither Python nor
the L2 cache is measured: the time is the program's over its calls. On a GPU a copy and `floor`, a
plain maximum over the rows at the same split, run in the same rounds.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import floor, reference
from bench.timing import Comparison, compare, print_table
from pallas_kernels import greedy_topk_logprobs, implementations, topk_logprobs
from pallas_kernels.mosaic_tiling import choose_tiling
from pallas_kernels.shapes import CPU_SPEED, GPU, Shape

Program = Callable[[jax.Array, jax.Array], Any]

ROTATED_BYTES = 128 << 20  # more than twice an H100's L2 cache
MAX_CALLS = 64
CPU_SHAPES = (
    CPU_SPEED,
    Shape(64, 131_072, 20, "bfloat16"),
    Shape(64, 50_257, 5, "float32"),
    Shape(24, 257, 20, "float32"),
)


def run(quick: bool) -> list[Comparison]:
    """Every shape of this machine's table; `quick` takes a few of them."""
    if implementations.cuda_capability() is None:
        return [measure(shape, calls=1) for shape in (CPU_SHAPES[:2] if quick else CPU_SHAPES)]
    shapes = [s for s in GPU if not quick or (s.rows in (64, 1536) and s.k in (0, 20))]
    return [measure(shape, calls=num_calls(shape)) for shape in shapes]


def measure(shape: Shape, calls: int, rounds: int = 7) -> Comparison:
    """All contenders on the same arrays; equal results first."""
    rng = np.random.default_rng(0)
    logits = [random_logits(shape, seed) for seed in range(calls)]
    token_ids = jnp.asarray(rng.integers(0, shape.vocabulary, shape.rows), jnp.int32)
    programs = contenders(shape)

    def bind(program: Program) -> Callable[[], Any]:
        compiled = jax.jit(lambda arrays, ids: [program(x, ids) for x in arrays])
        return lambda: jax.block_until_ready(compiled(logits, token_ids))  # type: ignore[no-untyped-call]

    comparison = compare(
        f"topk_logprobs R={shape.rows} V={shape.vocabulary} K={shape.k} {shape.dtype}",
        {name: bind(program) for name, program in programs.items()},
        check=check,
        rounds=rounds,
        settings={"shape": str(shape), "calls": calls, "device": jax.devices()[0].device_kind},
    )
    return with_notes(comparison, shape, calls)


def contenders(shape: Shape) -> dict[str, Program]:
    """The plain way first: the baseline."""
    programs: dict[str, Program] = {
        "log_softmax + top_k": lambda x, ids: reference.topk_logprobs(x, ids, shape.k),
        "xla": lambda x, ids: topk_logprobs(x, ids, shape.k, implementation="xla"),
    }
    capability = implementations.cuda_capability()
    logits = jax.ShapeDtypeStruct((shape.rows, shape.vocabulary), shape.dtype)  # type: ignore[no-untyped-call]
    if implementations.cannot_run(logits, capability) is None:
        programs["mosaic_gpu"] = lambda x, ids: topk_logprobs(
            x, ids, shape.k, implementation="mosaic_gpu"
        )
        programs["mosaic_gpu, fused greedy"] = lambda x, ids: greedy_topk_logprobs(
            x, shape.k, implementation="mosaic_gpu"
        )
        tiling = choose_tiling(shape.rows, shape.vocabulary, shape.k, shape.dtype)
        programs["max only"] = lambda x, ids: floor.row_maxima(tiling, x)
        programs["copy"] = lambda x, ids: -x
    return programs


def check(name: str, expected: Any, actual: Any) -> None:
    """Equal ids and ranks, close logprobs; the fused path answers for other tokens."""
    if name in ("max only", "copy"):
        return
    first = 1 if "fused" in name else 0
    for want, got in zip(expected, actual, strict=True):
        np.testing.assert_array_equal(got.token_ids[:, first:], want.token_ids[:, first:])
        np.testing.assert_allclose(
            got.logprobs[:, first:], want.logprobs[:, first:], rtol=1e-6, atol=3e-5
        )
        if not first:
            np.testing.assert_array_equal(got.token_ranks, want.token_ranks)


def with_notes(comparison: Comparison, shape: Shape, calls: int) -> Comparison:
    """Speed-up over the plain way; on a GPU also bytes over time, read plus written."""
    size = shape.rows * shape.vocabulary * jnp.dtype(shape.dtype).itemsize * calls
    notes = {}
    for timing in comparison.timings[1:]:
        moved = size * (2 if timing.name == "copy" else 1)
        notes[timing.name] = (
            f"{1 / timing.ratio:.2f}x the speed of {comparison.timings[0].name}, "
            f"{moved / timing.median / 1e9:.0f} GB/s of logits"
        )
    return Comparison(comparison.title, comparison.settings, comparison.timings, notes)


def random_logits(shape: Shape, seed: int) -> jax.Array:
    """[R, V] in steps of 1/64, made on the device.

    The plain way orders logprobs, and `log_softmax` rounds: logits closer than that would tie there
    and not here. Logits that are equal tie in both.
    """
    normal = jax.random.normal(jax.random.key(seed), (shape.rows, shape.vocabulary))
    return (jnp.round(256 * normal) / 64).astype(shape.dtype)


def num_calls(shape: Shape) -> int:
    """Calls per program, so that their buffers exceed the L2 cache."""
    size = shape.rows * shape.vocabulary * jnp.dtype(shape.dtype).itemsize
    return min(MAX_CALLS, max(2, -(-ROTATED_BYTES // size)))


if __name__ == "__main__":
    print_table(run(quick="--quick" in sys.argv))
