"""tunix's own functions and the adapter's: values, gradients, and what `install` changes."""

import dataclasses
import inspect
import types
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tunix.distillation.strategies import logit
from tunix.models.gemma import model as gemma
from tunix.models.llama3 import model as llama3
from tunix.models.qwen2 import model as qwen2
from tunix.rl import algo_core, common

from jax_specdec.adapters import tunix
from jax_specdec.export import tunix_batch
from tests.support.sample_columns import three_requests

# Since 0.1.7 the entropy stands in `common`, and the losses ask for it in place of logits.
LOSSES = algo_core if hasattr(algo_core, "compute_entropy_from_logits") else common
entropy, per_token = LOSSES.compute_entropy_from_logits, common.compute_per_token_logps
WITH_ENTROPY = "return_entropy" in inspect.signature(per_token).parameters
mine = tunix.compute_entropy_from_logits


@partial(jax.jit, static_argnums=0)
def values(entropy, logits):
    """Entropies, and the gradient of their weighted sum in float32."""
    found, pull = jax.vjp(entropy, logits)
    return found, pull(jnp.arange(1, found.size + 1, dtype=found.dtype).reshape(found.shape))[0]


@settings(max_examples=60)
@given(
    st.sampled_from([(3, 2), (2, 3, 40)]).flatmap(  # each is compiled
        lambda shape: hnp.arrays(np.float32, shape, elements=st.floats(-30, 30, width=32))
    ),
    st.sampled_from([jnp.float32, jnp.bfloat16]),
)
def test_entropies_and_gradients_are_tunix_s(logits, dtype):
    logits = jnp.asarray(logits, dtype)
    # tunix's sums bfloat16 in bfloat16: float32 is what both are rounded from.
    expected, found = values(entropy, logits.astype(jnp.float32)), values(mine, logits)
    loose = 2e-5 if dtype == jnp.float32 else 1e-2
    for one, other in zip(expected, found, strict=True):
        assert (one.shape, other.dtype) == (other.shape, dtype)
        scale = max(1.0, float(np.abs(one).max()))
        np.testing.assert_allclose(other.astype(np.float32), one, rtol=loose, atol=loose * scale)


def test_rows_without_an_answer_have_no_gradient():
    logits = jnp.asarray([[0.0, 1.0, -jnp.inf], [0.0, jnp.nan, 1.0]])
    found, gradient = values(mine, logits)
    expected = values(entropy, logits[:1, :2])
    np.testing.assert_allclose(found, [expected[0][0], np.nan], rtol=1e-6)
    np.testing.assert_allclose(gradient, [[*expected[1][0], 0], [0, 0, 0]], rtol=1e-5)


SIZES = {"num_layers": 1, "embed_dim": 16, "hidden_dim": 16, "num_heads": 2, "head_dim": 8,
         "num_kv_heads": 1}  # fmt: skip
OURS = SIZES | {"vocab_size": 40, "rope_theta": 10_000, "norm_eps": 1e-6}


def qwen(tied, dtype):
    named = {"use_tied_embedding": tied, "dtype": dtype, "param_dtype": dtype}
    return qwen2.Qwen2(qwen2.ModelConfig(**OURS, **named), rngs=nnx.Rngs(0))


def llama(tied, dtype):
    return llama3.Llama3(llama3.ModelConfig(**OURS, weight_tying=tied), rngs=nnx.Rngs(0))


def capped(tied, dtype):
    changes = SIZES | {"num_embed": 40, "final_logit_softcap": 2.0}
    config = dataclasses.replace(gemma.ModelConfig.gemma2_2b(), **changes)
    return gemma.Gemma(config, rngs=nnx.Rngs(0))


MODELS = [(qwen, True), (qwen, False), (llama, True), (llama, False), (capped, True)]


def arguments(model, packed=False):
    """Of `compute_per_token_logps`; padding is 0."""
    ids = jax.random.randint(jax.random.key(1), (2, 9), 1, 40)
    named = {"pad_id": 0, "eos_id": 1}
    if packed:
        prompt, completion = ids[:, :0], ids
        named["segment_ids"] = jnp.asarray([[1] * 5 + [2] * 4] * 2)
        named["segment_positions"] = jnp.asarray([[*range(5), *range(4)]] * 2)
    else:
        prompt, completion = ids[:, :4].at[0, :2].set(0), ids[:, 4:].at[1, 3:].set(0)
    named |= {"prompt_tokens": prompt, "completion_tokens": completion}
    return nnx.split(model), named


