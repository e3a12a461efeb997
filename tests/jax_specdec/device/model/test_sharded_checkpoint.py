"""A checkpoint over several devices, of a vocabulary that does not divide among them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_specdec.checkpoint.hf_names import open_model
from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.device.drafting.drafters import MtpDrafter
from jax_specdec.device.model import llama, sharding
from jax_specdec.device.model.checkpoint import load_model
from jax_specdec.device.model.hf_weights import cache_bytes, needed_bytes, weight_bytes
from jax_specdec.device.model.memory import InsufficientMemory
from jax_specdec.device.model.params import init_cache, named_arrays
from tests.support import decoding, hf_files, quick_compile

V, DEVICES = 41, 2
CONFIG = ModelConfig.tiny(
    V, num_layers=1, tie_embeddings=False, norm_in_head=True, qkv_bias=True, head_dim=4
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return hf_files.write(tmp_path_factory.mktemp("model"), CONFIG, shards=2)


@pytest.fixture(scope="module")
def spread(directory):
    return load_model(directory, num_devices=DEVICES)


def test_each_device_has_its_part_from_the_start(directory, spread):
    whole, _ = load_model(directory)
    params, config = spread
    assert config == dataclasses.replace(CONFIG, vocab_padding=1)
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
    model = dataclasses.replace(open_model(directory), config=sharding.padded(CONFIG, DEVICES))
    needed = needed_bytes(model, 4, 64, DEVICES)
    asked = []

    def available(sharers):
        asked.append(sharers)
        return needed - 1

    monkeypatch.setattr("jax_specdec.device.model.memory.available_bytes", available)
    with pytest.raises(InsufficientMemory, match="GiB on each of 2 devices in float32"):
        load_model(directory, num_devices=DEVICES, num_slots=4, max_length=64)
    assert asked == [DEVICES]  # on a CPU they share the machine's memory


@pytest.mark.slow
def test_requests_get_what_one_device_gives(directory, spread):
    params, config = spread
    # What padding holds reaches no result: these logits would be the largest.
    params = dataclasses.replace(params, head=params.head.at[:, V:].set(100.0))
    top = {"logprobs": V - 1, "max_tokens": 15}
    requests = [
        decoding.request("greedy", range(3, 20), **top),
        decoding.request("sampled", [3, 4], temperature=0.9, top_p=0.9, seed=5, **top),
        decoding.request("plain", [9], temperature=1.0, seed=6, **top),
    ]
    parallel = sharding.tensor_parallel(config, DEVICES)
    runs = []
    one_device = load_model(directory), sharding.ONE_DEVICE
    for model, where in (one_device, ((params, config), parallel)):
        drafter = MtpDrafter(model[1], 2, where)
        runs.append(decoding.run(requests, drafter, model=model, parallel=where))
    one, two = runs
    for request in requests:
        assert one.token_ids(request.id) == two.token_ids(request.id)
        got, want = (
            np.concatenate([record.logprobs for record in run.records[request.id]])
            for run in (two, one)
        )
        assert want.shape == (15, V)
        np.testing.assert_allclose(got, want, atol=1e-4, rtol=0)
    drafted = [sum(int(output.num_drafts.sum()) for output in run.outputs) for run in runs]
    assert drafted[0] == drafted[1] > 10


def test_an_id_in_the_padding_is_none_of_the_vocabularys(spread):
    params, config = spread
    embed = quick_compile.jit(llama.embed, static_argnums=1)
    rows = embed(params, config, jnp.array([V - 1, V]))
    assert np.isfinite(rows[0]).all()
    assert np.isnan(rows[1]).all()
