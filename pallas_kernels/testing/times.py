"""Times of calls on a device, beside XLA: many calls in one compiled program, so that no host clock
need see 20 us.

A program calls again and again, on as many buffers in turn as no cache holds; each call depends on
all results of the one before. Results are compared before anything is timed.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import TopkLogprobs, greedy_topk_logprobs, topk_logprobs, use_implementation
from pallas_kernels.backends import read
from pallas_kernels.backends.groups import GroupSums
from pallas_kernels.sampling import emitted_logprobs, verify
from pallas_kernels.sampling.rows import GroupedRows
from pallas_kernels.testing import checks, plain
from pallas_kernels.testing.shapes import Shape

BF16, F32 = "bfloat16", "float32"
TOPK, SAMPLED, VERIFY, COPY = "topk_logprobs", "read of sampled rows", "verify", "copy"
SHAPES = (
    (COPY, Shape(1024, 131_072, 0, F32)),
    (TOPK, Shape(64, 131_072, 20, BF16)),
    (TOPK, Shape(1536, 151_936, 20, BF16)),
    (TOPK, Shape(64, 151_936, 0, F32)),
    (VERIFY, Shape(64, 151_936, 20, BF16)),
    (SAMPLED, Shape(64, 151_936, 20, BF16)),
    (TOPK, Shape(256, 131_072, 5, BF16)),
    (TOPK, Shape(16, 50_257, 20, F32)),
)
MORE = tuple(
    (TOPK, Shape(rows, vocabulary, k, dtype))
    for rows in (4, 16, 64, 256, 1536)
    for vocabulary in (131_072, 151_936)
    for k in (0, 1, 5, 20, 64)
    for dtype in (BF16, F32)
)
REHEARSED = (TOPK, Shape(2, 2048, 2, F32))
NO_CACHE = 128 << 20  # bytes: an H100's L2 cache has 50 MB
MOST_BUFFERS = 6
SECONDS = 0.2  # that a program's calls take together, about
ROUNDS = 5
PLAIN = "log_softmax + top_k"

Call = Callable[..., Any]


def measure(job: str, shape: Shape, backend: str, rehearse: bool = False) -> dict[str, Any]:
    """Microseconds a call of each contender, and the reason for each that has none.

    Returns:
      `figures`, {"GB/s": of the first contender}, {"absent": {contender: why}}.
    """
    slots = 4 if job == VERIFY else 1  # rows of a slot
    flat = Shape(shape.rows * slots, shape.vocabulary, shape.k, shape.dtype)
    buffers, ids = buffers_of(flat, 1 if rehearse else MOST_BUFFERS)
    seconds: dict[str, list[float]] = {}
    absent: dict[str, str] = {}
    answers: dict[str, Any] = {}
    for name, call in jax_calls(job, shape, backend, rehearse).items():
        try:
            answers[name], seconds[name] = timed(call, buffers, ids, rehearse)
        except Exception as error:  # XLA's ways may want more memory than there is
            if name == backend:
                raise
            absent[name] = f"{type(error).__name__}: {str(error)[:200]}"
    for name in answers:
        if PLAIN in answers and name not in (PLAIN, f"{backend}, greedy"):
            check(name, answers[PLAIN], answers[name])
    moved = buffers[0].nbytes * (2 if job == COPY else 1)
    found = figures(seconds)
    rate = round(moved / next(iter(found["us"].values())) / 1e3, 1)
    return found | {"GB/s": rate, "absent": absent}


def buffers_of(shape: Shape, most: int) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Logits, as many as no cache holds, `most` at most, and token ids."""
    size = shape.rows * shape.vocabulary * jnp.dtype(shape.dtype).itemsize
    count = max(1, min(most, -(-NO_CACHE // size)))
    logits = tuple(checks.random_logits(shape, seed) for seed in range(count))
    return logits, checks.random_ids(shape)


def figures(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """{"us": {contender: median}, "spread": {contender: [least, most]}}, microseconds a call."""
    us = {name: [round(1e6 * one, 2) for one in found] for name, found in seconds.items()}
    return {
        "us": {name: round(float(np.median(found)), 2) for name, found in us.items()},
        "spread": {name: [min(found), max(found)] for name, found in us.items()},
    }


def jax_calls(job: str, shape: Shape, backend: str, rehearse: bool) -> dict[str, Call]:
    """Calls of logits and token ids, by contender: the backend's kernels first."""
    k = shape.k
    ours: Any = "xla" if rehearse else backend
    if job == COPY:
        return {COPY: lambda x, _: -x}
    if job == TOPK:
        return {
            backend: lambda x, t: topk_logprobs(x, t, k, implementation=ours),
            f"{backend}, greedy": lambda x, _: greedy_topk_logprobs(x, k, implementation=ours),
            "xla": lambda x, t: topk_logprobs(x, t, k, implementation="xla"),
            PLAIN: lambda x, t: plain.topk_logprobs(x, t, k),
            "max only, by XLA": lambda x, _: jnp.max(x, axis=1),
        }
    if job == SAMPLED:

        def groups(x: jax.Array, name: Any) -> tuple[GroupSums, Any]:
            needed, inverse = jnp.full(len(x), 10, jnp.int32), jnp.ones(len(x))
            found = read.read_groups(GroupedRows.of(x).part, inverse, needed, k, name)[0]
            return found.groups, found.top_ids

        return {
            backend: lambda x, _: groups(x, ours),
            "xla": lambda x, _: groups(x, "xla"),
        }
    _, drafts, sampling, positions = checks.verification(shape)

    def verified(x: jax.Array, name: Any) -> Any:
        with use_implementation(name):
            logits = x.reshape(shape.rows, -1, shape.vocabulary)
            found = verify(logits, drafts, sampling, positions, k=k)
            assert found.read is not None
            emitted = emitted_logprobs(logits, found)
        return found.token_ids, found.num_tokens, emitted

    return {
        backend: lambda x, _: verified(x, ours),
        "xla": lambda x, _: verified(x, "xla"),
        "the logprobs of its rows alone": lambda x, t: topk_logprobs(x, t, k, implementation=ours),
    }


def in_one_program(call: Call, buffers: int) -> Call:
    """A program of turns, ids and buffers: so often a call on each buffer, one after the other.

    The barrier makes each call depend on the turn, so that none is moved out of the loop; it copies
    nothing. Every call's results are the program's, so that none is left out.
    """

    def program(turns: jax.Array, ids: jax.Array, *logits: jax.Array) -> Any:
        def one(turn: Any, index: int) -> Any:
            x, token_ids, _ = lax.optimization_barrier((logits[index], ids, turn))  # type: ignore[no-untyped-call]
            return call(x, token_ids)

        def body(turn: Any, _: Any) -> Any:
            return [one(turn, index) for index in range(buffers)]

        shapes = jax.eval_shape(lambda: body(jnp.int32(0), None))
        return lax.fori_loop(
            0, turns, body, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        )

    return program


def timed(
    call: Call, buffers: tuple[jax.Array, ...], ids: jax.Array, rehearse: bool = False
) -> tuple[Any, list[float]]:
    """The results for the first buffer, and seconds of a call, one number a round."""
    program = jax.jit(in_one_program(call, len(buffers)))  # once: to compile it takes longest

    def seconds(turns: int) -> float:
        begin = time.perf_counter()
        jax.block_until_ready(program(jnp.int32(turns), ids, *buffers))  # type: ignore[no-untyped-call]
        return (time.perf_counter() - begin) / (turns * len(buffers))

    answers = jax.tree.map(np.asarray, program(jnp.int32(1), ids, *buffers)[0])
    if rehearse:
        return answers, [seconds(2)]
    once = min(seconds(2) for _ in range(3)) * len(buffers)
    turns = max(4, min(20_000, int(SECONDS / once)))
    return answers, [seconds(turns) for _ in range(ROUNDS)]


def check(name: str, expected: Any, found: Any) -> None:
    """Raise AssertionError unless a contender's logprobs, ranks and ids are those expected.

    Contenders that compute something else than `TopkLogprobs` are not looked at.
    """
    if not isinstance(found, TopkLogprobs):
        return
    np.testing.assert_allclose(
        found.logprobs, expected.logprobs, rtol=1e-6, atol=3e-5, err_msg=f"{name}'s logprobs"
    )
    np.testing.assert_array_equal(found.token_ranks, expected.token_ranks, f"{name}'s ranks")
    np.testing.assert_array_equal(found.token_ids, expected.token_ids, f"{name}'s token ids")
