"""Twenty updates of the shipped model's weights in real workers, while requests run."""

import itertools
import os
from unittest import mock

import jax
import numpy as np
import pytest

from jax_specdec.checkpoint.shipped import tiny_weights_path
from jax_specdec.device.model import load_checkpoint, named_arrays, save_checkpoint
from jax_specdec.engine import Engine, EngineConfig, Request, SamplingParams, byte_tokens
from jax_specdec.engine.errors import WeightsError
from tests.support import quick_compile
from tests.support.processes import wait_for
from tests.support.weights_by_version import check_scores

pytestmark = pytest.mark.slow
TEXTS = ("def main(", "import ", "class A:\n    ", "for x in ", "return ", "# The ")


@pytest.fixture(autouse=True)
def workers_compile_quickly():
    with mock.patch.dict(os.environ, XLA_FLAGS=quick_compile.FLAGS):
        yield


def nearby(params, rng):
    """Weights a little beside the shipped ones, as after an update of a policy."""

    def moved(x):
        noise = rng.standard_normal(x.shape).astype(np.float32)
        return np.asarray(x) * (1 + 0.05 * noise)

    return jax.tree.map(moved, params)


def numbered_requests():
    for n in itertools.count():
        prompt = byte_tokens.encode(TEXTS[n % len(TEXTS)], start_document=True)
        sampled = {"temperature": 0.8, "top_p": 0.9, "seed": n} if n % 2 else {}
        params = SamplingParams(max_tokens=20 + n % 7, logprobs=n % 3, **sampled)
        yield Request(id=f"r{n}", prompt_token_ids=prompt, params=params)


@pytest.mark.parametrize(
    ("count", "changes"),
    [
        (20, {"num_ranks": 2}),
        (6, {"drafter": "ngram", "num_prefill_ranks": 1}),
        (6, {"drafter": "suffix", "tensor_parallel": 2, "processes": True}),
    ],
    ids=["two ranks, mtp", "prefill apart, ngram", "two processes, suffix"],
)
def test_every_token_of_many_updates_is_of_the_version_it_names(count, changes, tmp_path):
    shipped, config, _ = load_checkpoint(tiny_weights_path())
    rng = np.random.default_rng(7)
    weights, requests = {0: shipped}, numbered_requests()
    settings = EngineConfig(
        vocab_size=byte_tokens.VOCAB_SIZE, num_slots=3, max_length=64, prefill_chunk=16, **changes
    )
    with Engine(settings) as engine:
        open_streams, records, items = [], {}, []

        def submit(how_many):
            for _ in range(how_many):
                items.append(next(requests))
                open_streams.append(engine.submit(items[-1]))

        submit(4)
        for version in range(1, count + 1):
            newest = open_streams[-1]
            wait_for(lambda newest=newest: newest.num_waiting or newest.finish_reason, 200)
            weights[version] = nearby(shipped, rng)
            source = named_arrays(weights[version])
            if version % 3 == 0:
                source = tmp_path / f"{version}.safetensors"
                save_checkpoint(source, weights[version], config)
            assert engine.update_weights(source) == version
            wrong = named_arrays(weights[version]) | {"final_norm": np.ones(3, np.float32)}
            with pytest.raises(WeightsError, match="final_norm has shape"):
                engine.update_weights(wrong)
            submit(2)
            if version % 3 == 0:
                source.unlink()  # nothing needs it any more
        for item, stream in zip(items, open_streams, strict=True):
            records[item.id] = list(stream)
        assert [status.weights_version for status in engine.status] == [count] * len(engine.status)
    assert check_scores(weights, config, items, records, atol=3e-4) == set(weights)
