"""A part of a call's result is that of the whole: jax then drops the rest of the program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import greedy, topk_logprobs
from pallas_kernels.sampling import Sampling, draw, truncation

ROWS = jax.random.normal(jax.random.key(0), (4, 300))
SAMPLING = Sampling.of(4, temperature=0.8, top_p=0.9)
CALLS = {
    "greedy": (greedy, 2),
    "topk_logprobs": (lambda x: topk_logprobs(x, jnp.zeros(4, jnp.int32), 2), 4),
    "truncation": (lambda x: truncation(x, SAMPLING), 3),
    "draw": (lambda x: draw(x[:, None], SAMPLING, jnp.zeros(4, jnp.int32)), 4),
}


@pytest.mark.parametrize("name", [
    "greedy", "topk_logprobs",
    *(pytest.param(name, marks=pytest.mark.long) for name in ("truncation", "draw")),
])  # fmt: skip
def test_each_result_alone_is_that_of_the_whole(name):
    """Where `valid` of `greedy` or a cut's `log_kept` stood alone, the compiler's process died."""
    call, number = CALLS[name]
    whole = jax.tree.leaves(jax.jit(call)(ROWS))
    assert len(whole) == number
    for at, expected in enumerate(whole):
        alone = jax.jit(lambda x, at=at: jax.tree.leaves(call(x))[at])(ROWS)
        np.testing.assert_array_equal(alone, expected)
