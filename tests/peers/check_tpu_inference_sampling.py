"""tpu-inference's own sampler, rejection sampler and processed logits, and the adapter's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tpu_inference.layers.jax.sample import rejection_sampler, sampling
from tpu_inference.layers.jax.sample.sampling_metadata import TPUSupportedSamplingMetadata
from tpu_inference.spec_decode.jax import utils

from jax_specdec.adapters import tpu_inference
from jax_specdec.adapters.tpu_inference_rows import Lengths
from tests.support.shards import automatic

GREEDY = TPUSupportedSamplingMetadata()
V, N, B = 40, 6, 3  # drafts and requests of a shard
own = rejection_sampler.RejectionSampler
own_process, own_sample = utils.process_and_extend_logits, sampling.sample


# A program is kept by its sampler.
sampler = functools.cache(lambda kind, shape: kind(MESHES[shape]))
MESHES = {(d, m): automatic(data=d, model=m) for d, m in ((1, 1), (2, 1), (2, 2), (1, 4))}


def metadata_of(temperature, top_k, top_p):
    arrays = np.float32(temperature), np.int32(top_k), np.float32(top_p)
    return TPUSupportedSamplingMetadata(*arrays, do_sampling=True, logprobs=True)


def repeated(number, *values):
    return metadata_of(*(np.full(number, x) for x in values))


@settings(max_examples=40)
@given(
    hnp.arrays(np.int8, (2 * N, V), elements=st.integers(-20, 20)),
    hnp.arrays(np.int32, (2, B), elements=st.integers(0, N // B)),
    hnp.arrays(np.int32, 2 * N, elements=st.sampled_from([0, 1, -999])),
    st.sampled_from([jnp.float32, jnp.bfloat16]),
    st.sampled_from([(2, 1), (2, 2)]),
)
def test_greedy_drafts_of_two_shards_are_theirs(quarters, num, drafts, dtype, shape):
    logits = jnp.asarray(quarters / np.float32(4), dtype)
    # Most drafts are right.
    drafts = np.where(drafts == 0, np.asarray(logits, np.float32).argmax(1), drafts).astype(
        np.int32
    )
    given = drafts, num.reshape(-1), None, logits, np.arange(2 * B, dtype=np.int32)
    found, expected = (
        np.asarray(sampler(kind, shape)(*given, GREEDY)).reshape(2, N + B)
        for kind in (tpu_inference.RejectionSampler, own)
    )
    for shard in range(2):
        real = num[shard].sum()
        np.testing.assert_array_equal(found[shard, :real], expected[shard, :real])
        assert (found[shard, real:N] == -1).all()  # theirs are whatever padding gives
        # Padding that differs costs their last request its bonus token.
        requests = slice(N, N + B - (real < N))
        np.testing.assert_array_equal(found[shard, requests], expected[shard, requests])
        right = (found[shard, :real] == drafts.reshape(2, N)[shard, :real])[real - num[shard, -1] :]
        assert (found[shard, -1] >= 0) == right.all()


def speculate(kind, shape, logits, options, seed, drafts, probs=None, num=None):
    number = drafts.size
    num = np.ones(number, np.int32) if num is None else num
    key = jax.random.key(seed)
    found = sampler(kind, shape)(
        drafts, num, probs, logits, np.full(num.size, V - 1, np.int32), options, key
    )
    return np.asarray(found)


@pytest.mark.parametrize(("shape", "dense"), [((2, 2), False), ((1, 4), True)])
def test_sampled_drafts_are_those_of_one_device_of_each_shard(shape, dense):
    """However the vocabulary is split, and wherever another shard's requests are."""
    draws, twice = np.random.default_rng(1), functools.partial(np.tile, reps=(2, 1))
    logits = twice(draws.normal(0, 2, (16, V)).astype(np.float32))
    probs = twice(draws.dirichlet(np.ones(V), 16).astype(np.float32)) if dense else None
    drafts = np.tile(np.where(draws.random(16) < 0.3, 5, logits[:16].argmax(1)), 2).astype(np.int32)
    num = np.int32([3, 0, 5, 4] * 2)
    options = metadata_of([0.7, 1, 2, -1] * 2, [0, 5, -1, 0] * 2, [0.9, 1, 1, 1] * 2)
    given = logits, options, 7, drafts, probs, num
    found = speculate(tpu_inference.RejectionSampler, shape, *given)
    expected = speculate(tpu_inference.RejectionSampler, (shape[0], 1), *given)
    np.testing.assert_array_equal(found, expected)
    assert (found >= 0).sum() > 8
    if shape[0] == 2:  # two shards of the same requests draw apart
        assert (found[:20] != found[20:]).any()


def of_drawn_tokens(tokens, p):
    """The greatest deviation of frequencies, in standard errors."""
    found = np.bincount(tokens, minlength=p.size) / tokens.size
    error = np.sqrt(np.maximum(p * (1 - p), 1e-9) / tokens.size)
    return (np.abs(found - p) / error).max()