@pytest.mark.parametrize(
    ("make", "tied", "temperature"),
    [(*model, 0.7) for model in MODELS] + [(qwen, True, 1.0), (llama, False, 0.0)],
)
def test_logprobs_without_logits_are_tunix_s(make, tied, temperature):
    (graph, state), named = arguments(make(tied, jnp.float32))
    named |= {"temperature": temperature, "stop_gradient": False}
    expected = per_token(graph, state, **named)
    found = tunix.compute_per_token_logps(graph, state, **named)
    assert (found.shape, found.dtype) == (expected.shape, jnp.float32)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    mask = named["completion_tokens"] != 0
    expected, found = (
        jax.tree.leaves(jax.grad(lambda s, f=f: jnp.sum(f(graph, s, **named) * mask))(state))
        for f in (per_token, tunix.compute_per_token_logps)
    )
    assert any(np.any(one) for one in expected)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("tied", [True, False])
def test_packed_sequences_and_bfloat16(tied):
    (graph, state), named = arguments(qwen(tied, jnp.bfloat16), packed=True)
    expected = per_token(graph, state, **named)
    found = tunix.compute_per_token_logps(graph, state, **named)
    assert found.shape == expected.shape == (2, 9)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def refused(make, **changes):
    (graph, state), named = arguments(make)
    with pytest.raises(NotImplementedError) as error:
        tunix.compute_per_token_logps(graph, state, **named, **changes)
    return str(error.value)


def test_what_cannot_be_served_is_refused_by_name():
    assert "return_logits=True" in refused(qwen(True, jnp.float32), return_logits=True)
    model = qwen(True, jnp.float32)
    model.embedder.lora = nnx.LoRAParam(jnp.zeros(3))
    assert "LoRA" in refused(model)
    model = capped(True, jnp.float32)
    model.embedder.input_embedding = nnx.Param(
        model.embedder.input_embedding[...].astype(jnp.bfloat16)
    )
    assert "bfloat16" in refused(model)

    class Other(nnx.Module):
        pass

    assert "Other" in refused(Other())


MARK = "custom_vjp_call"


def test_install_reaches_jitted_functions_and_restores():
    (graph, state), named = arguments(qwen(True, jnp.float32))
    step = jax.jit(lambda s: common.compute_per_token_logps(graph, s, **named))

    def calls():  # the jitted functions that a call would run, as it was traced last
        return str(jax.make_jaxpr(step)(state))

    plain = np.asarray(step(state))
    with tunix.install(without_logits=True) as names:
        assert names == (
            f"{LOSSES.__name__}.compute_entropy_from_logits",
            "tunix.rl.common.compute_per_token_logps",
        )
        assert LOSSES.compute_entropy_from_logits is tunix.compute_entropy_from_logits
        np.testing.assert_allclose(step(state), plain, rtol=1e-4, atol=1e-4)
        assert MARK in calls()
    assert LOSSES.compute_entropy_from_logits is entropy
    assert common.compute_per_token_logps is per_token
    np.testing.assert_array_equal(step(state), plain)
    assert MARK not in calls()


@pytest.mark.skipif(WITH_ENTROPY, reason="no caller asks for logits")
def test_callers_get_tunix_logits_with_our_logprobs():
    (graph, state), named = arguments(qwen(True, jnp.float32))
    expected = per_token(graph, state, **named, return_logits=True)
    with tunix.install(without_logits=True):
        found = common.compute_per_token_logps(graph, state, **named, return_logits=True)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not WITH_ENTROPY, reason="callers ask for logits")
