"""MaxText's own teacher step and the adapter's, on small models, and what `install` changes."""

import os

import jax
import jax.numpy as jnp
import maxtext
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from maxtext.configs import pyconfig
from maxtext.models.models import Transformer
from maxtext.trainers.post_train.distillation import distillation_utils as utils
from maxtext.trainers.post_train.distillation import save_top_k_teacher_logits as script

from jax_specdec.adapters import maxtext as adapter

own = script.teacher_step
BASE = os.path.join(os.path.dirname(maxtext.__file__), "configs", "base.yml")
SMALL = (
    "run_name=a enable_checkpointing=false base_emb_dim=32 base_num_query_heads=2 head_dim=16 "
    "base_num_kv_heads=2 base_mlp_dim=32 base_num_decoder_layers=1 max_target_length=16 "
    "max_prefill_predict_length=4 per_device_batch_size=1 vocab_size=64 attention=dot_product "
    "skip_jax_distributed_system=true scan_layers=false log_config=false"
)


def teacher(**changes):
    given = {"dtype": "float32"} | changes
    options = [f"{name}={value}" for name, value in given.items()]
    config = pyconfig.initialize(["", BASE, *SMALL.split(), *options])
    devices = np.array(jax.devices()[:1]).reshape([1] * len(config.mesh_axes))
    mesh = jax.sharding.Mesh(devices, config.mesh_axes)
    return Transformer(config, mesh, None, rngs=nnx.Rngs(0)), mesh


def batch(num_positions=8):
    ids = jax.random.randint(jax.random.key(0), (2, num_positions), 0, 64)
    return {
        "inputs": ids,
        "inputs_position": jnp.broadcast_to(jnp.arange(num_positions), ids.shape),
        "inputs_segmentation": jnp.ones_like(ids).at[1, 5:].set(0),
    }


@settings(max_examples=40)
@given(
    # Products of quarters are exact: equal ones are ties, in the order of their ids.
    hnp.arrays(np.int8, (2, 3, 4), elements=st.integers(-8, 8)),
    hnp.arrays(np.int8, (30, 4), elements=st.integers(-8, 8)),
    st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from(["VH", "HV"]),
)
def test_top_k_logits_are_those_of_the_product(hidden, head, dtype, axes):
    hidden, head = (jnp.asarray(x / np.float32(4), dtype) for x in (hidden, head))
    expected = script.get_top_k_logits(hidden @ head.T, 5)
    given = head if axes == "VH" else head.T
    found = adapter.top_k_logits(hidden, given, 5, logits_dtype=dtype, head_axes=axes)
    assert [x.dtype for x in found] == [x.dtype for x in expected]
    np.testing.assert_array_equal(found[1], expected[1])
    np.testing.assert_allclose(*(x[0].astype(np.float32) for x in (found, expected)), atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"logits_via_embedding": "true", "normalize_embedding_logits": "true",
         "final_logits_soft_cap": 3.0, "logits_dot_in_fp32": "true"},
        {"dtype": "bfloat16", "cast_logits_to_fp32": "false"},
    ],
)  # fmt: skip
def test_a_teacher_s_logits_and_ids_are_maxtext_s(changes):
    model, mesh = teacher(**changes)
    with jax.set_mesh(mesh):
        expected, found = own(model, batch(), 5), adapter.teacher_step(model, batch(), 5)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in expected]
    values, others = (np.asarray(x[0], np.float32) for x in (found, expected))
    np.testing.assert_allclose(values, others, rtol=1e-5, atol=1e-5)
    same = np.asarray(found[1] == expected[1])
    if changes.get("dtype") == "bfloat16":  # ties of rounded logits: a bit may decide
        assert same.mean() > 0.9
    else:
        assert same.all()


def test_what_cannot_be_served_is_refused_by_name():
    model, _ = teacher(logits_via_embedding="true", final_logits_soft_cap=3.0)
    with pytest.raises(NotImplementedError, match="final_logits_soft_cap"):
        adapter.teacher_step(model, batch(), 5)


def test_install_replaces_and_restores():
    with adapter.install() as names:
        assert names == (f"{script.__name__}.teacher_step",)
        assert script.teacher_step is adapter.teacher_step
    assert script.teacher_step is own


def forward(model, input_tokens, positions, decoder_segment_ids, **_):
    """As MaxText's `create_forward_fn` makes it."""
    logits = model(
        decoder_input_tokens=input_tokens, decoder_positions=positions,
        decoder_segment_ids=decoder_segment_ids, enable_dropout=False,
    )  # fmt: skip
    return utils.DistillationForwardOutput(logits=logits)


@pytest.mark.parametrize(
    "changes",
    [{}, {"logits_via_embedding": "true", "final_logits_soft_cap": 3.0,
          "logits_dot_in_fp32": "true"}],
)  # fmt: skip
def test_a_support_of_all_tokens_is_maxtext_s_distillation(changes):
    (student, mesh), (same, _) = teacher(**changes), teacher(**changes)
    graph, state = nnx.split(same)
    stronger = jax.tree.map(
        lambda x: 1.5 * x if jnp.issubdtype(x.dtype, jnp.floating) else x, state
    )
    arrays = batch()
    inputs = {
        "input_tokens": arrays["inputs"],
        "positions": arrays["inputs_position"],
        "attention_mask": None,
        "decoder_segment_ids": arrays["inputs_segmentation"],
    }
    targets = jnp.roll(arrays["inputs"], -1, axis=1)
    numbers = {"temperature": 2.0, "alpha": 0.3, "vocab_size": 64}
    theirs = utils.CombinedDistillationStrategy(forward, forward, **numbers)
    ours = adapter.support_strategy(k=64, **numbers)
    form, params, rest = nnx.split(student, nnx.Param, ...)

    def step(strategy):
        def loss(params):
            model = nnx.merge(form, params, rest, copy=True)
            output = strategy.teacher_forward_fn(
                model=nnx.merge(graph, stronger, copy=True), **inputs
            )
            labels = strategy.create_labels(targets, arrays["inputs_segmentation"])
            own = strategy.student_forward_fn(model=model, **inputs)
            return strategy.compute_loss(own, jax.lax.stop_gradient(output), labels)

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)

    with jax.set_mesh(mesh):
        ((expected, metrics), slopes), ((found, own), gradients) = step(theirs), step(ours)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for name, (total, count) in own.items():
        np.testing.assert_allclose([total, count], metrics[name], rtol=1e-4, err_msg=name)
    for one, other in zip(jax.tree.leaves(slopes), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-3, atol=1e-5)


def test_a_teacher_s_logits_from_a_file_are_refused():
    strategy = adapter.support_strategy(vocab_size=64)
    saved = utils.DistillationForwardOutput(logits=jnp.zeros((1, 2, 5)))
    with pytest.raises(NotImplementedError, match="top K logits are no logprobs"):
        strategy.compute_loss((jnp.zeros((1, 2, 4)), None), saved, jnp.zeros((1, 2), jnp.int32))