@pytest.mark.parametrize("temperature", [0.4, 2.5])
@pytest.mark.parametrize("dense", [False, True])
def test_drafts_and_processed_logits_have_one_distribution(temperature, dense):
    """The first token of 50,000 requests with a draft each, and of as many without one."""
    number, mesh = 50_000, MESHES[1, 1]
    x = np.random.default_rng(2).normal(0, 2, V).astype(np.float32)
    q = np.random.default_rng(3).dirichlet(np.ones(V)).astype(np.float32)
    drafts = np.random.default_rng(4).choice(V, number, p=q / q.sum()).astype(np.int32)
    logits, options = np.tile(x, (number, 1)), repeated(number, temperature, 30, 0.8)
    probs = np.tile(q, (number, 1)) if dense else None
    if not dense:
        drafts[:] = x.argmax()
    one = repeated(1, temperature, 30, 0.8)
    drafted = Lengths(np.ones(1, np.int32))
    processed = tpu_inference.process_and_extend_logits(mesh, x[None], x[None], drafted, one)[0]
    p = np.asarray(jax.nn.softmax(processed), np.float64)
    emitted = speculate(tpu_inference.RejectionSampler, (1, 1), logits, options, 5, drafts, probs)
    bonus, again = tpu_inference.sample(jax.random.key(6), mesh, logits, options)
    np.testing.assert_array_equal(again[0], processed)
    for tokens in (emitted[:number], np.asarray(bonus)):
        assert of_drawn_tokens(tokens, p) < 5
    # Theirs cuts before it divides: its drafts are of another distribution than its bonus tokens.
    theirs = speculate(own, (1, 1), logits, options, 5, drafts, probs)[:number]
    assert of_drawn_tokens(theirs, p) > 20


def test_a_greedy_request_among_sampled_ones_gets_its_best_token():
    """Theirs divides by its temperature of -1, and draws from what is least likely."""
    logits = np.tile(np.arange(V, dtype=np.float32), (2, 1))
    options, drafts = metadata_of([-1, 1], [0, 0], [1, 1]), np.int32([V - 1, V - 1])
    emitted = speculate(tpu_inference.RejectionSampler, (1, 1), logits, options, 0, drafts)
    assert emitted[0] == V - 1
    assert emitted[2] == V - 1
    theirs = speculate(own, (1, 1), logits, options, 0, drafts)
    assert theirs[0] < 10
    assert theirs[2] == -1


@settings(max_examples=40)
@given(st.data())
def test_processed_logits_are_theirs(data):
    """Where no two logits are equal: at a boundary theirs keep all of the equal ones."""
    order = data.draw(hnp.arrays(np.int32, (4, V), elements=st.integers(0, 10**6)))
    logits = (order.argsort(axis=1) / np.float32(8)).astype(np.float32)
    options = metadata_of(
        data.draw(hnp.arrays(np.float32, 2, elements=st.sampled_from([0.5, 1, 4]))),
        data.draw(hnp.arrays(np.int32, 2, elements=st.integers(-1, V))),
        data.draw(hnp.arrays(np.float32, 2, elements=st.sampled_from([0.3, 0.77, 1]))),
    )
    bonus = np.zeros((2, V), np.float32)
    lengths = Lengths(np.int32([data.draw(st.integers(0, 4)), 4]))
    given = MESHES[1, 1], logits, bonus, lengths, options
    found, expected = (f(*given) for f in (tpu_inference.process_and_extend_logits, own_process))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    key = jax.random.key(0)
    found, expected = (
        f(key, MESHES[1, 4], logits[:2], options)[1] for f in (tpu_inference.sample, own_sample)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_quarter_of_their_memory_is_needed():
    """What the programs for 64 drafts need beside their arguments."""
    shapes = (
        ((64,), jnp.int32),
        ((16,), jnp.int32),
        ((64, 32_000), jnp.bfloat16),
        ((16,), jnp.int32),
    )
    drafts, num, logits, bonus = (jax.ShapeDtypeStruct(*shape) for shape in shapes)
    last, key = (bonus, repeated(16, 1, 20, 0.9)), jax.random.key(0)
    needed = []
    for kind in (tpu_inference.RejectionSampler, own):
        lowered = kind.forward.lower(sampler(kind, (1, 1)), drafts, num, None, logits, *last, key)
        needed.append(lowered.compile().memory_analysis().temp_size_in_bytes)
    assert 4 * needed[0] < needed[1]


def test_a_key_is_asked_for():
    with pytest.raises(ValueError, match="key must be provided"):
        tpu_inference.RejectionSampler(MESHES[1, 1])(
            np.int32([1]),
            np.int32([1]),
            None,
            np.zeros((1, V), np.float32),
            np.int32([2]),
            repeated(1, 1, 0, 1),
        )
