"""Up to three rows on a CPU are read in another way, with the same bits."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import topk_logprobs
from pallas_kernels.backends.xla.rows import in_one_thread
from pallas_kernels.backends.xla.selection import FEW_ROWS, is_small_batch
from tests.support import quick_compile


@pytest.mark.parametrize(
    ("vocabulary", "k", "dtype"), [(4096, 0, "float32"), (4099, 5, "bfloat16")]
)
def test_a_row_has_the_bits_that_it_has_among_many(vocabulary: int, k: int, dtype: str) -> None:
    rng = np.random.default_rng(0)
    rows = 2 * FEW_ROWS
    logits = rng.normal(size=(rows, vocabulary)) * 3
    logits[0, :7], logits[1, 5], logits[2] = -np.inf, 1e-40, -1e-40
    logits[2, 9] = -2e-40
    x = jnp.asarray(logits, dtype)
    ids = jnp.asarray([3, 7, 9, 1, 2, 3], jnp.int32)
    temperatures = jnp.asarray([1, 0.5, 2, 1, 1, 3], jnp.float32)
    call = quick_compile.as_users(
        lambda x, t, temperatures: topk_logprobs(x, t, k, temperatures=temperatures)
    )
    together = call(x, ids, temperatures)
    for count in range(1, FEW_ROWS + 1):
        assert is_small_batch(x[:count])
        assert not is_small_batch(x)
        alone = call(x[:count], ids[:count], temperatures[:count])
        chex.assert_trees_all_equal(alone, jax.tree.map(lambda one, n=count: one[:n], together))


def test_what_runs_in_one_thread_stays_a_branch_of_the_compiled_program() -> None:
    def function(x: jax.Array) -> jax.Array:
        return jnp.exp(x) + 1

    x = jnp.arange(3.0)
    program = jax.jit(lambda x: in_one_thread(function, x))
    chex.assert_trees_all_equal(program(x), jax.jit(function)(x))
    assert "conditional(" in (program.lower(x).compile().as_text() or "")
    assert "conditional(" not in (jax.jit(function).lower(x).compile().as_text() or "")
