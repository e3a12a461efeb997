"""Memory beside logits and outputs (XLA, on a CPU): a quarter of the logits' bytes, or 8 MiB."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import greedy, greedy_topk_logprobs, topk_logprobs
from pallas_kernels.testing.shapes import Shape
from tests.support import quick_compile

SHARE = 0.25
ALWAYS = 8 << 20
# Where memory is held to a share of the logits.
MEMORY = tuple(
    Shape(rows, vocabulary, 20, dtype)
    for rows, vocabulary in ((24, 32_000), (64, 131_072), (64, 50_257), (1536, 151_936))
    for dtype in ("float32", "bfloat16")
)


def limit(logits):
    """Bytes."""
    return max(ALWAYS, SHARE * logits.size * logits.dtype.itemsize)


# Every shape once; the rest of the table is `.ci/heavy slow`.
USUAL = {
    (24, 32_000, "bfloat16", True),
    (64, 131_072, "float32", False),
    (64, 50_257, "bfloat16", True),
    (64, 50_257, "float32", False),
    (1536, 151_936, "float32", True),
    (1536, 151_936, "bfloat16", False),
}


def cases():
    for shape in MEMORY:
        for dynamic in (False, True):
            usual = (shape.rows, shape.vocabulary, shape.dtype, dynamic) in USUAL
            marks = () if usual else pytest.mark.slow
            yield pytest.param(shape, dynamic, marks=marks, id=f"{shape}-{dynamic}")


def temporaries(call, *arguments):
    """Bytes; the compiler assigns buffers before it generates code."""
    compiled = jax.jit(call).lower(*arguments).compile(quick_compile.UNOPTIMIZED)
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(("shape", "dynamic"), list(cases()))
def test_temporaries_are_a_share_of_the_logits(shape, dynamic):
    """With row_ids and a dynamic row count too."""
    logits = jax.ShapeDtypeStruct((shape.rows, shape.vocabulary), shape.dtype)
    ids = jax.ShapeDtypeStruct((shape.rows,), jnp.int32)
    count = jax.ShapeDtypeStruct((), jnp.int32)

    def call(logits, token_ids, row_ids, num_rows):
        if not dynamic:
            return topk_logprobs(logits, token_ids, shape.k, implementation="xla")
        return topk_logprobs(
            logits,
            token_ids,
            shape.k,
            row_ids=row_ids,
            num_rows=num_rows,
            extra_token_ids=row_ids[:, None],
            implementation="xla",
        )

    assert temporaries(call, logits, ids, ids, count) <= limit(logits)


@pytest.mark.parametrize("greedy_too", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_temporaries_of_changed_logits(greedy_too):
    """With a mask and a bias logits are copied block by block, never all."""
    shape = MEMORY[2]
    logits = jax.ShapeDtypeStruct((512, shape.vocabulary), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((512,), jnp.int32)
    words = jax.ShapeDtypeStruct((512, -(-shape.vocabulary // 32)), jnp.uint32)

    def call(logits, ids, words):
        table = ids[:, None]
        changes = {"allowed": words, "bias_token_ids": table, "bias": table.astype(jnp.float32)}
        if greedy_too:
            return greedy_topk_logprobs(logits, 20, entropy=True, implementation="xla", **changes)
        return topk_logprobs(logits, ids, 20, entropy=True, implementation="xla", **changes)

    assert temporaries(call, logits, ids, words) <= limit(logits)


@pytest.mark.parametrize("shape", MEMORY[:4], ids=str)
def test_greedy_temporaries(shape):
    logits = jax.ShapeDtypeStruct((shape.rows, shape.vocabulary), shape.dtype)
    assert temporaries(greedy, logits) <= limit(logits)


@pytest.mark.slow
def test_memory_check_can_fail():
    """Negative control: log_softmax of all rows does show up as temporaries."""
    logits = jax.ShapeDtypeStruct((256, 32_000), jnp.bfloat16)

    def materialize(x):
        return jax.lax.top_k(jax.nn.log_softmax(x.astype(jnp.float32)), 20)

    assert temporaries(materialize, logits) > limit(logits)
