"""sglang-jax's own sampler and the adapter: logprobs, lists, and what `install` changes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sgl_jax.srt.layers import sampler as sampling
from sgl_jax.srt.layers.logits_processor import LogitsProcessorOutput
from sgl_jax.srt.layers.sampler import Sampler
from sgl_jax.srt.model_executor.model_runner import ModelRunner
from sgl_jax.srt.sampling.sampling_batch_info import SamplingMetadata

from jax_specdec.adapters import sglang_jax

# Its path for CPUs can't be traced: a filter of two operands gets three.
sampling.is_tpu_runtime = lambda: True
own_sample = ModelRunner.sample
B, V = 3, 20
FIELDS = [field.name for field in dataclasses.fields(LogitsProcessorOutput)]


def metadata(nums=None, ids=None, *, greedy=True, penalty=None, temperature=1.0, logprobs=True):
    return SamplingMetadata(
        return_logprob=logprobs,
        top_logprobs_nums=nums,
        token_ids_logprobs=ids,
        temperatures=jnp.broadcast_to(jnp.asarray(temperature, jnp.float32).reshape(-1, 1), (B, 1)),
        top_ps=jnp.ones(B),
        top_ks=jnp.full(B, V),
        min_ps=jnp.zeros(B),
        sampling_seeds=jnp.arange(B),
        is_all_greedy=greedy,
        do_penalties=penalty is not None,
        linear_penalty=penalty,
    )


def theirs(logits, asked, token_ids):
    """What their sampler computes; outside of jit, where its lists can be made."""
    output, sampler = LogitsProcessorOutput(logits), Sampler(nnx.Rngs(0))
    if asked.do_penalties:
        logits = sampler._apply_linear_penalty((logits, asked))
    if asked.is_all_greedy:
        logprobs = sampler._greedy_sampling((logits, asked, None, None))[1]
    else:
        place = (logits, asked, jnp.arange(B), jax.random.key(0))
        logprobs = sampler._regular_sampling(place)[1]
    sampler._process_logprob_results((output, asked, token_ids, logprobs))
    return output


@settings(max_examples=40)
@given(
    # Different logits: the order of ties is not theirs to promise.
    hnp.arrays(np.int16, (B, V), elements=st.integers(-999, 999), unique=True),
    hnp.arrays(np.int32, B, elements=st.integers(0, V - 1)),
    st.sampled_from([None, [0, 0, 0], [2, 0, 5]]),
    st.sampled_from([None, [None] * B, [[3], None, [0, 19, 4]]]),
    st.booleans(),
    st.booleans(),
)
def test_logprobs_and_lists_are_those_of_their_sampler(logits, tokens, nums, ids, greedy, penalty):
    logits = jnp.asarray(logits / np.float32(64))
    asked = metadata(
        nums,
        ids,
        greedy=greedy,
        temperature=[1.0, 0.5, 2.0],
        penalty=jnp.linspace(-1, 1, B * V).reshape(B, V) if penalty else None,
    )
    expected, found = theirs(logits, asked, jnp.asarray(tokens)), LogitsProcessorOutput(logits)
    sglang_jax.add_logprobs(found, asked, jnp.asarray(tokens))
    for name in FIELDS:
        one, other = getattr(expected, name), getattr(found, name)
        assert (one is None) == (other is None), name
        for x, y in zip(() if one is None else one, () if other is None else other, strict=True):
            assert np.shape(x) == np.shape(y)
            np.testing.assert_allclose(y, x, rtol=1e-5, atol=1e-5)


class Runner(ModelRunner):
    """Theirs with a sampler and without a model."""

    def __init__(self):
        self.sampler, self.model = Sampler(nnx.Rngs(0)), nnx.Linear(1, 1, rngs=nnx.Rngs(0))
        self.initialize_jit()


@pytest.mark.parametrize("greedy", [True, False])
def test_a_runner_hands_over_logprobs_of_the_same_tokens(greedy):
    logits = jax.random.normal(jax.random.key(1), (B, V))
    runner, places = Runner(), jnp.arange(B)
    plain = metadata(greedy=greedy, logprobs=False)
    expected = runner.sample(LogitsProcessorOutput(logits), plain, places)
    asked, output = metadata([1, 0, 2], greedy=greedy), LogitsProcessorOutput(logits)
    silent = LogitsProcessorOutput(logits)
    with sglang_jax.install() as names:
        assert names == ("sgl_jax.srt.model_executor.model_runner.ModelRunner.sample",)
        for one, how in ((output, asked), (silent, plain)):
            np.testing.assert_array_equal(runner.sample(one, how, places), expected)
    assert ModelRunner.sample is own_sample
    assert silent.next_token_logprobs is None
    of_drawn = jax.nn.log_softmax(logits)[np.arange(B), expected]
    np.testing.assert_allclose(output.next_token_logprobs, of_drawn, rtol=1e-5, atol=1e-5)
    assert list(map(len, output.next_token_top_logprobs_idx)) == [1, 0, 2]
    # Their own call, jitted, keeps nothing of what it computes, or can't be traced.
    own = LogitsProcessorOutput(logits)
    runner.sample(own, metadata(greedy=greedy), places)
    assert own.next_token_logprobs is None
    with pytest.raises(jax.errors.ConcretizationTypeError):
        runner.sample(own, asked, places)


def test_too_many_ids_are_refused():
    output = LogitsProcessorOutput(jnp.zeros((B, V)))
    with pytest.raises(ValueError, match="512"):
        sglang_jax.add_logprobs(output, metadata(ids=[[1] * 513] * B), jnp.zeros(B, jnp.int32))
