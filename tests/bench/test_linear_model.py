"""The model of a fused kernel's time: by hand for one shape, and what it says."""

import pytest

from bench import linear_model
from bench.linear import Shape

pytestmark = pytest.mark.fast


def times(rows, hidden, k):
    return linear_model.times(Shape(rows, hidden, 100_000, k, "bfloat16"))


def test_one_shape_by_hand():
    chip = linear_model.Chip(1e15, 0.5, 2e12, 4e12)
    found = linear_model.times(Shape(1000, 1000, 100_000, 0, "bfloat16"), chip)
    # 2e8 bytes of the head, 2e11 flops, 6e8 bytes of logits
    assert found == pytest.approx((1e-4, 4e-4, 4e-4, 3e-4, 1.5e-4, 0, 0))
    assert (found.most, found.least) == pytest.approx((2, 1.625))
    best = linear_model.times(Shape(1000, 1000, 100_000, 20, "bfloat16"), chip)
    assert (best.most, best.least) == pytest.approx((8e-4 / 5e-4, 6.5e-4 / 4.5e-4))
    few = linear_model.times(Shape(10, 1000, 100_000, 0, "bfloat16"), chip)
    assert (few.product, few.fused) == pytest.approx((5e-5, 1e-4))  # the head's bytes, no flops


@pytest.mark.parametrize(
    ("rows", "hidden", "k", "words"),
    [
        (256, 1024, 20, "worth it"),
        (1024, 4096, 20, "worth it"),
        (8192, 2048, 20, "if the blocks leave"),
        (8192, 8192, 0, "not worth it"),
    ],
)
def test_what_it_says(rows, hidden, k, words):
    assert words in linear_model.verdict(times(rows, hidden, k))


def test_products_that_it_does_not_know():
    with pytest.raises(ValueError, match="'float32'"):
        linear_model.times(Shape(64, 64, 64, 0, "float32"))
