"""`learner_logprobs` is `kept_logprobs` of the product, in values and gradients, without logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipc.wire import KEPT_ALL, KEPT_MANY
from jax_specdec.device import kept_logprobs, learner_logprobs
from jax_specdec.kept_sets import KeptSets
from tests.support import quick_compile

V, H = 40, 8


def a_batch(marks):
    """Rows [2, 3] of hidden states, a head, tokens, kept sets and temperatures."""
    rng = np.random.default_rng(1)
    counts = [5, 1, 0, 12, 7, V]
    if marks:
        counts[0], counts[3] = KEPT_ALL, KEPT_MANY
    ids = [sorted(rng.choice(V, max(count, 0), replace=False).tolist()) for count in counts]
    tokens = [rng.choice(row) if row else rng.integers(V) for row in ids]
    tokens[4] = next(t for t in range(V) if t not in ids[4])
    log_kept = [-0.3 if count == KEPT_MANY else 0 for count in counts]
    sets = KeptSets.of(
        np.array(counts, np.int32), np.array(log_kept, np.float32), np.concatenate(ids).astype("i4")
    )
    hidden = rng.normal(size=(2, 3, H)).astype(np.float32)
    head = rng.normal(size=(V, H)).astype(np.float32)
    temperatures = np.array([[1, 0.5, 1], [2, 1, 0]], np.float32)
    kept = sets.padded(np.arange(6).reshape(2, 3))
    return hidden, head, np.array(tokens, np.int32).reshape(2, 3), kept, temperatures


def by_logits(hidden, head, *rest, soft_cap=None):
    x = jnp.asarray(hidden) @ jnp.asarray(head).T
    return kept_logprobs(x if soft_cap is None else soft_cap * jnp.tanh(x / soft_cap), *rest)


def with_gradients(function, arrays, **options):
    hidden, head, tokens, kept, temperatures = arrays
    weights = jnp.arange(1, 7, dtype=jnp.float32).reshape(2, 3)

    def total(hidden, head, temperatures):
        found = function(hidden, head, tokens, kept, temperatures, **options)
        return jnp.where(jnp.isfinite(found), found * weights, 0.0).sum(), found

    gradient = quick_compile.jit(jax.grad(total, (0, 1, 2), has_aux=True))
    return gradient(hidden, head, temperatures)


@pytest.mark.parametrize(
    ("marks", "soft_cap"),
    [
        (True, 3.0),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in ((False, None), (False, 3.0), (True, None))
        ),
    ],
)
def test_values_and_gradients_are_those_of_logits(marks, soft_cap):
    arrays = a_batch(marks)
    found_slopes, found = with_gradients(learner_logprobs, arrays, soft_cap=soft_cap)
    slopes, expected = with_gradients(by_logits, arrays, soft_cap=soft_cap)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(found_slopes, slopes, strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    assert found[0, 2] == 0
    assert found[1, 1] == -np.inf


def test_sets_of_other_rows_are_refused():
    hidden, head, tokens, kept, _ = a_batch(marks=False)
    with pytest.raises(ValueError, match="do not go with tokens"):
        learner_logprobs(hidden, head, tokens, jax.tree.map(lambda x: x[:1], kept))
