"""`linear_topk_logprobs` on a CPU, beside the product alone and beside logits first.

The limits: at most 1.15 times the product's time plus that of `topk_logprobs` of its logits, and
at most 5 % more than both in one program. From 1024 rows on, temporaries of at most 5 % of the
float32 logits. The results are compared first.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.timing import Comparison, Target, compare
from pallas_kernels import linear_topk_logprobs, topk_logprobs

PLAIN, BARE, TOPK, OURS = "logits, then topk_logprobs", "the product", "topk_logprobs", "linear"
OVER_PARTS, OVER_PLAIN, SHARE = 1.15, 1.05, 0.05
MANY_ROWS = 1024


@dataclass(frozen=True)
class Shape:
    """Rows N, hidden size H, vocabulary V, top K; the dtype of hidden, head and logits."""

    rows: int
    hidden: int
    vocabulary: int
    k: int
    dtype: str


GRID = tuple(
    Shape(rows, hidden, vocabulary, k, dtype)
    for hidden in (1024, 4096)
    for vocabulary in (32_000, 151_936)
    for rows in (64, 1024)
    for k in (0, 20, 256)
    for dtype in ("float32", "bfloat16")
)


def run(quick: bool) -> list[Comparison]:
    """Measure every shape of the grid; `quick` takes the smaller sizes."""
    small = [s for s in GRID if s.hidden == 1024 and s.vocabulary == 32_000]
    # Few rows take so little that the fastest of three rounds says how busy the machine was.
    rounds = {rows: 3 if rows >= MANY_ROWS else 7 for rows in (64, 1024)}
    return [measure(shape, rounds[shape.rows]) for shape in (small if quick else GRID)]


def measure(shape: Shape, rounds: int) -> Comparison:
    """Compare the ways on the same arrays."""
    hidden, head, ids = arrays_of(replace(shape, k=0))
    product = jax.jit(lambda hidden, head: logits_of(hidden, head, shape.dtype))
    logits = product(hidden, head)
    ours = jax.jit(
        lambda hidden, head, ids: linear_topk_logprobs(
            hidden, head, ids, shape.k, logits_dtype=shape.dtype
        )
    )
    plain = jax.jit(
        lambda hidden, head, ids: topk_logprobs(
            logits_of(hidden, head, shape.dtype), ids, shape.k, implementation="xla"
        )
    )
    topk = jax.jit(lambda x, ids: topk_logprobs(x, ids, shape.k, implementation="xla"))

    def bind(program: Callable[..., Any], *arrays: jax.Array) -> Callable[[], Any]:
        return lambda: jax.block_until_ready(program(*arrays))  # type: ignore[no-untyped-call]

    found = compare(
        f"linear_topk_logprobs N={shape.rows} H={shape.hidden} V={shape.vocabulary} K={shape.k} "
        f"{shape.dtype}",
        {
            PLAIN: bind(plain, hidden, head, ids),
            OURS: bind(ours, hidden, head, ids),
            BARE: bind(product, hidden, head),
            TOPK: bind(topk, logits, ids),
        },
        check=lambda name, expected, actual: check(name, np.asarray(logits), expected, actual),
        rounds=rounds,
        min_seconds=0.005,
        settings={"shape": str(shape), "device": jax.devices()[0].device_kind},
    )
    memory: Any = ours.lower(hidden, head, ids).compile().memory_analysis()
    share = memory.temp_size_in_bytes / (4 * shape.rows * shape.vocabulary)
    figures = {OURS: {"temporaries, % of float32 logits": 100 * share}}
    return replace(found, targets=targets_of(found, shape, share), figures=figures)


@functools.lru_cache(maxsize=2)  # a large head takes longer to draw than to multiply
def arrays_of(shape: Shape) -> tuple[jax.Array, jax.Array, jax.Array]:
    """hidden [N, H], head [V, H] and ids [N], random; logits have a standard deviation of 3."""
    rng = np.random.default_rng(0)

    def random(rows: int, scale: float) -> jax.Array:
        x = rng.standard_normal((rows, shape.hidden), dtype=np.float32)
        return jnp.asarray(x * np.float32(scale), shape.dtype)

    hidden, head = random(shape.rows, 1), random(shape.vocabulary, 3 / shape.hidden**0.5)
    return hidden, head, jnp.asarray(rng.integers(0, shape.vocabulary, shape.rows), jnp.int32)


def logits_of(hidden: jax.Array, head: jax.Array, dtype: str) -> jax.Array:
    """The product [N, V], accumulated in float32 and rounded to `dtype`."""
    axes = (((1,), (1,)), ((), ()))
    found = jax.lax.dot_general(hidden, head, axes, preferred_element_type=jnp.float32)
    return found.astype(dtype)


def check(name: str, logits: np.ndarray, expected: Any, actual: Any) -> None:
    """Ids and token ranks equal but for near-ties of the logits, logprobs close."""
    if name == BARE:
        return
    there, here = (
        np.take_along_axis(logits, np.asarray(found.token_ids), axis=1).astype(np.float64)
        for found in (expected, actual)
    )
    np.testing.assert_allclose(here, there, rtol=2**-7 if logits.dtype != np.float32 else 1e-5)
    np.testing.assert_allclose(actual.logprobs, expected.logprobs, atol=1e-1, rtol=2**-7)
    differ = np.count_nonzero(np.asarray(actual.token_ranks) != np.asarray(expected.token_ranks))
    assert differ <= 0.02 * len(actual.token_ranks), f"{differ} token ranks differ"


def targets_of(found: Comparison, shape: Shape, share: float) -> tuple[Target, ...]:
    """The limits of one shape, by the fastest rounds: a median says how busy the machine was."""
    fastest = {one.name: min(one.rounds) for one in found.timings}
    parts = fastest[OURS] / (fastest[BARE] + fastest[TOPK])
    targets = [
        Target(f"time over {BARE} and {TOPK}", OVER_PARTS, parts, "x"),
        Target(f"time over {PLAIN}", OVER_PLAIN, fastest[OURS] / fastest[PLAIN], "x"),
    ]
    if shape.rows >= MANY_ROWS:
        targets.append(Target("temporaries of the float32 logits", 100 * SHARE, 100 * share, "%"))
    return tuple(targets)
