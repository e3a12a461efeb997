"""Temporaries: at most 5 % of the float32 logits from 1024 rows on, forward and backward."""

import re

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import linear_topk_logprobs
from tests.support.quick_compile import UNOPTIMIZED

SHARE = 0.05
ROWS = 1040  # of no other axis
SLOW = pytest.mark.slow


def compiled(call, rows, width, size, dtype):
    arrays = (
        jax.ShapeDtypeStruct((rows, size), dtype),
        jax.ShapeDtypeStruct((width, size), dtype),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
    )
    return jax.jit(call).lower(*arrays).compile(UNOPTIMIZED)


def share(program, rows, width):
    """Of the float32 logits' bytes."""
    return program.memory_analysis().temp_size_in_bytes / (4 * rows * width)


def holds_logits(program, rows, width):
    """Whether an array of the program has as many numbers as the logits, and their two axes."""
    return bool(re.search(rf"\[({rows},{width}|{width},{rows})\]", program.as_text()))


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
    def call(hidden, head, ids):
        return linear_topk_logprobs(hidden, head, ids, k, logits_dtype=dtype)

    program = compiled(call, rows, width, size, dtype)
    assert share(program, rows, width) <= SHARE
    assert not holds_logits(program, rows, width)


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

    program = compiled(jax.grad(loss, (0, 1)), ROWS, width, size, dtype)
    beside = 2 * size * (2 * ROWS + width) if dtype == "bfloat16" else 0
    assert share(program, ROWS, width) <= SHARE + beside / (4 * ROWS * width)
    assert not holds_logits(program, ROWS, width)
