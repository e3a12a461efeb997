"""A model over several devices: its checkpoint, values, and what travels in a step."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipc.wire import LogprobsMode
from jax_specdec.checkpoint.hf_names import open_model
from jax_specdec.checkpoint.model_config import ModelConfig, cache_bytes
from jax_specdec.device.drafting.drafters import MtpDrafter
from jax_specdec.device.loop import host_slots
from jax_specdec.device.loop.programs import Compiled
from jax_specdec.device.loop.state import LoopConfig, init_state, state_specs
from jax_specdec.device.messages.batch_options import Widths
from jax_specdec.device.model import llama, sharding
from jax_specdec.device.model.checkpoint import load_model
from jax_specdec.device.model.hf_weights import needed_bytes, weight_bytes
from jax_specdec.device.model.memory import InsufficientMemory
from jax_specdec.device.model.params import init_cache, init_params, named_arrays
from jax_specdec.requests import SamplingParams
from pallas_kernels.meshes.placement import VocabShard
from tests.support import decoding, hf_files, quick_compile
from tests.support.collectives import longest_axis

PROCESSED = LogprobsMode.PROCESSED
VOCAB = 32_768  # a shard has more columns than a row has candidates
CONFIG = ModelConfig(
    vocab_size=VOCAB, hidden_size=32, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=8,
    intermediate_size=64, num_mtp_layers=1,
)  # fmt: skip
SLOTS, DRAFTS, LENGTH = 3, 1, 64


# Collectives of a step -------------------------------------------------------------------------


def placed(parallel, shapes, specs):
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        shapes,
        parallel.shardings(specs(shapes, parallel.num_shards)),
    )


@pytest.mark.chips
@pytest.mark.parametrize("shards", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_no_collective_of_a_step_has_the_vocabularys_size(shards):
    """Nor of its two messages, for a batch that asks for everything."""
    parallel = sharding.tensor_parallel(CONFIG, shards)
    drafter = MtpDrafter(CONFIG, DRAFTS, parallel)
    config = LoopConfig(CONFIG, drafter, SLOTS, LENGTH, parallel=parallel)
    widths = Widths(k=5, chosen=16, mode=PROCESSED)
    processed = SamplingParams(
        max_tokens=20, temperature=0.8, top_k=50, top_p=0.9, logprobs=3, draft_logprobs=True,
        logprobs_mode=PROCESSED, extra_token_ids=(7, VOCAB - 1),
    )  # fmt: skip
    asks = [SamplingParams(max_tokens=20, logprobs=5), SamplingParams(max_tokens=20), processed]
    slots = [host_slots.Slot(params=one, most_tokens=3) for one in asks]
    asked = host_slots.options_of_slots(slots, widths)
    functions, number = Compiled(config), np.zeros(2, np.uint32)
    weights = jax.eval_shape(lambda: init_params(CONFIG, jax.random.key(0)))
    alone = dataclasses.replace(config, parallel=sharding.ONE_DEVICE)
    whole = jax.eval_shape(lambda: init_state(alone))
    model = placed(parallel, weights, sharding.params_specs), placed(parallel, whole, state_specs)

    def compiled(traced):
        return traced.lower().compile(compiler_options=quick_compile.OPTIONS)

    traced = functions.step.trace(*model, asked, report_widths=widths)
    step = compiled(traced)
    output = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        traced.out_info[1],
        step.output_shardings[1],
    )
    messages = functions.target_message, functions.draft_message
    told = (output, asked, number, np.bool_(True)), (output, asked, number)
    target, draft = (
        longest_axis(compiled(message.trace(*arguments, widths=widths)))
        for message, arguments in zip(messages, told, strict=True)
    )
    assert 0 < longest_axis(step) < VOCAB // shards
    assert 0 < target < VOCAB // shards
    assert draft == 0  # what it says was made as the drafts were drawn


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="vocabulary of 32768 tokens does not divide among 3"):
        sharding.tensor_parallel(CONFIG, 3)
    with pytest.raises(ValueError, match="over 9 devices, but JAX has 8"):
        sharding.tensor_parallel(CONFIG, 9)
    one = sharding.ONE_DEVICE
    assert sharding.tensor_parallel(CONFIG, 1) == one
    assert one.over_vocabulary(lambda *x: x, 3, None) == (VocabShard(), 3, None)


# A checkpoint of a vocabulary that does not divide ----------------------------------------------

V, DEVICES = 41, 2
SMALL = ModelConfig.tiny(
    V, num_layers=1, tie_embeddings=False, norm_in_head=True, qkv_bias=True, head_dim=4
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return hf_files.write(tmp_path_factory.mktemp("model"), SMALL, shards=2)


@pytest.fixture(scope="module")
def spread(directory):
    return load_model(directory, num_devices=DEVICES)


def test_each_device_has_its_part_from_the_start(directory, spread):
    whole, _ = load_model(directory)
    params, config = spread
    assert config == dataclasses.replace(SMALL, vocab_padding=1)
    specs = named_arrays(sharding.params_specs(params, DEVICES))
    split = set()
    for name, value in named_arrays(params).items():
        want = np.asarray(named_arrays(whole)[name])
        np.testing.assert_array_equal(np.asarray(value)[tuple(map(slice, want.shape))], want)
        assert value.sharding.spec == specs[name]
        parts = {shard.data.size * DEVICES == value.size for shard in value.addressable_shards}
        split |= {name} if parts == {True} else set()
    assert {"embedding", "head", "layers.query", "mtp.layers.down"} <= split
    assert "final_norm" not in split
    each = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(params))
    assert weight_bytes(config, DEVICES) == each
    caches = init_cache(config, 3, 20), init_cache(dataclasses.replace(config, num_layers=1), 3, 20)
    made = sum(x.nbytes for x in jax.tree.leaves(caches)) // DEVICES  # two heads: one a device
    assert cache_bytes(config, 3, 20, DEVICES) == made


def test_too_little_memory_on_each_device_is_said(directory, monkeypatch):
    model = dataclasses.replace(open_model(directory), config=sharding.padded(SMALL, DEVICES))
    available = mock.Mock(return_value=needed_bytes(model, 4, 64, DEVICES) - 1)
    monkeypatch.setattr("jax_specdec.device.model.memory.available_bytes", available)
    with pytest.raises(InsufficientMemory, match="GiB on each of 2 devices in float32"):
        load_model(directory, num_devices=DEVICES, num_slots=4, max_length=64)
    available.assert_called_once_with(DEVICES)  # on a CPU they share the machine's memory


@pytest.mark.slow
def test_requests_get_what_one_device_gives(directory, spread):
    """Ids are equal, logprobs up to the order of sums; in every mode, with changes of logits."""
    params, config = spread
    # What padding holds reaches no result: these logits would be the largest.
    params = dataclasses.replace(params, head=params.head.at[:, V:].set(100.0))
    top = {"logprobs": V - 1, "max_tokens": 15, "entropy": True, "log_sum_exp": True}
    cut = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "extra_token_ids": (7, V - 1)}
    changes = {
        "repetition_penalty": 1.3, "presence_penalty": -0.4, "frequency_penalty": -0.3,
        "min_tokens": 15, "logit_bias": {7: 1.0, V - 1: 0.5}, "stop_token_ids": (5,),
    }  # fmt: skip
    requests = [
        decoding.request("greedy", range(3, 20), draft_logprobs=True, prompt_logprobs=4, **top),
        decoding.request("sampled", [3, 4], temperature=0.9, top_p=0.9, seed=5, **top),
        decoding.request("plain", [9], temperature=1.0, seed=6, min_p=0.01, **top),
        decoding.request("cut", [3, 4], logprobs_mode=PROCESSED, draft_logprobs=True, **top | cut),
        decoding.request("changed", [5, 7, 9, 5, 7], **top | changes),
        decoding.request("both", [5, 7, 9, 5, 7], **top | changes | cut),
    ]
    parallel = sharding.tensor_parallel(config, DEVICES)
    places = (load_model(directory), sharding.ONE_DEVICE), ((params, config), parallel)
    one, two = (
        decoding.run(requests, MtpDrafter(model[1], 2, where), model=model, parallel=where)
        for model, where in places
    )
    for request in requests:
        assert one.token_ids(request.id) == two.token_ids(request.id)
        for a, b in zip(one.records[request.id], two.records[request.id], strict=True):
            if a.prompt is not None:
                np.testing.assert_allclose(a.prompt.logprobs, b.prompt.logprobs, atol=1e-4, rtol=0)
                np.testing.assert_array_equal(a.prompt.topk_ids, b.prompt.topk_ids)
                continue
            for name in ("logprobs", "entropy", "log_sum_exp"):
                x, y = getattr(a, name), getattr(b, name)
                np.testing.assert_allclose(x, y, atol=1e-4, rtol=0)
            np.testing.assert_array_equal(a.token_ranks, b.token_ranks)
            assert a.num_drafts == b.num_drafts
            if a.draft is not None:
                np.testing.assert_allclose(a.draft.logprobs, b.draft.logprobs, atol=1e-4, rtol=0)
    assert sum(int(output.num_drafts.sum()) for output in one.outputs) > 10
    assert sum(record.num_accepted for record in one.records["changed"]) > 0


def test_an_id_in_the_padding_is_none_of_the_vocabularys(spread):
    params, config = spread
    embed = quick_compile.jit(llama.embed, static_argnums=1)
    rows = embed(params, config, jnp.array([V - 1, V]))
    assert np.isfinite(rows[0]).all()
    assert np.isnan(rows[1]).all()
