"""Times of calls on a device, beside XLA: many calls in one compiled program, so that no host clock
need see 20 us.

A program calls again and again, each time on other rows of more logits than a cache holds, for two
milliseconds at least; each call depends on all results of the one before. How often it turns is a
constant of the program: where XLA does not know that, each turn waits for a copy to the host that
says whether there is another. Results are compared before anything is timed.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import (
    TopkLogprobs,
    greedy,
    linear_topk_logprobs,
    topk_logprobs,
    use_implementation,
)
from pallas_kernels.backends import read
from pallas_kernels.backends.groups import GroupSums, Needed
from pallas_kernels.sampling import Drafts, Sampling, emitted_logprobs, verify
from pallas_kernels.sampling.rows import GroupedRows
from pallas_kernels.testing import checks, plain
from pallas_kernels.testing.shapes import Shape

BF16, F32 = "bfloat16", "float32"
TOPK, SAMPLED, VERIFY, COPY = "topk_logprobs", "read of sampled rows", "verify", "copy"
GREEDY = "greedy choices and logprobs"
DRAW, LINEAR = "draw of top-k 50, top-p 0.9", "logprobs of hidden states"
TOP_K, TOP_P = 50, 0.9
HIDDEN = 4096  # numbers of a hidden state
SHAPES = (
    (COPY, Shape(1024, 131_072, 0, F32)),
    (TOPK, Shape(64, 151_936, 20, BF16)),
    (TOPK, Shape(1536, 151_936, 20, BF16)),
    (TOPK, Shape(8, 128_256, 5, BF16)),
    (VERIFY, Shape(64, 151_936, 20, BF16)),
    (SAMPLED, Shape(256, 151_936, 20, BF16)),
    (TOPK, Shape(64, 151_936, 0, F32)),
    (TOPK, Shape(1536, 32_000, 20, BF16)),
    (TOPK, Shape(1, 151_936, 20, BF16)),
    (TOPK, Shape(256, 128_256, 128, BF16)),
    (GREEDY, Shape(64, 151_936, 20, BF16)),
    (DRAW, Shape(64, 151_936, 0, BF16)),
    (LINEAR, Shape(256, 128_256, 0, BF16)),
)
MORE = tuple(
    (TOPK, Shape(rows, vocabulary, k, dtype))
    for rows in (1, 8, 64, 256, 1536)
    for vocabulary in (32_000, 128_256, 151_936)
    for k in (0, 5, 20, 128)
    for dtype in (BF16, F32)
)
REHEARSED = (TOPK, Shape(2, 2048, 2, F32))
NO_CACHE = 300 << 20  # bytes: the second-level cache of a B300 has 129 MiB
IN_A_PROGRAM = 2e-3  # seconds that its calls take at least, at
FASTEST = 8e12  # bytes a second: no chip of `chips.GPUS` reads faster
ROUND_SECONDS = 0.2  # that a round's programs take together, about
ROUNDS = 5
PLAIN = "log_softmax + top_k"

TimedCall = Callable[..., Any]


class Buffers(NamedTuple):
    """Logits that a program calls with, in turn, and what every call takes beside them."""

    logits: tuple[jax.Array, ...]  # each [P * R, V]; of `LINEAR`, hidden states [P * R, D]
    positions: int  # P: calls have R rows each, one after the other
    ids: Any  # [R] token ids; of `LINEAR`, those and the head [V, D]
    apart: bool = False  # programs call with one array each, and take turns

    @property
    def programs(self) -> list[tuple[jax.Array, ...]]:
        """The logits of one program after the other."""
        return [(x,) for x in self.logits] if self.apart else [self.logits]

    @property
    def calls(self) -> int:
        """How many different rows there are."""
        return len(self.logits) * self.positions

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.logits)


def measure(job: str, shape: Shape, backend: str, rehearse: bool = False) -> dict[str, Any]:
    """Microseconds a call of each contender, and the reason for each that has none.

    Returns:
      `figures`, {"GB/s": of the first contender}, {"absent": {contender: why}}.
    """
    slots = 4 if job == VERIFY else 1  # rows of a slot
    flat = Shape(shape.rows * slots, shape.vocabulary, shape.k, shape.dtype)
    # Calls that name their rows read them where they lie; others would have them copied, and
    # verification reads all rows of an array.
    read_whole = COPY, GREEDY, SAMPLED, VERIFY, DRAW
    buffers = buffers_of(flat, array_a_call=job in read_whole, few=rehearse)
    # A program has its calls as often as there are arrays, and a verification takes a minute to
    # compile; it takes long enough for a launch of its own.
    buffers = buffers._replace(apart=job in (GREEDY, VERIFY, DRAW))
    if job == LINEAR:
        buffers = hidden_of(shape, few=rehearse)
    seconds: dict[str, list[float]] = {}
    absent: dict[str, str] = {}
    answers: dict[str, Any] = {}
    for name, call in jax_calls(job, shape, backend, rehearse).items():
        try:
            answers[name], seconds[name] = timed(call, buffers, rehearse)
        except Exception as error:  # XLA's ways may want more memory than there is
            if name == backend:
                raise
            absent[name] = f"{type(error).__name__}: {str(error)[:200]}"
    for name in answers:
        if PLAIN in answers and name != PLAIN:
            check_answers(name, answers[PLAIN], answers[name])
    moved = buffers.nbytes / buffers.calls * (2 if job == COPY else 1)
    if job == LINEAR:
        moved = buffers.ids[1].nbytes
    timings = figures(seconds)
    rate = round(moved / next(iter(timings["us"].values())) / 1e3, 1)
    return timings | {"GB/s": rate, "absent": absent}


def buffers_of(shape: Shape, *, array_a_call: bool = False, few: bool = False) -> Buffers:
    """Logits for calls of this shape, more than a cache holds.

    Args:
      shape: of one call.
      array_a_call: an array for each call, not all in one.
      few: of two calls, whatever caches hold.
    """
    size = shape.rows * shape.vocabulary * jnp.dtype(shape.dtype).itemsize
    count = 2 if few else -(-NO_CACHE // size)
    arrays, positions = (count, 1) if array_a_call else (1, count)
    larger = replace(shape, rows=positions * shape.rows)
    logits = tuple(checks.random_logits(larger, seed) for seed in range(arrays))
    return Buffers(logits, positions, checks.random_ids(shape))


def hidden_of(shape: Shape, *, few: bool = False) -> Buffers:
    """Hidden states of two calls, and a head, which is larger than a cache by itself."""
    size = 64 if few else HIDDEN
    states = Shape(2 * shape.rows, size, 0, shape.dtype)
    head = checks.random_logits(Shape(shape.vocabulary, size, 0, shape.dtype), 1) / 1024
    return Buffers((checks.random_logits(states, 0),), 2, (checks.random_ids(shape), head))


def rows_of(logits: jax.Array, row_ids: jax.Array) -> jax.Array:
    """The rows [R, V] of these consecutive ids, for calls that have no row ids: XLA's compiler puts
    the slice into what reads it."""
    if len(row_ids) == len(logits):
        return logits
    return lax.dynamic_slice_in_dim(logits, row_ids[0], len(row_ids))


def figures(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """{"us": {contender: median}, "spread": {contender: [least, most]}}, microseconds a call."""
    us = {name: [round(1e6 * second, 2) for second in rounds] for name, rounds in seconds.items()}
    return {
        "us": {name: round(float(np.median(rounds)), 2) for name, rounds in us.items()},
        "spread": {name: [min(rounds), max(rounds)] for name, rounds in us.items()},
    }


def jax_calls(job: str, shape: Shape, backend: str, rehearse: bool) -> dict[str, TimedCall]:
    """Calls of logits [N, V], row ids [R] and token ids [R], by contender: the backend's first."""
    k = shape.k
    ours: Any = "xla" if rehearse else backend
    if job == COPY:
        return {COPY: lambda x, rows, _: -rows_of(x, rows)}
    if job == TOPK:
        return {
            backend: lambda x, rows, t: topk_logprobs(x, t, k, row_ids=rows, implementation=ours),
            "xla": lambda x, rows, t: topk_logprobs(rows_of(x, rows), t, k, implementation="xla"),
            PLAIN: lambda x, rows, t: plain.topk_logprobs(rows_of(x, rows), t, k),
            "max only, by XLA": lambda x, rows, _: jnp.max(rows_of(x, rows), axis=1),
        }
    if job == DRAW:

        def drawn(x: jax.Array, rows: jax.Array, name: Any) -> jax.Array:
            slots = len(rows)
            drafts = Drafts(jnp.zeros((slots, 0), jnp.int32), jnp.zeros(slots, jnp.int32))
            sampling = Sampling.of(
                slots, temperature=1.0, top_k=TOP_K, top_p=TOP_P, key=jax.random.key(0)
            )
            with use_implementation(name):
                output = verify(x, drafts, sampling, jnp.arange(slots), row_ids=rows[:, None])
            return output.token_ids[:, 0]

        return {
            backend: lambda x, rows, _: drawn(x, rows, ours),
            "xla": lambda x, rows, _: drawn(x, rows, "xla"),
        }
    if job == LINEAR:
        return {
            "linear_topk_logprobs": lambda x, rows, t: linear_topk_logprobs(
                rows_of(x, rows), t[1], t[0], k
            ),
            f"logits and {PLAIN}": lambda x, rows, t: plain.topk_logprobs(
                rows_of(x, rows) @ t[1].T, t[0], k
            ),
        }
    if job == GREEDY:

        def chosen(x: jax.Array, name: Any) -> TopkLogprobs:
            with use_implementation(name):
                output = checks.greedy_verified(x, jnp.arange(len(x)), k)
                return emitted_logprobs(x[:, None], output)

        return {
            backend: lambda x, rows, _: chosen(rows_of(x, rows), ours),
            "xla": lambda x, rows, _: chosen(rows_of(x, rows), "xla"),
            "in two reads": lambda x, rows, _: topk_logprobs(
                rows_of(x, rows), greedy(rows_of(x, rows)).token_ids, k, implementation=ours
            ),
        }
    if job == SAMPLED:

        def groups(x: jax.Array, name: Any) -> tuple[GroupSums, Any]:
            needed = Needed.all_of(jnp.full(len(x), 10, jnp.int32))
            inverse = jnp.ones(len(x))
            with use_implementation(name):
                summary = read.read_groups(GroupedRows.of(x).part, inverse, needed, k)[0]
            return summary.groups, summary.top_ids

        return {
            backend: lambda x, rows, _: groups(rows_of(x, rows), ours),
            "xla": lambda x, rows, _: groups(rows_of(x, rows), "xla"),
        }
    _, drafts, sampling, positions = checks.verification(shape)

    def verified(x: jax.Array, rows: jax.Array, name: Any) -> Any:
        with use_implementation(name):
            row_ids = rows.reshape(shape.rows, -1)
            output = verify(x, drafts, sampling, positions, row_ids=row_ids, k=k)
            assert output.read is not None
            emitted = emitted_logprobs(x, output)
        return output.token_ids, output.num_tokens, emitted

    return {
        backend: lambda x, rows, _: verified(x, rows, ours),
        "xla": lambda x, rows, _: verified(x, rows, "xla"),
        "the logprobs of its rows alone": lambda x, rows, t: topk_logprobs(
            x, t, k, row_ids=rows, implementation=ours
        ),
    }


