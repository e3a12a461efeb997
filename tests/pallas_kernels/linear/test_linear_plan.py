"""How much of the logits exists at a time, by the sizes, and on which platform."""

import itertools
import re

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import linear_topk_logprobs
from pallas_kernels.linear import schedule as schedules

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("rows", [64, 1000, 1021, 1024, 8192, 40_000])
@pytest.mark.parametrize("k", [0, 20, 256, 512])
def test_parts_fit_together(rows, k):
    widths = (width for width in (65, 600, 32_000, 151_936) if k <= width)
    for width, hidden, itemsize in itertools.product(widths, (64, 1024, 8192), (2, 4)):
        way = schedules.choose_schedule(rows, width, hidden, itemsize, itemsize, k)
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
        needed = schedules.state_of(rows, k, way.room) + way.piece * (hidden * itemsize + 4 * rows)
        assert needed <= share or way.piece == schedules.NARROWEST


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_second_count_takes_the_products_of_the_first(platform):
    """Ranks are those of the blocks' logits, so no other product may make them."""
    rows, width, hidden = 1040, 32_000, 1024
    way = schedules.choose_schedule(rows, width, hidden, 4, 4, 0)
    assert way.elsewhere not in (way.columns, width)
    arrays = (
        jax.ShapeDtypeStruct((rows, hidden), jnp.float32),
        jax.ShapeDtypeStruct((width, hidden), jnp.float32),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
    )
    traced = jax.jit(lambda *arrays: linear_topk_logprobs(*arrays, 0)).trace(*arrays)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    made = re.findall(r"dot_general.*-> tensor<(\d+)x(\d+)xf32>", text)
    products = [int(columns) for count, columns in made if int(count) == rows]
    columns = way.columns if platform == "cpu" else way.elsewhere
    assert products == [columns] * 2  # the blocks, and the second count
