"""The model of the fused kernel's time: by hand for one shape, and what it says."""

import pytest

from bench import aot_linear, linear_model
from bench.gpu import machine_code
from bench.linear import Shape

pytestmark = pytest.mark.fast


def times(rows, hidden, k):
    return linear_model.times(Shape(rows, hidden, 100_000, k, "bfloat16"))


def test_one_shape_by_hand():
    chip = linear_model.Chip(1e15, 0.5, 2e12, 4e12, 100, 1e13)
    found = linear_model.times(Shape(1000, 1000, 100_000, 0, "bfloat16"), chip)
    # 2e8 bytes of the head, 2e11 flops, 6e8 bytes of logits
    assert found[:4] == pytest.approx((1e-4, 4e-4, 3e-4, 1.5e-4))
    # 4 pairs of rows' tiles times 391 groups, 50 at a time: 32 waves of 3_276_800 logits, for each
    # 6.5536e9 flops, 100 times 256 rows of 2000 bytes, and 9.5 instructions a logit
    product, operands, epilogue = 6.5536e9 / 5e14, 5.12e7 / 4e12, 3_276_800 * 9.5 / 1e13
    assert operands < product
    assert (found.fused, found.fused_slow) == pytest.approx(
        (32 * product, 32 * (product + epilogue))
    )
    assert found.most == pytest.approx(8e-4 / found.fused)
    assert found.least == pytest.approx(6.5e-4 / found.fused_slow)
    best = linear_model.times(Shape(1000, 1000, 100_000, 20, "bfloat16"), chip)
    assert best.most == pytest.approx(8e-4 / (found.fused + 1e-4))
    few = linear_model.times(Shape(10, 1000, 100_000, 0, "bfloat16"), chip)
    assert few.product == pytest.approx(5e-5)  # the head's bytes, no flops
    slow_cache = linear_model.Chip(1e15, 0.5, 2e12, 1e12, 100, 1e13)
    slow = linear_model.times(Shape(1000, 1000, 100_000, 0, "bfloat16"), slow_cache)
    assert slow.fused_slow == pytest.approx(32 * (5.12e7 / 1e12 + epilogue))


@pytest.mark.parametrize(
    ("rows", "hidden", "k", "words"),
    [
        (256, 1024, 0, "worth it"),
        (1024, 2048, 0, "worth it"),
        (8192, 2048, 0, "at the better end"),
        (8192, 8192, 0, "not worth it"),
    ],
)
def test_what_it_says(rows, hidden, k, words):
    assert linear_model.verdict(times(rows, hidden, k)).endswith(words)


def test_products_that_it_does_not_know():
    with pytest.raises(ValueError, match="'float32'"):
        linear_model.times(Shape(64, 64, 64, 0, "float32"))


def code(*texts):
    found = tuple(machine_code.Instruction(text, 1, (), (), ()) for text in texts)
    return machine_code.Code(found, ())


def test_instructions_after_the_product():
    """Those of one way, up to the jump over the other; a way that is not whole is none."""
    product, each = "HGMMA.64x256x16.F32.BF16 R24", ["FADD R1", "MUFU.EX2 R1"] * 128
    texts = ["FADD R1", product, product, "@P0 BRA `(.L_x_1)", *each, "BRA `(.L_x_2)", *each]
    assert aot_linear.epilogue(code(*texts)) == 1 + len(each)
    for wrong in (
        [product, *each],
        [*each, "BRA `(.L_x_2)"],
        [product, *each[2:], "BRA `(.L_x_2)"],
    ):
        with pytest.raises(ValueError, match=r"HGMMA|MUFU"):
            aot_linear.epilogue(code(*wrong))
