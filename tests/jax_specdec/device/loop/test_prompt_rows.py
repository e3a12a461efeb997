"""A prompt's logprobs from hidden states: those of its logits, which are not there."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipc.wire import LogprobsMode
from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.device.drafting.drafters import NoDrafter
from jax_specdec.device.loop import prompt_rows
from jax_specdec.device.loop.state import LoopConfig
from jax_specdec.device.messages.batch_options import options_of_requests, widths_of
from jax_specdec.device.messages.pack import Rows
from jax_specdec.device.messages.row_logprobs import row_logprobs
from jax_specdec.device.model import llama, sharding
from jax_specdec.device.model.params import init_params
from jax_specdec.requests import SamplingParams
from pallas_kernels.linear import schedule as schedules
from tests.support import quick_compile
from tests.support.decoding import random_model

P, NUM = 20, 17
SCALED, PROCESSED = LogprobsMode.SCALED, LogprobsMode.PROCESSED
RAW = SamplingParams(logprobs=5, extra_token_ids=(3, 999, 3))


def loop_of(model, parallel=sharding.ONE_DEVICE):
    return LoopConfig(model, NoDrafter(0), num_slots=1, max_length=32, parallel=parallel)


def chunk_of(model):
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(P, model.hidden_size)), model.dtype)
    ids = jnp.asarray(rng.integers(0, model.vocab_size, P), jnp.int32)
    return hidden, ids, jnp.int32(NUM)


def found_of(config, params, asking, compiler=quick_compile.jit):
    widths = widths_of([asking], config.model.vocab_size)
    call = partial(prompt_rows.prompt_rows, config, widths=widths)
    return compiler(call)(
        params, *chunk_of(config.model), options=options_of_requests([asking], widths)
    )


def of_logits(model, params, asking):
    """The same from all of the chunk's logits."""
    widths = widths_of([asking], model.vocab_size)
    hidden, ids, num = chunk_of(model)
    index = jnp.arange(P, dtype=jnp.int32)
    rows = Rows(jnp.where(index < num, index, P), num)

    def call(params, hidden, ids, asked):
        logits = llama.logits(params, model, hidden)[None]
        return row_logprobs(logits, ids[None], rows, asked, widths)

    return quick_compile.jit(call)(params, hidden, ids, options_of_requests([asking], widths))


def assert_same(found, expected, atol=1e-5):
    np.testing.assert_array_equal(found.token_ids, expected.token_ids)
    np.testing.assert_array_equal(found.token_ranks, expected.token_ranks)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=atol)
    np.testing.assert_allclose(found.extra_logprobs, expected.extra_logprobs, atol=atol)


@pytest.fixture
def in_parts(monkeypatch):
    """Few logits too are read a part at a time."""
    monkeypatch.setattr(schedules, "FEW_BYTES", 0)
    monkeypatch.setattr(prompt_rows, "LOGITS_BYTES", 4 * 1000 * 7)


@pytest.mark.parametrize(
    ("asking", "changes"),
    [
        (RAW, {"tie_embeddings": False, "logit_softcap": 4.0}),
        (SamplingParams(logprobs=5, temperature=0.7, logprobs_mode=SCALED, extra_token_ids=(3,)),
         {"norm_in_head": True, "dtype": "bfloat16"}),
        (SamplingParams(logprobs=5, temperature=0.7, top_p=0.8, logprobs_mode=PROCESSED), {}),
    ],
    ids=["raw", "scaled", "processed"],
)  # fmt: skip
def test_they_are_those_of_the_chunks_logits(asking, changes, in_parts):
    """With heads [E, V] and [V, E], in blocks of 7 positions where logits are needed."""
    params, model = random_model(1000, **changes)
    atol = 0.1 if model.dtype == "bfloat16" else 1e-5
    found, expected = found_of(loop_of(model), params, asking), of_logits(model, params, asking)
    assert found.token_ids.shape == (P, asking.logprobs + 1)
    assert np.isnan(found.logprobs[NUM:]).all()
    if model.dtype == "float32":
        assert_same(found, expected)
    # A float32 sum of another order may be rounded to a neighbour in bfloat16.
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=atol)
    differ = np.count_nonzero(np.asarray(found.token_ids) != np.asarray(expected.token_ids))
    assert differ <= 2, f"{differ} ids differ"


def test_over_two_devices(in_parts):
    """Each has half of the head's columns, the last of them padding."""
    params, model = random_model(999, tie_embeddings=False)
    asking = SamplingParams(logprobs=5, temperature=0.7, top_k=4)
    padded = sharding.padded(model, 2)
    parallel = sharding.tensor_parallel(padded, 2)
    wide = replace(
        params,
        embedding=jnp.pad(params.embedding, ((0, 1), (0, 0))),
        head=jnp.pad(params.head, ((0, 0), (0, 1))),
    )
    placed = parallel.place(wide, sharding.params_specs(wide, 2))
    found = found_of(loop_of(padded, parallel), placed, asking)
    assert_same(found, of_logits(model, params, asking))


def program_of(call, count, model, *arrays):
    """The compiled program's text."""
    hidden = jax.ShapeDtypeStruct((count, model.hidden_size), model.dtype)
    ids = jax.ShapeDtypeStruct((count,), jnp.int32)
    params = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    lowered = jax.jit(call).lower(params, hidden, ids, jax.ShapeDtypeStruct((), jnp.int32), *arrays)
    return lowered.compile(quick_compile.UNOPTIMIZED).as_text()


def copies(text, *shape):
    """Arrays of the shape, or transposed, that are no parameter of the program and alias none."""
    axes = "|".join((",".join(map(str, shape)), ",".join(map(str, shape[::-1]))))
    made = rf"= \w+\[({axes})\]\S* (?!parameter|get-tuple-element|bitcast)\w"
    return re.findall(made, text)


def test_neither_the_chunks_logits_nor_another_head_is_made():
    """Of a chunk whose float32 logits are more than 48 MiB."""
    count, vocab = 520, 32_768
    model = ModelConfig.tiny(vocab_size=vocab, tie_embeddings=False)
    assert 4 * count * vocab > schedules.FEW_BYTES
    asking = SamplingParams(logprobs=20)
    widths = widths_of([asking], vocab)
    call = partial(prompt_rows.prompt_rows, loop_of(model), widths=widths)
    asked = jax.eval_shape(lambda: options_of_requests([asking], widths))
    text = program_of(lambda *arrays: call(*arrays[:-1], options=arrays[-1]), count, model, asked)
    assert not copies(text, count, vocab)
    assert not copies(text, vocab, model.hidden_size)

    def plain(params, hidden, ids, num):
        """Negative control: what the check would see."""
        return llama.logits(params, model, hidden)[:, :5] * 2

    assert copies(program_of(plain, count, model), count, vocab)
