"""A step of tpu-inference's own runner: a request drafts, another has its prompt's logprobs."""

from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tpu_inference.layers.jax.sample.rejection_sampler import RejectionSampler
from tpu_inference.layers.jax.sample.sampling_metadata import TPUSupportedSamplingMetadata
from tpu_inference.runner import tpu_runner
from tpu_inference.runner.utils import SpecDecodeMetadata

from jax_specdec.adapters import tpu_inference

V, K = 300, 3
MESH = jax.make_mesh((1, 1), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2)
REAL = ("_execute_model", "_sample_from_logits", "_select_from_array_fn", "sample_tokens",
        "_extract_draft_token_ids", "_get_prompt_logprobs_dict")  # fmt: skip
PROMPT = [7, 1, 5, 9, 2]
LOGITS = np.random.default_rng(0).normal(0, 3, (8, V)).astype(np.float32)


def request(tokens, computed, prompt):
    shape = (prompt - 1, K + 1)
    room = np.zeros(shape, np.int32), np.zeros(shape, np.float32), np.zeros(shape[0], np.int32)
    return SimpleNamespace(
        prompt_token_ids=tokens[:prompt],
        num_prompt_tokens=prompt,
        num_computed_tokens=computed,
        num_tokens=len(tokens),
        output_token_ids=[],
        in_progress_prompt_logprobs_cpu=room,
    )


def runner_of(drafts):
    """Its runner, whose model gives `LOGITS`: rows of "drafts" (3 tokens), then of "prompt" (5)."""
    runner = mock.MagicMock()
    for name in REAL:
        method = getattr(tpu_runner.TPUModelRunner, name)
        static = isinstance(vars(tpu_runner.TPUModelRunner)[name], staticmethod)
        setattr(runner, name, method if static else method.__get__(runner))
    tokens = np.zeros((2, 32), np.int32)
    batch = SimpleNamespace(
        num_reqs=2,
        req_ids=["drafts", "prompt"],
        req_id_to_index={"drafts": 0, "prompt": 1},
        request_distribution=[1, 1, 2],
        num_prompt_logprobs={"prompt": K},
        generators={},
        vocab_size=V,
        num_tokens_no_spec=np.array([4, 5]),
        num_tokens=np.array([6, 5]),
        token_ids_cpu=tokens,
    )
    step = SpecDecodeMetadata(
        draft_lengths=jnp.array([2, 0], jnp.int32),
        target_logits_indices=jnp.array([0, 1, 0, 0], jnp.int32),
        bonus_logits_indices=jnp.array([2, 3], jnp.int32),
        final_logits_indices=jnp.array([0, 1, 2, 7], jnp.int32),
    )
    step.draft_lengths_cpu, step.req_indices_dp = np.array([2, 0]), {0: [0, 1]}
    ids = jnp.array([4, *drafts, *PROMPT], jnp.int32)
    chosen = TPUSupportedSamplingMetadata(logprobs=True)
    names = {0: ["drafts", "prompt"]}
    last = jnp.array([0, 1, 2, 7], jnp.int32)
    prepared = (ids, None, None, chosen, last, step, None, 2, names, 8, None, None)
    vars(runner).update(
        mesh=MESH,
        input_batch=batch,
        requests={"drafts": request([3, 8, 6, 4], 3, 3), "prompt": request(PROMPT, 0, 5)},
        rejection_sampler=RejectionSampler(MESH),
        speculative_config=SimpleNamespace(num_speculative_tokens=2),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        model_config=SimpleNamespace(max_logprobs=K, logprobs_mode="raw_logprobs"),
        vllm_config=SimpleNamespace(sharding_config=SimpleNamespace(prefill_cp_size=1)),
        rng_params_for_sampling=jax.random.key(0),
        maybe_forbid_compile=mock.MagicMock(),
        is_multimodal_model=False,
        is_pooling_model=False,
        is_last_rank=True,
        enable_continue_decode=False,
        aux_output_worker=None,
        dp_size=1,
        max_num_reqs=2,
        max_model_len=32,
        layer_name_to_kvcache_index={},
        state_leaves=None,
        kv_caches=None,
        _prepare_inputs=lambda scheduled: prepared,
        _get_input_ids_embeds=lambda ids, *_: (ids, None),
        model_fn=lambda *_, **__: (None, LOGITS, None, None),
        compute_logits_fn=lambda state, hidden, lora: jnp.asarray(hidden),
        speculative_decoding_manager=mock.MagicMock(),
        persistent_batch_manager=mock.MagicMock(),
        lora_utils=mock.MagicMock(),
        maybe_get_kv_connector_output=mock.MagicMock(),
        execute_model_state=None,
        _continue_decode_output=None,
    )
    return runner


def step_of(runner):
    scheduled = SimpleNamespace(
        total_num_scheduled_tokens=8, num_scheduled_tokens={"drafts": 3, "prompt": 5}
    )
    with mock.patch.object(tpu_runner, "set_forward_context", mock.MagicMock()):
        assert runner._execute_model(scheduled) is None
    return runner.sample_tokens(None)


def test_their_runner_refuses():
    with pytest.raises(ValueError, match=tpu_inference.REFUSAL):
        step_of(runner_of([1, 2]))
    with tpu_inference.install(), pytest.raises(ValueError, match=tpu_inference.REFUSAL):
        step_of(runner_of([1, 2]))


def test_prompt_logprobs_come_beside_accepted_drafts():
    best = LOGITS.argmax(axis=1)
    theirs = tpu_runner.TPUModelRunner._execute_model
    with tpu_inference.install(prompt_logprobs=True) as names:
        assert "tpu_inference.runner.tpu_runner.TPUModelRunner._execute_model" in names
        found = step_of(runner_of([int(best[0]), 5]))
    assert tpu_runner.TPUModelRunner._execute_model is theirs
    # The first draft is right, the second is not; the prompt's last row gives its next token.
    assert found.sampled_token_ids == [[best[0], best[1]], [best[7]]]
    every = np.asarray(jax.nn.log_softmax(LOGITS.astype(np.float64)))
    of_prompt = found.prompt_logprobs_dict["prompt"]
    for row, token in enumerate(PROMPT[1:]):
        expected = every[3 + row]
        top = np.argsort(-expected)[:K]
        np.testing.assert_array_equal(of_prompt.logprob_token_ids[row], [token, *top])
        np.testing.assert_allclose(of_prompt.logprobs[row], expected[[token, *top]], atol=1e-5)
        rank = (expected >= expected[token]).sum()
        assert of_prompt.selected_token_ranks[row] == rank
