"""Memory beside logits and outputs (XLA, on a CPU): a quarter of the logits' bytes, or 8 MiB."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import greedy, greedy_topk_logprobs, topk_logprobs
from tests.support import quick_compile

SHARE = 0.25
ALWAYS = 8 << 20


def limit(logits):
    """Bytes."""
    return max(ALWAYS, SHARE * logits.size * logits.dtype.itemsize)


def temporaries(call, *arguments):
    """Bytes; the compiler assigns buffers before it generates code."""
    compiled = jax.jit(call).lower(*arguments).compile(quick_compile.UNOPTIMIZED)
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    ("rows", "vocabulary", "dtype", "dynamic"),
    [
        (24, 32_000, "bfloat16", True),
        (64, 131_072, "float32", False),
        (64, 50_257, "bfloat16", True),
        (64, 50_257, "float32", False),
        (1536, 151_936, "float32", True),
        (1536, 151_936, "bfloat16", False),
    ],
)
def test_temporaries_are_a_share_of_the_logits(rows, vocabulary, dtype, dynamic):
    """With row_ids and a dynamic row count too; and the greedy choice."""
    logits = jax.ShapeDtypeStruct((rows, vocabulary), dtype)
    ids = jax.ShapeDtypeStruct((rows,), jnp.int32)
    count = jax.ShapeDtypeStruct((), jnp.int32)

    def call(logits, token_ids, row_ids, num_rows):
        given = {"row_ids": row_ids, "num_rows": num_rows, "extra_token_ids": row_ids[:, None]}
        return topk_logprobs(
            logits, token_ids, 20, implementation="xla", **given if dynamic else {}
        )

    assert temporaries(call, logits, ids, ids, count) <= limit(logits)
    if rows < 1000:
        assert temporaries(greedy, logits) <= limit(logits)


def test_temporaries_of_changed_logits():
    """With a mask and a bias logits are copied block by block, never all."""
    logits = jax.ShapeDtypeStruct((512, 131_072), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((512,), jnp.int32)
    words = jax.ShapeDtypeStruct((512, 4096), jnp.uint32)

    def call(logits, ids, words):
        table = ids[:, None]
        changes = {"allowed": words, "bias_token_ids": table, "bias": table.astype(jnp.float32)}
        return greedy_topk_logprobs(logits, 20, entropy=True, implementation="xla", **changes)

    assert temporaries(call, logits, ids, words) <= limit(logits)
