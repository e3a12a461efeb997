"""The losses of docs/linear.md have the values and gradients of optax's, which takes logits.

pytest tests/docs/check_losses_optax.py       (needs the examples extra)
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support.pages import python_blocks
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def page():
    """What the page's code defines."""
    scope = {}
    for block in python_blocks(ROOT / "docs" / "linear.md"):
        exec(block, scope)
    return scope


def same(ours, theirs, hidden, head):
    """Values and gradients by hidden and head."""
    found, slopes = jax.value_and_grad(ours, (0, 1))(hidden, head)
    right, right_slopes = jax.value_and_grad(theirs, (0, 1))(hidden, head)
    np.testing.assert_allclose(found, right, rtol=1e-5)
    for one, other in zip(slopes, right_slopes, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_cross_entropy(page):
    labels = page["labels"]

    def theirs(hidden, head):
        return optax.softmax_cross_entropy_with_integer_labels(hidden @ head.T, labels).mean()

    def ours(hidden, head):
        return page["cross_entropy"](hidden, head, labels)

    same(ours, theirs, page["hidden"], page["head"])
    with pytest.raises(AssertionError):  # the check can fail
        same(lambda *args: ours(*args) + 1e-3, theirs, page["hidden"], page["head"])


@pytest.mark.parametrize("forward", [True, False])
def test_distillation(page, forward):
    ids, teacher = page["ids"], page["logprobs"]

    def buckets(logprobs):
        rest = jnp.log1p(-jnp.exp(logprobs).sum(axis=1, keepdims=True))
        return jnp.concatenate([logprobs, rest], axis=1)

    def theirs(hidden, head):
        logprobs = jax.nn.log_softmax(hidden @ head.T)
        student = buckets(jnp.take_along_axis(logprobs, ids, axis=1))
        pair = (student, buckets(teacher))
        predictions, targets = pair if forward else pair[::-1]
        return optax.losses.kl_divergence_with_log_targets(predictions, targets).mean()

    def ours(hidden, head):
        return page["distillation"](hidden, head, ids, teacher, forward)

    same(ours, theirs, page["hidden"], page["head"])
