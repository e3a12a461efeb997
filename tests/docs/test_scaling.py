"""The table of docs/scaling.md is of these formulas, which compiled programs obey.

N devices share a model; B slots, D drafts, R = B (D + 1) rows, K top columns: Llama 3 70B on H100
nodes.
"""

import jax
import jax.numpy as jnp
import pytest

from ipc import wire
from jax_specdec.device.model.sharding import Parallel
from pallas_kernels import topk_logprobs
from pallas_kernels.sampling import Drafts, Sampling, verify
from pallas_kernels.sampling.drafts import draw
from tests.support import quick_compile
from tests.support.collectives import bytes_of_a_run, of_a_run
from tests.support.paths import ROOT
from tests.support.shards import mesh_of

PAGE = ROOT / "docs" / "scaling.md"
WORD, ITEM = 4, 2  # bytes; the latter of bfloat16: weights, hidden states and logits
HIDDEN, LAYERS, VOCABULARY, WEIGHTS = 8192, 80, 128_256, 70.6e9
B, D, K = 64, 3, 20
R = B * (D + 1)
MEMORY, LINK, LATENCY = 3.35e12, 450e9, 10e-6  # bytes a second: HBM3, NVLink 4; assumed seconds


def all_reduce(num_bytes, n):
    """Bytes that a device sends for a ring all-reduce of `num_bytes`."""
    return 2 * (n - 1) / n * num_bytes


def all_gather(num_bytes, n):
    """Bytes that a device sends for a ring all-gather whose result has `num_bytes`."""
    return (n - 1) / n * num_bytes


def logprob_bytes(rows, k, chosen, n):
    """Bytes all-reduced, and bytes all-gathered, for the logprobs of `rows`."""
    return WORD * rows * (1 + chosen), WORD * n * rows * (3 + 2 * k)


def step_seconds(n):
    """The time to read the weights once: the least that a step takes, and about what it takes."""
    return WEIGHTS * ITEM / n / MEMORY


@pytest.mark.fast
@pytest.mark.parametrize(("gpus", "n"), [(8, 8), (64, 8), (64, 64), (1024, 8)])
def test_the_page_has_these_numbers(gpus, n):
    reduced, gathered = logprob_bytes(R, K, 0, n)
    reduced += WORD * (3 * R + 2 * B * D)  # to verify and to draw greedily
    ours = all_reduce(reduced, n) + all_gather(gathered, n)
    theirs = all_gather((R + B * D) * VOCABULARY * ITEM, n)
    message = WORD * int(wire.words_bound([D + 1] * B, [K + 1] * B, [0] * B))
    seconds, step = ours / LINK + 5 * LATENCY, step_seconds(n)
    line = (
        f"| {gpus} | {n} | {ours / 1e3:,.0f} kB | {seconds / step:.1%} | {theirs / 1e6:,.1f} MB | "
        f"{(theirs / LINK + 2 * LATENCY) / step:.1%} | {message / 1e3:,.1f} kB x {gpus // n} | "
        f"{2 * message * (gpus // n) / 1e6:,.2f} MB |"
    )
    text = PAGE.read_text()
    assert line in text
    assert f"{all_reduce((2 * LAYERS + 1) * R * HIDDEN * ITEM, 8) / 1e9:.2f} GB" in text
    assert f"{step_seconds(8) * 1e3:.1f} ms" in text


@pytest.mark.parametrize(("shards", "rows", "k", "chosen"), [(2, 5, 7, 0), (4, 24, 20, 3)])
def test_logprobs(shards, rows, k, chosen):
    def call(x, ids, more):
        return topk_logprobs(
            x, ids, k, extra_token_ids=more, mesh=mesh_of(shards), axis_name="model"
        )

    program = compiled(
        call, array(rows, 4096, dtype=jnp.bfloat16), array(rows, dtype=jnp.int32),
        array(rows, chosen, dtype=jnp.int32),
    )  # fmt: skip
    assert bytes_of_a_run(program) == sum(logprob_bytes(rows, k, chosen, shards))


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def compiled(function, *shapes):
    return jax.jit(function).lower(*shapes).compile(compiler_options=quick_compile.OPTIONS)


@pytest.mark.slow  # a program of half a minute
def test_collectives_of_a_sampled_step():
    """The dearest way: one row is cut, one takes 1,024 candidates, one is invalid; the cheapest."""
    b, d, v, columns = 3, 2, 1000, Parallel(mesh_of(2)).columns
    rows, width, words = b * (d + 1), v // 2, WORD * 2

    def step(x, drawn, proposed, sampling, positions):
        each = [draw(drawn[:, i : i + 1], sampling, positions, **columns) for i in range(d)]
        return verify(x, proposed, sampling, positions, **columns), each

    asked = jax.eval_shape(lambda: (Drafts.none(b, d, v), Sampling.greedy(b)))
    program = compiled(step, array(b, d + 1, v), array(b, d, v), *asked, array(b, dtype=jnp.int32))
    gathered = words * (rows * 2 * (width // 256 + 1 + 128 + width) + 2 * b + d * b * 2 * 64)
    assert bytes_of_a_run(program) == gathered + WORD * (3 * rows + b * d * 64 + rows * 255)
    assert bytes_of_a_run(program, branch=min) == WORD * (3 * rows + 2 * b * d)

    def sampled(one):  # no draft is chosen greedily, and all rows are valid
        return not any(name in one.op_name for name in ("jit(choose)", "invalid_rows"))

    # The groups' ends, their sums, named logits, 1,024 candidates, the draw; one a draft.
    assert of_a_run(program, sampled) == 5 + d
    assert of_a_run(program, lambda one: "invalid_rows" in one.op_name) == 2
