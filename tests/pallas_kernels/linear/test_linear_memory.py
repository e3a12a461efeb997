"""How much of the logits exists at a time: at most 5 % of them from 1024 rows on."""

import itertools
import re

import jax
import pytest

from pallas_kernels import linear_topk_logprobs
from pallas_kernels.linear import schedule as schedules
from tests.support.lowered import array, text_of
from tests.support.quick_compile import UNOPTIMIZED


@pytest.mark.fast
@pytest.mark.parametrize("rows", [64, 1000, 1021, 1024, 8192, 40_000])
@pytest.mark.parametrize("k", [0, 20, 256, 512])
def test_parts_fit_together(rows, k):
    widths = (width for width in (65, 600, 32_000, 151_936) if k <= width)
    for width, hidden, itemsize in itertools.product(widths, (64, 1024, 8192), (2, 4)):
        way = schedules.choose_linear_schedule(rows, width, hidden, itemsize, itemsize, k)
        assert 1 <= way.part <= way.rows <= rows
        if way.columns == width:
            continue
        assert way.rows == rows
        assert way.columns % way.piece == 0
        assert schedules.NARROWEST <= way.piece <= way.columns <= width
        assert schedules.NARROWEST <= way.elsewhere <= width
        assert way.room >= (schedules.LEAST_ROOM if k else 0)
        # The narrowest product may break the share; none that is wider.
        share = schedules.share_of(rows, 4 * rows * width)
        needed = schedules.schedule_state(rows, k, way.room) + way.piece * (
            hidden * itemsize + 4 * rows
        )
        assert needed <= share or way.piece == schedules.NARROWEST


@pytest.mark.fast
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_second_count_takes_the_products_of_the_first(platform):
    """Ranks are those of the blocks' logits, so no other product may make them."""
    rows, width, hidden = 1040, 32_000, 1024
    way = schedules.choose_linear_schedule(rows, width, hidden, 4, 4, 0)
    assert way.elsewhere not in (way.columns, width)
    arrays = array((rows, hidden), "float32"), array((width, hidden), "float32"), array((rows,))
    text = text_of(lambda *arrays: linear_topk_logprobs(*arrays, 0), *arrays, platform=platform)
    made = re.findall(r"dot_general.*-> tensor<(\d+)x(\d+)xf32>", text)
    products = [int(columns) for count, columns in made if int(count) == rows]
    columns = way.columns if platform == "cpu" else way.elsewhere
    assert products == [columns] * 2  # the blocks, and the second count


SHARE = 0.05
ROWS = 1040  # of no other axis
SLOW = pytest.mark.slow


def check(call, rows, width, size, dtype, beside=0):
    """Check the share of the float32 logits' bytes that a call needs, `beside` some bytes.

    Nor has an array of the program as many numbers as the logits, and their two axes.
    """
    arrays = array((rows, size), dtype), array((width, size), dtype), array((rows,))
    program = jax.jit(call).lower(*arrays).compile(UNOPTIMIZED)
    assert program.memory_analysis().temp_size_in_bytes <= SHARE * 4 * rows * width + beside
    assert not re.search(rf"\[({rows},{width}|{width},{rows})\]", program.as_text())


@pytest.mark.parametrize(
    ("rows", "width", "size", "k", "dtype"),
    [
        (ROWS, 32_000, 1024, 20, "float32"),
        (ROWS, 32_000, 4096, 256, "bfloat16"),
        pytest.param(8192, 32_000, 1024, 256, "float32", marks=SLOW),
        pytest.param(ROWS, 151_936, 4096, 256, "float32", marks=SLOW),
    ],
)
def test_forward(rows, width, size, k, dtype):
    check(lambda *x: linear_topk_logprobs(*x, k, logits_dtype=dtype), rows, width, size, dtype)


@pytest.mark.parametrize(
    ("width", "size", "dtype"),
    [
        (32_000, 4096, "float32"),
        pytest.param(151_936, 1024, "bfloat16", marks=SLOW),
        pytest.param(151_936, 4096, "float32", marks=SLOW),
    ],
)
def test_backward(width, size, dtype):
    """The gradients are results. In bfloat16 hidden's is summed in float32, head's is copied."""

    def loss(hidden, head, ids):
        out = linear_topk_logprobs(hidden, head, ids, 8, entropy=True)
        return out.logprobs.sum() + out.entropy.sum()

    beside = 2 * size * (2 * ROWS + width) if dtype == "bfloat16" else 0
    check(jax.grad(loss, (0, 1)), ROWS, width, size, dtype, beside)