def in_one_program(call: TimedCall, buffers: Buffers, turns: int) -> TimedCall:
    """A program of ids and logits: `turns` times a call on all rows, one after the other.

    Its results are those of the last call, which is the one on the first position of each array.
    The barrier makes each call depend on the one before, so that none is moved out of the loop; it
    copies nothing. Every call's results are the program's, so that none is left out.
    """
    positions, size = buffers.positions, len(buffers.logits[0]) // buffers.positions
    number = turns * positions
    one_call = jax.jit(call)  # lowered once, however many arrays there are

    def program(ids: Any, *logits: jax.Array) -> Any:
        def dependent_call(index: Any, before: Any, x: jax.Array) -> Any:
            place = (number - 1 - index) % positions if positions > 1 else 0
            rows = place * size + jnp.arange(size, dtype=jnp.int32)
            x, rows, token_ids, _ = lax.optimization_barrier((x, rows, ids, before))
            return one_call(x, rows, token_ids)

        def body(index: Any, before: Any) -> Any:
            return [dependent_call(index, before, x) for x in logits]

        shapes = jax.eval_shape(lambda: body(jnp.int32(0), None))
        return lax.fori_loop(
            0, number, body, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        )

    return program


def turns_of(buffers: Buffers) -> int:
    """How often a program reads all of it, so that the fastest chip takes two ms; or once."""
    if buffers.apart:
        return 1
    return -(-int(IN_A_PROGRAM * FASTEST) // buffers.nbytes)


def timed(call: TimedCall, buffers: Buffers, rehearse: bool = False) -> tuple[Any, list[float]]:
    """The results for the first rows, and seconds of a call, one number a round."""
    turns = 1 if rehearse else turns_of(buffers)
    arrays = buffers.programs
    program = jax.jit(in_one_program(call, buffers, turns))  # once: to compile takes longest
    calls = turns * len(arrays[0]) * buffers.positions

    def seconds(programs: int) -> float:
        begin = time.perf_counter()
        for number in range(programs):  # the host is ahead of the device
            results = program(buffers.ids, *arrays[number % len(arrays)])
        jax.block_until_ready(results)
        return (time.perf_counter() - begin) / (programs * calls)

    answers = jax.tree.map(np.asarray, program(buffers.ids, *arrays[0])[0])
    if rehearse:
        return answers, [seconds(1)]
    once = min(seconds(1) for _ in range(2)) * calls
    programs = max(1, min(100, int(ROUND_SECONDS / once)))
    return answers, [seconds(programs) for _ in range(ROUNDS)]


def check_answers(name: str, expected: Any, answers: Any) -> None:
    """Raise AssertionError unless a contender's logprobs, ranks and ids are those expected.

    Contenders that compute something else than `TopkLogprobs` are not looked at.
    """
    if not isinstance(answers, TopkLogprobs):
        return
    np.testing.assert_allclose(
        answers.logprobs, expected.logprobs, rtol=1e-6, atol=3e-5, err_msg=f"{name}'s logprobs"
    )
    np.testing.assert_array_equal(answers.token_ranks, expected.token_ranks, f"{name}'s ranks")
    np.testing.assert_array_equal(answers.token_ids, expected.token_ids, f"{name}'s token ids")
