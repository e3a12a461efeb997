"""The kernels' answers at real sizes, against XLA on every row and the oracle on some."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.gpu.contenders import random_logits
from pallas_kernels import TopkLogprobs
from pallas_kernels.backends import read
from pallas_kernels.backends.mosaic_gpu import rows as run
from pallas_kernels.backends.mosaic_gpu.schedule import choose_schedule
from pallas_kernels.contract.types import Outputs, Rows
from pallas_kernels.testing import oracle
from pallas_kernels.testing.shapes import VOCABULARIES, Shape

ORACLE_ROWS = 4
LOGITS_AT_MOST = 1 << 28
DTYPES = ("bfloat16", "float16", "float32")

REAL = tuple(
    Shape(rows, vocabulary, k, dtype)
    for (rows, k), vocabulary, dtype in itertools.product(
        ((1, 128), (4, 20), (64, 0), (256, 5), (2048, 20)), VOCABULARIES.values(), DTYPES
    )
    if rows * vocabulary <= LOGITS_AT_MOST
)
REHEARSED = (Shape(2, 4352, 2, "bfloat16"), Shape(2, 4097, 1, "float32"))
EDGES = tuple(Shape(0, v, 20, d) for v in VOCABULARIES.values() for d in DTYPES)
REHEARSED_EDGES = (Shape(0, 2050, 3, "bfloat16"),)
SMALL = tuple(Shape(9, v, k, d) for v in (2048, 4100, 5001) for k in (1, 40) for d in DTYPES)
REHEARSED_SMALL = (Shape(3, 2049, 2, "float16"),)
SEEDS = 10  # calls of each compiled program, with other values

Call = Callable[..., TopkLogprobs]
Check = Callable[[], None]


def everything(small: bool = False) -> Iterator[tuple[str, Check]]:
    """All checks by name; in a rehearsal a few small ones.

    A check raises AssertionError if an answer is wrong.
    """
    for shape in REHEARSED if small else REAL:
        yield f"equal to XLA and the oracle: {shape}", partial(check_shape, shape)
    for shape in REHEARSED_EDGES if small else EDGES:
        name = f"every edge: V={shape.vocabulary} {shape.dtype}"
        yield name, partial(check_edges, shape)
    for shape in REHEARSED_SMALL if small else SMALL:
        seeds = 1 if small else SEEDS
        yield f"arbitrary values: {shape}", partial(check_values, shape, seeds)


def separate_path(k: int) -> Call:
    """A jitted call of logits, token_ids, row_ids, num_rows, temperatures, extra_token_ids."""

    outputs = Outputs(k)

    def call(x: Any, ids: Any, rows: Any, num: Any, temperatures: Any, extra: Any) -> TopkLogprobs:
        given = Rows(x, ids, rows, num, temperatures, extra)
        return run.topk_logprobs(given, outputs)

    return jax.jit(call)


def fused_path(k: int) -> Call:
    """A jitted call of logits, num_rows, temperatures, extra_token_ids."""

    outputs = Outputs(k)

    def call(x: Any, num: Any, temperatures: Any, extra: Any) -> TopkLogprobs:
        given = Rows(x, None, None, num, temperatures, extra)
        return run.topk_logprobs(given, outputs)

    return jax.jit(call)


def options(shape: Shape, rng: np.random.Generator) -> tuple[jax.Array, ...]:
    """Random row_ids, num_rows, temperatures and extra_token_ids."""
    rows = shape.rows
    return (
        jnp.asarray(rng.permutation(rows), jnp.int32),
        jnp.int32(max(1, rows - 1)),
        jnp.asarray(rng.choice([0, 0.7, 1, 2], rows), jnp.float32),
        jnp.asarray(rng.integers(-1, shape.vocabulary + 1, (rows, 3)), jnp.int32),
    )


def check_shape(shape: Shape) -> None:
    """Check both paths against XLA on all rows and the oracle on a few."""
    x = random_logits(shape, seed=shape.vocabulary)
    rng = np.random.default_rng(shape.rows)
    token_ids = jnp.asarray(rng.integers(0, shape.vocabulary, shape.rows), jnp.int32)
    row_ids, num_rows, temperatures, extra = options(shape, rng)
    rest = (row_ids, num_rows, temperatures, extra)
    actual = separate_path(shape.k)(x, token_ids, *rest)
    by_xla = jax.jit(partial(read.topk_logprobs, "xla", Outputs(shape.k)))
    compare(actual, by_xla(Rows(x, token_ids, *rest)))
    few = slice(0, ORACLE_ROWS)
    oracle.assert_matches(
        jax.tree.map(lambda part: part[few], actual),
        oracle.topk_logprobs(
            np.asarray(x[row_ids[few]]),
            np.asarray(token_ids[few]),
            shape.k,
            num_rows=int(num_rows),
            temperatures=np.asarray(temperatures[few]),
            extra_token_ids=np.asarray(extra[few]),
        ),
    )
    compare(
        fused_path(shape.k)(x, num_rows, temperatures, extra),
        by_xla(Rows(x, None, None, num_rows, temperatures, extra)),
    )


def check_edges(shape: Shape) -> None:
    """Check rows that hold every edge of the contract, at a real vocabulary."""
    width = choose_schedule(7, shape.vocabulary, shape.k, shape.dtype).group_width
    x = oracle.edge_rows(shape.vocabulary, shape.dtype, width)
    token_ids = np.arange(len(x), dtype=np.int32) * width % shape.vocabulary
    check_against_oracle(replace(shape, rows=len(x)), x, token_ids)


def check_values(shape: Shape, seeds: int) -> None:
    """Check logits drawn from few values, where ties, edges and invalid rows are common."""
    values = ([0.5, -0.0, 0.0, -2], [3, -3, -np.inf], [-np.inf, 1, 1e4], [0, 1, np.nan])
    calls = separate_path(shape.k), fused_path(shape.k)
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        x = rng.choice(np.array(values[seed % len(values)]), size=(shape.rows, shape.vocabulary))
        if seed % 4 == 3:  # otherwise every row would have a NaN
            x = np.where(np.isnan(x) & (rng.random(x.shape) > 1e-4), 0, x)
        token_ids = rng.integers(-1, shape.vocabulary + 1, shape.rows).astype(np.int32)
        x = x.astype(jnp.dtype(shape.dtype))
        check_against_oracle(shape, x, token_ids, calls)


def check_against_oracle(
    shape: Shape,
    x: Any,
    token_ids: Any,
    calls: tuple[Call, Call] | None = None,
) -> None:
    """Check both paths on all rows of x [R, V]."""
    separate, fused = calls or (separate_path(shape.k), fused_path(shape.k))
    row_ids, num_rows, temperatures, extra = options(shape, np.random.default_rng(0))
    named: dict[str, Any] = {
        "num_rows": num_rows,
        "temperatures": np.asarray(temperatures),
        "extra_token_ids": np.asarray(extra),
    }
    given = jnp.asarray(x), jnp.asarray(token_ids)
    actual = separate(*given, row_ids, num_rows, temperatures, extra)
    expected = oracle.topk_logprobs(x, token_ids, shape.k, row_ids=np.asarray(row_ids), **named)
    oracle.assert_matches(actual, expected)
    greedy = [oracle.greedy_token_id(row) for row in x]
    fused_actual = fused(given[0], num_rows, temperatures, extra)
    oracle.assert_matches(fused_actual, oracle.topk_logprobs(x, greedy, shape.k, **named))


def compare(actual: TopkLogprobs, expected: TopkLogprobs) -> None:
    """Check that ids and ranks are equal, and logprobs within twice the bound: both may err."""
    np.testing.assert_array_equal(actual.token_ids, expected.token_ids)
    np.testing.assert_array_equal(actual.token_ranks, expected.token_ranks)
    for part in ("logprobs", "extra_logprobs"):
        np.testing.assert_allclose(
            getattr(actual, part),
            getattr(expected, part),
            rtol=2 * oracle.RELATIVE_ERROR,
            atol=2 * oracle.ABSOLUTE_ERROR,
        )
