"""The formulas of bench.scaling against compiled programs, and the page's tables against them."""

import jax
import jax.numpy as jnp
import pytest

from bench import scaling
from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.device.drafting.drafters import draw
from jax_specdec.device.model import sharding
from jax_specdec.device.model.llama import forward
from jax_specdec.device.model.params import init_cache
from jax_specdec.device.sampling import exact_sums, threshold_search
from jax_specdec.device.sampling.distribution import truncation
from jax_specdec.device.sampling.parameters import Sampling, Truncation
from jax_specdec.device.sampling.verify import Drafts, verify
from pallas_kernels import topk_logprobs
from tests.support import quick_compile
from tests.support.collectives import bytes_of_a_run
from tests.support.paths import ROOT
from tests.support.random_params import random_params
from tests.support.shards import mesh_of

PAGE = ROOT / "docs" / "scaling.md"


def compiled(function, *shapes):
    return jax.jit(function).lower(*shapes).compile(compiler_options=quick_compile.OPTIONS)


def counted(function, *shapes):
    """The bytes that the collectives of a call carry."""
    return bytes_of_a_run(compiled(function, *shapes), branch=max)


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.fast
def test_the_page_has_these_numbers():
    text = PAGE.read_text()
    for line in (*scaling.table(), *scaling.sampled_table()):
        assert line in text, line
    setup = scaling.Setup()
    assert f"{scaling.model_sums(setup) / 1e9:.2f} GB" in text
    assert f"{scaling.step_seconds(setup) * 1e3:.1f} ms" in text


@pytest.mark.fast
@pytest.mark.parametrize("vocab", [2, 300, 32_000, 128_256, 262_144])
def test_constants_are_those_of_the_code(vocab):
    assert scaling.num_digits(vocab) == exact_sums.num_digits(vocab)
    assert scaling.BITS_PER_TRIP == threshold_search.BITS_PER_TRIP


@pytest.mark.parametrize(("shards", "rows", "k", "chosen"), [(2, 5, 7, 0), (4, 24, 20, 3)])
def test_logprobs(shards, rows, k, chosen):
    mesh = mesh_of(shards)
    found = counted(
        lambda x, ids, more: topk_logprobs(
            x, ids, k, extra_token_ids=more, mesh=mesh, axis_name="model"
        ),
        array(rows, 4096, dtype=jnp.bfloat16),
        array(rows, dtype=jnp.int32),
        array(rows, chosen, dtype=jnp.int32),
    )
    assert found == sum(scaling.logprob_bytes(rows, k, chosen, shards))


@pytest.mark.parametrize(
    ("batch", "drafts", "vocab", "dtype"), [(3, 2, 4096, jnp.float32), (5, 1, 1000, jnp.bfloat16)]
)
def test_verification_and_drafting(batch, drafts, vocab, dtype):
    parallel = sharding.Parallel(mesh_of(2))
    rows = batch * (drafts + 1)
    setup = scaling.Setup(
        slots=batch, drafts=drafts, vocabulary=vocab, item_bytes=jnp.dtype(dtype).itemsize
    )
    sampling = jax.eval_shape(lambda: Sampling.greedy(batch))
    logits, integers = array(batch, drafts + 1, vocab, dtype=dtype), array(batch, dtype=jnp.int32)

    def cut(x, sampling):
        return parallel.over_vocabulary(
            lambda shard, x, sampling: truncation(x, sampling, shard=shard), x, sampling
        )

    words = scaling.truncation_words(vocab, setup.item_bytes)
    assert counted(cut, logits, sampling) == scaling.WORD * rows * words

    proposed = Drafts(
        array(batch, drafts, dtype=jnp.int32), integers, array(batch, drafts, vocab, dtype=dtype),
        jax.eval_shape(lambda: Truncation.nothing((batch, drafts), vocab)),
    )  # fmt: skip

    def step(x, proposed, sampling, positions):
        verified = verify(x, proposed, sampling, positions, parallel=parallel)
        drawn = [
            draw(proposed.logits[:, i : i + 1], sampling, positions, parallel)
            for i in range(drafts)
        ]
        return verified, drawn

    program = compiled(step, logits, proposed, sampling, integers)
    # The dearest and the cheapest way through: every request samples and truncates, or is greedy.
    most, least = (bytes_of_a_run(program, branch=branch) for branch in (max, min))
    bound = scaling.sampled_bytes(setup)
    assert 0.97 * bound <= most <= bound
    assert least == scaling.greedy_bytes(rows, batch * drafts)


def test_the_models_own_sums():
    config = ModelConfig(
        vocab_size=512, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
        intermediate_size=64,
    )  # fmt: skip
    parallel = sharding.Parallel(mesh_of(2))
    params = random_params(config)
    params = parallel.place(params, sharding.params_specs(params, 2))
    cache = init_cache(config, 3, 16)
    place = sharding.split(cache.k.shape, -2, 2)
    cache = parallel.place(cache, jax.tree.map(lambda _: place, cache))
    tokens = array(3, 4, dtype=jnp.int32)
    found = counted(
        lambda params, tokens, positions, cache: forward(params, config, tokens, positions, cache),
        params, tokens, tokens, cache,
    )  # fmt: skip
    setup = scaling.Setup(devices=2, hidden=32, layers=2, item_bytes=4, slots=3, drafts=3)
    assert scaling.all_reduce(found, 2) == scaling.model_sums(setup)
