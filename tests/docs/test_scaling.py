"""The formulas of `tests.support.scaling` against compiled programs, and the page against them."""

import jax
import jax.numpy as jnp
import pytest

from jax_specdec.device.model import sharding
from pallas_kernels import topk_logprobs
from pallas_kernels.backends import groups
from pallas_kernels.sampling import distribution
from pallas_kernels.sampling import drafts as drawing
from pallas_kernels.sampling.drafts import draw
from pallas_kernels.sampling.parameters import Sampling
from pallas_kernels.sampling.types import Drafts
from pallas_kernels.sampling.verification import verify
from tests.support import quick_compile, scaling
from tests.support.collectives import bytes_of_a_run, of_a_run
from tests.support.paths import ROOT
from tests.support.shards import mesh_of

PAGE = ROOT / "docs" / "scaling.md"


def compiled(function, *shapes):
    return jax.jit(function).lower(*shapes).compile(compiler_options=quick_compile.OPTIONS)


def pluralize(function, *shapes):
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


@pytest.mark.parametrize(("shards", "rows", "k", "chosen"), [(2, 5, 7, 0), (4, 24, 20, 3)])
def test_logprobs(shards, rows, k, chosen):
    mesh = mesh_of(shards)
    found = pluralize(
        lambda x, ids, more: topk_logprobs(
            x, ids, k, extra_token_ids=more, mesh=mesh, axis_name="model"
        ),
        array(rows, 4096, dtype=jnp.bfloat16),
        array(rows, dtype=jnp.int32),
        array(rows, chosen, dtype=jnp.int32),
    )
    assert found == sum(scaling.logprob_bytes(rows, k, chosen, shards))


# On two shards, of which one holds whole groups. No row of so few tokens needs a search.
BATCH, DRAFTS, VOCAB = 3, 2, 1000
SETUP = scaling.Setup(devices=2, slots=BATCH, drafts=DRAFTS, vocabulary=VOCAB, item_bytes=4)


@pytest.fixture(scope="module")
def verified_and_drawn():
    """A program that verifies and drafts on two devices."""
    batch, drafts, vocab = BATCH, DRAFTS, VOCAB
    parallel = sharding.Parallel(mesh_of(2))
    sampling = jax.eval_shape(lambda: Sampling.greedy(batch))
    proposed = jax.eval_shape(lambda: Drafts.none(batch, drafts, vocab))
    columns = array(batch, drafts + 1, vocab), array(batch, drafts, vocab)

    def step(x, draft_logits, proposed, sampling, positions):
        verified = verify(x, proposed, sampling, positions, **parallel.columns)
        drawn = [
            draw(draft_logits[:, i : i + 1], sampling, positions, **parallel.columns)
            for i in range(drafts)
        ]
        return verified, drawn

    return compiled(step, *columns, proposed, sampling, array(batch, dtype=jnp.int32))


@pytest.mark.slow  # a program of half a minute
def test_verification_and_drafting(verified_and_drawn):
    # The dearest and the cheapest way through: every request samples and truncates, or is greedy.
    most, least = (bytes_of_a_run(verified_and_drawn, branch=way) for way in (max, min))
    assert most == sum(scaling.verification_bytes(SETUP)) + scaling.drafting_bytes(SETUP)
    assert least == scaling.greedy_bytes(SETUP.rows, BATCH * DRAFTS)


@pytest.mark.slow
def test_collectives_of_a_sampled_step(verified_and_drawn):
    def sampled(one):  # no draft is chosen greedily, and all rows are valid
        return not any(name in one.op_name for name in ("jit(choose)", "invalid_rows"))

    assert of_a_run(verified_and_drawn, sampled) == scaling.sampled_collectives(SETUP)
    assert scaling.sampled_collectives(scaling.Setup()) <= 8  # with three drafts
    # An invalid row takes a greedy choice of its own, whose validity nobody asks for.
    assert of_a_run(verified_and_drawn, lambda one: "invalid_rows" in one.op_name) == 2
