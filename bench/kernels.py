"""`topk_logprobs` on a CPU beside two other ways; `jax-specdec check-device` has GPUs and TPUs.

The plain way and logsumexp with `top_k` compute the same ids, logprobs and token ranks; the results
are compared first. The limits: at most 5 % slower than the better of them, and twice the plain
way's speed where R >= 64 and K >= 5.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from bench.timing import BenchError, Comparison, Target, compare
from pallas_kernels import TopkLogprobs, topk_logprobs
from pallas_kernels.testing import checks, times
from pallas_kernels.testing import plain as reference
from pallas_kernels.testing.shapes import CPU_GRID, CPU_SPEED, Shape
from pallas_kernels.testing.times import PLAIN

LOGSUMEXP = "logsumexp + top_k"
OURS = "xla"
SHARE_OF_BEST = 1 / 1.05
OVER_PLAIN = 2.0
QUICK = (
    CPU_SPEED,
    replace(CPU_SPEED, dtype="bfloat16"),
    *(replace(CPU_SPEED, k=k) for k in (0, 128)),
)
SHAPES = tuple(dict.fromkeys((*QUICK, *CPU_GRID)))


def run(quick: bool) -> list[Comparison]:
    """Measure the whole grid of shapes, or a few of them."""
    if jax.default_backend() != "cpu":
        raise BenchError("this suite is for a CPU: run `jax-specdec check-device` here")
    return [measure(shape) for shape in (QUICK if quick else SHAPES)]


def measure(shape: Shape, rounds: int | None = None) -> Comparison:
    """Compare the three ways on the same arrays, in 45 rounds, or 7 where there are many rows."""
    logits, token_ids = checks.random_logits(shape, seed=0), checks.random_ids(shape)

    def bind(program: Callable[..., TopkLogprobs]) -> Callable[[], Any]:
        compiled = jax.jit(lambda x, t: program(x, t, shape.k))
        return lambda: jax.block_until_ready(compiled(logits, token_ids))

    found = compare(
        f"topk_logprobs R={shape.rows} V={shape.vocabulary} K={shape.k} {shape.dtype}",
        {
            PLAIN: bind(reference.topk_logprobs),
            LOGSUMEXP: bind(by_logsumexp),
            OURS: bind(lambda x, t, k: topk_logprobs(x, t, k, implementation="xla")),
        },
        check=times.check_answers,
        rounds=rounds or (45 if shape.rows <= 8 else 7),
        min_seconds=0.005,  # short turns: other programs interrupt few of them
        settings={"shape": str(shape), "device": jax.devices()[0].device_kind},
    )
    return replace(found, targets=targets_of(found, shape))


def targets_of(found: Comparison, shape: Shape) -> tuple[Target, ...]:
    """The limits of one shape.

    By the fastest rounds: on a machine that others use too, a median says how busy it was.
    """
    fastest = {one.name: min(one.rounds) for one in found.timings}
    best = min(fastest[name] for name in (PLAIN, LOGSUMEXP)) / fastest[OURS]
    targets = [Target("speed over the best of the others", SHARE_OF_BEST, best, "x", at_least=True)]
    if shape.rows >= 64 and shape.k >= 5:
        over = fastest[PLAIN] / fastest[OURS]
        targets.append(Target(f"speed over {PLAIN}", OVER_PLAIN, over, "x", at_least=True))
    return tuple(targets)


def by_logsumexp(logits: jax.Array, token_ids: jax.Array, k: int) -> TopkLogprobs:
    """Only the named logits are normalized; [R, V], [R] -> [R, K + 1] and [R]."""
    x = logits.astype(jnp.float32)
    selected = jnp.take_along_axis(x, token_ids[:, None], axis=1)
    ids, values = token_ids[:, None], selected
    if k > 0:
        top_values, top_ids = lax.top_k(x, k)
        ids = jnp.concatenate([ids, top_ids], axis=1)
        values = jnp.concatenate([values, top_values], axis=1)
    return TopkLogprobs(
        token_ids=ids,
        logprobs=values - jax.nn.logsumexp(x, axis=1)[:, None],
        token_ranks=1 + jnp.sum(x > selected, axis=1, dtype=jnp.int32),
        extra_logprobs=jnp.zeros((x.shape[0], 0), jnp.float32),
    )
