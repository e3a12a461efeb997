"""What devices that share a model send: compiled programs obey the formulas of docs/scaling.md."""

import jax
import pytest

from jax_specdec.device.model.sharding import Parallel
from pallas_kernels import topk_logprobs
from pallas_kernels.backends.exact_sums import num_digits
from pallas_kernels.sampling import Drafts, Sampling, verify
from pallas_kernels.sampling.drafts import draw
from tests.support import quick_compile
from tests.support.collectives import bytes_of_a_run, of_a_run
from tests.support.lowered import array
from tests.support.shards import mesh_of

WORD = 4  # bytes


@pytest.mark.parametrize(("shards", "rows", "k", "chosen"), [(2, 5, 7, 0), (4, 24, 20, 3)])
def test_logprobs(shards, rows, k, chosen):
    """Words that are all-reduced, and those that are all-gathered."""
    how = {"k": k, "mesh": mesh_of(shards), "axis_name": "model"}
    given = array((rows, 4096), "bfloat16"), array((rows,)), array((rows, chosen))
    program = compiled(lambda x, y, z: topk_logprobs(x, y, extra_token_ids=z, **how), *given)
    digits = num_digits(4096)
    assert digits == 2
    assert bytes_of_a_run(program) == WORD * rows * (2 + chosen + shards * (1 + digits + 2 * k))
    assert num_digits(2**18) == 3


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
    logits = array((b, d + 1, v), "float32"), array((b, d, v), "float32")
    program = compiled(step, *logits, *asked, array((b,)))
    gathered = words * (rows * 2 * (width // 256 + 1 + 128 + width) + 2 * b + d * b * 2 * 64)
    assert bytes_of_a_run(program) == gathered + WORD * (3 * rows + b * d * 64 + rows * 255)
    assert bytes_of_a_run(program, branch=min) == WORD * (3 * rows + 2 * b * d)

    def sampled(one):  # no draft is chosen greedily, and all rows are valid
        return not any(name in one.op_name for name in ("jit(choose)", "invalid_rows"))

    # The groups' ends, their sums, named logits, 1,024 candidates, the draw; one a draft.
    assert of_a_run(program, sampled) == 5 + d
    assert of_a_run(program, lambda one: "invalid_rows" in one.op_name) == 2
