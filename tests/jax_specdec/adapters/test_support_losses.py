"""The losses of a distillation strategy, against whole logits; what cannot be is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_specdec.adapters import support_losses as losses
from jax_specdec.adapters.heads import ModelHead

V, H, K = 30, 8, 5


def states(scale=1.0, axes="VH"):
    rng = np.random.default_rng(3)
    hidden = jnp.asarray(rng.normal(size=(2, 4, H)), jnp.float32)
    weight = jnp.asarray(rng.normal(size=(V, H)), jnp.float32)
    head = ModelHead(weight if axes == "VH" else weight.T, axes, jnp.float32, 4.0, scale, "highest")
    logits = 4 * jnp.tanh(scale * (hidden @ weight.T) / 4)
    return hidden, head, logits


@pytest.mark.parametrize(("scale", "axes"), [(1.0, "VH"), (0.5, "HV")])
def test_a_teacher_s_support_is_the_top_of_its_logprobs(scale, axes):
    hidden, head, logits = states(scale, axes)
    support = losses.top_support(hidden, head, K, 2.0)
    values, ids = jax.lax.top_k(jax.nn.log_softmax(logits / 2), K)
    np.testing.assert_array_equal(support.token_ids, ids)
    np.testing.assert_allclose(support.logprobs, values, rtol=1e-5)


@pytest.mark.parametrize("divergence", ["forward", "reverse"])
def test_the_divergence_is_that_of_whole_logits(divergence):
    hidden, head, logits = states(0.5)
    teacher = jax.nn.log_softmax(jax.random.normal(jax.random.key(1), (2, 4, V)))
    ids = jnp.broadcast_to(jnp.arange(V), teacher.shape)  # all tokens: no rest
    support = losses.Support(ids, teacher)
    student = jax.nn.log_softmax(logits / 2)
    p, q = (teacher, student) if divergence == "forward" else (student, teacher)
    expected = jnp.sum(jnp.exp(p) * (p - q), axis=-1)
    found = losses.divergence_from_support(hidden, head, support, 2.0, divergence)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_labels_without_a_token_cost_nothing():
    hidden, head, logits = states()
    labels = jnp.array([[0, 29, -1, 5], [-1, 2, 2, 7]], jnp.int32)
    expected = -jnp.take_along_axis(
        jax.nn.log_softmax(logits), jnp.maximum(labels, 0)[..., None], -1
    )
    expected = jnp.where(labels >= 0, expected[..., 0], 0)
    found = losses.cross_entropy(hidden, head, labels)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_one_hot_labels_and_numbers_that_are_none_are_refused():
    hidden = states()[0]
    for labels in (
        jnp.zeros((2, 4, V), jnp.int32),
        jnp.zeros((2, 4)),
        jnp.zeros((2, 3), jnp.int32),
    ):
        with pytest.raises(ValueError, match=r"give ids, \(2, 4\), -1 where"):
            losses.check_labels(labels, hidden)
    for temperature in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"temperature = .* must be above 0"):
            losses.check_numbers(temperature, 0.5)
    for alpha in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match=r"alpha = .* must be from 0"):
            losses.check_numbers(1.0, alpha)
