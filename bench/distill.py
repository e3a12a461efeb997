"""Distillation from a teacher's support: value and gradients, beside two recipes in plain JAX.

The recipes are what trainers have: whole logits, their log_softmax, the support's entries gathered.
One finds the rest as 1 minus the support's probabilities, the other as the sum of the others.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.timing import Comparison, Target, compare
from pallas_kernels import linear_support_kl
from pallas_kernels.linear.schedule import FEW_BYTES

OURS, DIFFERENCE, SUM = "linear_support_kl", "log_softmax, 1 - sum", "log_softmax, masked sum"
CASES = ((256, 32_000, 64), (1024, 32_000, 64), (256, 151_936, 64))  # R, V, C
HIDDEN = 576  # as SmolLM2-135M's
MAX_MEMORY = 0.05  # of the recipes' temporaries, where logits are more than `FEW_BYTES`


def run(quick: bool = False) -> Iterator[Comparison]:
    """Every case; `quick`: the smallest."""
    for rows, vocab, count in CASES[:1] if quick else CASES:
        arrays = case(rows, vocab, count)
        programs = {
            name: jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*arrays).compile()
            for name, loss in {OURS: ours, DIFFERENCE: by_difference, SUM: by_sum}.items()
        }
        title = f"support KL and gradients R={rows} V={vocab} C={count} H={HIDDEN} float32"
        calls = {name: called(program, arrays) for name, program in programs.items()}
        found = compare(title, calls, check=same, rounds=5)
        temporaries = {name: temporaries_of(program) for name, program in programs.items()}
        share = temporaries[OURS] / min(temporaries[DIFFERENCE], temporaries[SUM])
        figures = {name: {"MB of temporaries": mb} for name, mb in temporaries.items()}
        target = Target("temporaries over the recipes'", MAX_MEMORY, share, "x")
        targets = (target,) if 4 * rows * vocab > FEW_BYTES else ()
        print(f"{title}: {share:.3f}x of the temporaries", file=sys.stderr, flush=True)
        yield replace(found, figures=figures, targets=targets)


def temporaries_of(program: Any) -> float:
    """MB that a compiled program takes beside its arguments and results."""
    return float(program.memory_analysis().temp_size_in_bytes / 1e6)


def case(rows: int, vocab: int, count: int) -> tuple[jax.Array, ...]:
    """A student beside a teacher whose likeliest tokens are known."""
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(rows, HIDDEN)).astype(np.float32)
    head = (rng.normal(size=(vocab, HIDDEN)) * HIDDEN**-0.5).astype(np.float32)
    ids = np.stack([rng.permutation(vocab)[:count] for _ in range(rows)]).astype(np.int32)
    teacher = rng.normal(size=(rows, count)).astype(np.float32) * 2
    teacher += np.log(0.95) - np.logaddexp.reduce(teacher, axis=1, keepdims=True)
    return tuple(map(jnp.asarray, (hidden, head, ids, teacher)))


def ours(hidden: jax.Array, head: jax.Array, ids: jax.Array, teacher: jax.Array) -> jax.Array:
    """The forward divergence, its mean over the rows."""
    return linear_support_kl(hidden, head, ids, teacher).mean()


def _forward(teacher: jax.Array, lq: jax.Array, rest: jax.Array) -> jax.Array:
    mass = jnp.exp(teacher)
    left = 1 - mass.sum(axis=1)
    terms = jnp.sum(mass * (teacher - lq), axis=1) + left * (jnp.log(left) - rest)
    return terms.mean()


def by_difference(
    hidden: jax.Array, head: jax.Array, ids: jax.Array, teacher: jax.Array
) -> jax.Array:
    """The same from whole logits; the student's rest is 1 minus its support."""
    lq = jnp.take_along_axis(jax.nn.log_softmax(hidden @ head.T), ids, axis=1)
    return _forward(teacher, lq, jnp.log1p(-jnp.exp(lq).sum(axis=1)))


def by_sum(hidden: jax.Array, head: jax.Array, ids: jax.Array, teacher: jax.Array) -> jax.Array:
    """The same from whole logits; the student's rest is the sum of the other tokens."""
    logprobs = jax.nn.log_softmax(hidden @ head.T)
    lq = jnp.take_along_axis(logprobs, ids, axis=1)
    row = jnp.arange(len(ids))[:, None]
    rest = jax.nn.logsumexp(logprobs.at[row, ids].set(-jnp.inf), axis=1)
    return _forward(teacher, lq, rest)


def called(program: Callable[..., Any], arrays: tuple[jax.Array, ...]) -> Callable[[], Any]:
    """The program on these arrays, to its end."""
    return lambda: jax.block_until_ready(program(*arrays))


def same(name: str, expected: Any, actual: Any) -> None:
    """Refuse another loss, or other gradients."""
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        size = float(jnp.abs(one).max())
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=2e-5 * size, err_msg=name)