@pytest.mark.parametrize(
    ("make", "temperature", "chunk_size", "stop_gradient", "packed"),
    [
        (qwen, 0.7, 0, False, False),
        (qwen, 1.0, 2, False, False),
        (qwen, 1.0, 0, True, True),
        (llama, 0.7, 2, False, True),
    ],
)
def test_entropies_without_logits_are_tunix_s(make, temperature, chunk_size, stop_gradient, packed):
    model = make(False, jnp.float32)
    (graph, state), named = arguments(model, packed=packed)
    named |= {"temperature": temperature, "return_entropy": True, "stop_gradient": stop_gradient}

    def read(state):
        return common.compute_per_token_logps(graph, state, chunk_size=chunk_size, **named)

    def slope(state):
        logprobs, entropies = read(state)
        return (logprobs * (named["completion_tokens"] != 0)).sum() + (entropies**2).sum()

    expected, pulled = read(state), jax.tree.leaves(jax.grad(slope)(state))
    with tunix.install(without_logits=True):
        results, gradients = read(state), jax.tree.leaves(jax.grad(slope)(state))
    for one, other in zip((*expected, *pulled), (*results, *gradients), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_allclose(other, one, rtol=1e-3, atol=1e-3)
    assert any(np.any(one) for one in pulled) == (not stop_gradient)


def forward(model, input_tokens, input_mask):
    """As a user's: tokens to logits."""
    places = jnp.broadcast_to(jnp.arange(input_tokens.shape[1]), input_tokens.shape)
    mask = jnp.tril(input_mask[:, None, :] * jnp.ones_like(input_mask)[:, :, None]) > 0
    return model(input_tokens, places, None, mask)[0]


def next_ids(input_tokens, input_mask):
    return jnp.where(input_mask > 0, jnp.roll(input_tokens, -1, axis=1), -1)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("temperature", "alpha"), [(2.0, 0.3), (1.0, 1.0)])
def test_a_support_of_all_tokens_is_tunix_s_distillation(tied, temperature, alpha):
    student, teacher = (qwen(tied, jnp.float32) for _ in range(2))
    graph, state = nnx.split(teacher)
    teacher = nnx.merge(graph, jax.tree.map(lambda x: 1.2 * x, state))
    ids = jax.random.randint(jax.random.key(1), (2, 9), 1, 40)
    inputs = {"input_tokens": ids, "input_mask": jnp.ones_like(ids).at[1, 6:].set(0)}
    numbers = {"temperature": temperature, "alpha": alpha}
    theirs = logit.LogitStrategy(
        forward, forward, lambda **x: jax.nn.one_hot(next_ids(**x), 40), **numbers
    )
    ours = tunix.support_strategy(forward, forward, next_ids, k=40, **numbers)

    @nnx.jit(static_argnums=0)
    def step(strategy, student, teacher):
        output = strategy.get_teacher_outputs(teacher, inputs)
        loss = nnx.value_and_grad(
            lambda model: strategy.get_train_loss(model, output, inputs), has_aux=True
        )
        return loss(student), strategy.get_eval_loss(student, inputs)[0]

    both = [step(strategy, student, teacher) for strategy in (theirs, ours)]
    ((expected, metrics), slopes), evaluated = both[0]
    ((loss, own), gradients), own_evaluated = both[1]
    np.testing.assert_allclose([loss, own_evaluated], [expected, evaluated], rtol=1e-5)
    for name in own:
        np.testing.assert_allclose(own[name], metrics[name], rtol=1e-4, atol=1e-6)
    for one, other in zip(jax.tree.leaves(slopes), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-3, atol=1e-5)


def test_a_learner_takes_the_batch_of_rollouts():
    columns = three_requests().of_request(0)
    columns = dataclasses.replace(
        columns, request_id=columns.request_id[:1], prompt=columns.prompt.take(np.arange(1))
    )
    batch = tunix_batch(columns, pad_id=0)
    fields = {field.name for field in dataclasses.fields(common.TrainExample)}
    assert {*batch} < fields
    example = common.TrainExample(
        **jax.tree.map(jnp.asarray, batch), advantages=jnp.ones(1), ref_per_token_logps=None
    )
    model = qwen(True, jnp.float32)
    config = types.SimpleNamespace(
        beta=0.0, epsilon=0.2, epsilon_high=0.2, epsilon_c=None, loss_algo="grpo", temperature=1.0,
        loss_agg_mode="sequence-mean-token-mean", kl_loss_mode="kl", clip_ratio_c=None,
        force_compute_kl=False, use_rollout_logps=True,
    )  # fmt: skip
    loss, _ = algo_core.grpo_loss_fn(model, example, config, pad_id=0, eos_id=1)
    assert np.isfinite(loss)
    own = tunix.compute_per_token_logps(
        *nnx.split(model), example.prompt_ids, example.completion_ids, pad_id=0, eos_id=1
    )
    ratio = jnp.exp(own - example.old_per_token_logps)
    clipped = jnp.minimum(ratio, jnp.clip(ratio, 0.8, 1.2))
    mask = example.completion_mask
    np.testing.assert_allclose(loss, -(clipped * mask).sum() / mask.sum(), rtol=1e-2)
