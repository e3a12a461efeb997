"""The formulas of bench.scaling against compiled programs, and the page's tables against them."""

import functools

import jax
import jax.numpy as jnp
import pytest

from bench import scaling
from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.device.model import sharding
from jax_specdec.device.model.llama import forward
from jax_specdec.device.model.params import init_cache
from pallas_kernels import topk_logprobs
from pallas_kernels.backends import groups
from pallas_kernels.sampling import distribution, row_cuts
from pallas_kernels.sampling import drafts as drawing
from pallas_kernels.sampling.drafts import draw, none_drawn
from pallas_kernels.sampling.parameters import Sampling
from pallas_kernels.sampling.verification import verify
from tests.support import quick_compile
from tests.support.collectives import bytes_of_a_run, of_a_run
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
def test_constants_are_those_of_the_code():
    assert scaling.GROUP == groups.WIDTH
    assert scaling.CANDIDATES == groups.MANY
    assert scaling.MOST_CANDIDATES == distribution.MOST_CANDIDATES
    assert scaling.DRAFT_TOKENS == drawing.MOST_TOKENS
    for vocabulary in (2, 1000, 1024, 32_000, 128_256, 262_144):
        assert scaling.gap_words(vocabulary) == row_cuts.num_words(vocabulary)


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


# On two shards: one holds whole groups, one does not. No row of so few tokens needs a search.
CASES = [
    (3, 2, 1000, jnp.float32),
    pytest.param((5, 1, 1024, jnp.float32), marks=pytest.mark.slow),
]


@functools.cache
def verified_and_drawn(batch, drafts, vocab, dtype):
    """A program that verifies and drafts on two devices."""
    parallel = sharding.Parallel(mesh_of(2))
    sampling = jax.eval_shape(lambda: Sampling.greedy(batch))
    proposed = jax.eval_shape(lambda: none_drawn(batch, drafts, vocab))
    columns = array(batch, drafts + 1, vocab, dtype=dtype), array(batch, drafts, vocab, dtype=dtype)

    def step(x, draft_logits, proposed, sampling, positions):
        verified = verify(x, proposed, sampling, positions, **parallel.columns)
        drawn = [
            draw(draft_logits[:, i : i + 1], sampling, positions, **parallel.columns)
            for i in range(drafts)
        ]
        return verified, drawn

    return compiled(step, *columns, proposed, sampling, array(batch, dtype=jnp.int32))


def setup_of(batch, drafts, vocab, dtype):
    return scaling.Setup(
        devices=2, slots=batch, drafts=drafts, vocabulary=vocab,
        item_bytes=jnp.dtype(dtype).itemsize,
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_verification_and_drafting(case):
    setup = setup_of(*case)
    # The dearest and the cheapest way through: every request samples and truncates, or is greedy.
    most, least = (bytes_of_a_run(verified_and_drawn(*case), branch=way) for way in (max, min))
    drafting = scaling.drafting_bytes(setup)
    assert most == sum(scaling.verification_bytes(setup)) + drafting
    assert least == scaling.greedy_bytes(setup.rows, setup.slots * setup.drafts)


@pytest.mark.parametrize("case", CASES)
def test_collectives_of_a_sampled_step(case):
    def sampled(one):  # no draft is chosen greedily, and all rows are valid
        return not any(name in one.op_name for name in ("jit(choose)", "invalid_rows"))

    setup = setup_of(*case)
    found = of_a_run(verified_and_drawn(*case), sampled)
    assert found == scaling.sampled_collectives(setup)
    assert scaling.sampled_collectives(scaling.Setup()) <= 8  # with three drafts
    # An invalid row takes a greedy choice of its own, whose validity nobody asks for.
    assert of_a_run(verified_and_drawn(*case), lambda one: "invalid_rows" in one.op_name) == 2


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
