"""Compile `linear_topk_logprobs` for an H100 on a machine without one: its temporaries.

`python -m bench.aot linear` prints a line for each shape, forward and backward.

The limits: temporaries of at most 5 % of the float32 logits (beside, in bfloat16, hidden's gradient
in float32), and no array of the logits' shape. The time is not known from this: nothing runs, and
on a GPU XLA tries several kernels for each product.
"""

import argparse
import re
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import linear_topk_logprobs
from pallas_kernels.testing import compile_target
from pallas_kernels.testing.shapes import Shape

ROWS = 1040  # of no other axis
SHARE = 0.05


SHAPES = (
    *(
        (hidden, Shape(ROWS, 151_936, k, dtype))
        for hidden in (1024, 4096)
        for k in (0, 20, 256)
        for dtype in ("bfloat16", "float32")
    ),
    *((4096, Shape(32_768, 128_256, k, "bfloat16")) for k in (20, 256)),
)  # the hidden size of each


def broken(_: argparse.Namespace) -> int:
    """Compile every shape; returns how many programs break a limit."""
    jax.config.update("jax_platforms", "cpu")
    chip = compile_target.find()
    return sum(
        not measured(shape, hidden, backward, chip)
        for hidden, shape in SHAPES
        for backward in ((False, True) if shape.k == 0 else (False,))
    )


def lowered(shape: Shape, size: int, chip: Any, backward: bool) -> Any:
    """One shape's program, before it is compiled."""

    def forward(hidden: jax.Array, head: jax.Array, ids: jax.Array) -> Any:
        return linear_topk_logprobs(hidden, head, ids, shape.k, logits_dtype=shape.dtype)

    def loss(hidden: jax.Array, head: jax.Array, ids: jax.Array) -> jax.Array:
        total: jax.Array = forward(hidden, head, ids).logprobs.sum()
        return total

    arrays = (
        chip.array((shape.rows, size), shape.dtype),
        chip.array((shape.vocabulary, size), shape.dtype),
        chip.array((shape.rows,), jnp.int32),
    )
    program = jax.grad(loss, (0, 1)) if backward else forward
    return jax.jit(program).trace(*arrays).lower(lowering_platforms=("cuda",))


def measured(shape: Shape, size: int, backward: bool, chip: Any) -> bool:
    """Compile one shape and print what it takes; whether it keeps the limits."""
    compiled = lowered(shape, size, chip, backward).compile()
    text = compiled.as_text()
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    logits = 4 * shape.rows * shape.vocabulary
    beside = 4 * size * shape.rows if backward and shape.dtype == "bfloat16" else 0
    axes = rf"\[({shape.rows},{shape.vocabulary}|{shape.vocabulary},{shape.rows})\]"
    whole = re.search(axes, text) is not None
    kept = temporaries <= SHARE * logits + beside and not whole
    print(
        f"{shape}, H={size}{' backward' if backward else ''}: {temporaries / 1e6:.0f} MB extra, "
        f"{100 * temporaries / logits:.1f} % of the logits: {'ok' if kept else 'BROKEN'}",
        flush=True,
    )
    return kept
