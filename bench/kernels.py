"""Benchmark of `topk_logprobs`: on a CPU against the plain way, on a GPU see `gpu_kernels`."""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import gpu_contenders, gpu_kernels, reference
from bench.timing import Comparison, compare, print_table
from pallas_kernels import implementations, topk_logprobs
from pallas_kernels.shapes import CPU_SPEED, GPU, Shape

CPU_SHAPES = (
    CPU_SPEED,
    Shape(64, 131_072, 20, "bfloat16"),
    Shape(64, 50_257, 5, "float32"),
    Shape(24, 257, 20, "float32"),
)


def run(quick: bool) -> list[Comparison]:
    """Every shape of this machine's table; `quick` takes a few of them."""
    if implementations.cuda_capability() is None:
        return [measure(shape) for shape in (CPU_SHAPES[:2] if quick else CPU_SHAPES)]
    shapes = [s for s in GPU if not quick or (s.rows in (64, 1536) and s.k in (0, 20))]
    return gpu_kernels.run(shapes)


def measure(shape: Shape, rounds: int = 7) -> Comparison:
    """The plain way and the XLA implementation on the same arrays; equal results first."""
    logits = gpu_contenders.random_logits(shape, seed=0)
    token_ids = gpu_contenders.random_ids(shape)

    def bind(program: Callable[[jax.Array, jax.Array], Any]) -> Callable[[], Any]:
        compiled = jax.jit(program)
        return lambda: jax.block_until_ready(compiled(logits, token_ids))  # type: ignore[no-untyped-call]

    comparison = compare(
        f"topk_logprobs R={shape.rows} V={shape.vocabulary} K={shape.k} {shape.dtype}",
        {
            "log_softmax + top_k": bind(lambda x, t: reference.topk_logprobs(x, t, shape.k)),
            "xla": bind(lambda x, t: topk_logprobs(x, t, shape.k, implementation="xla")),
        },
        check=check,
        rounds=rounds,
        settings={"shape": str(shape), "device": jax.devices()[0].device_kind},
    )
    size = logits.size * jnp.dtype(shape.dtype).itemsize
    speedup = comparison.speedup("xla", "log_softmax + top_k")
    note = f"{speedup:.2f}x the speed, {size / comparison['xla'].median / 1e9:.0f} GB/s of logits"
    return Comparison(
        comparison.title, comparison.settings, comparison.timings, {"xla": note}, "kernels"
    )


def check(_: str, expected: Any, actual: Any) -> None:
    """Equal ids and ranks, close logprobs."""
    np.testing.assert_array_equal(actual.token_ids, expected.token_ids)
    np.testing.assert_array_equal(actual.token_ranks, expected.token_ranks)
    np.testing.assert_allclose(actual.logprobs, expected.logprobs, rtol=1e-6, atol=3e-5)


if __name__ == "__main__":
    print_table(run(quick="--quick" in sys.argv))
