"""Draws where a row has many groups of tokens: their distribution, and what spoils it.

A group has 256 tokens, so these rows have several. Every filter, with no draft, a certain one and a
drawn one; then rules and noise that are broken on purpose.
"""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jax_specdec.device.drafting.drawing import draw, none_drawn
from jax_specdec.device.sampling import residual, row_read
from jax_specdec.device.sampling import verify as verify_module
from jax_specdec.device.sampling.parameters import Sampling
from jax_specdec.device.sampling.random_draws import RECOVER
from jax_specdec.device.sampling.verify import Drafts, accept_draft, verify
from pallas_kernels import GroupSums
from tests.jax_specdec.device.sampling.test_distribution import expected_probs
from tests.support import quick_compile

V, SLOTS = 1100, 6000  # five groups, the last one short
FILTERS = {
    "none": {},
    "top-k": {"top_k": 300},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.05},
    "all": {"temperature": 0.7, "top_k": 500, "top_p": 0.95, "min_p": 0.001},
}


@functools.cache
def rows():
    """A row of the target's logits [V], and one of a draft model that is much like it."""
    rng = np.random.default_rng(3)
    target = rng.normal(0, 1.5, V).astype(np.float32)
    # One group holds half of the mass, so a draw that takes a wrong group shows.
    target[256:512] += 2
    target[:4] += 5  # ids that are numbers of groups too, see the noise that is used twice
    return target, (target + rng.normal(0, 0.8, V)).astype(np.float32)


def sampling_of(count, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    return Sampling(
        temperature=jnp.full(count, temperature, jnp.float32),
        top_k=jnp.full(count, top_k, jnp.int32),
        top_p=jnp.full(count, top_p, jnp.float32),
        min_p=jnp.full(count, min_p, jnp.float32),
        seed=jnp.arange(count, dtype=jnp.uint32),
    )


def first_tokens(kind, accept=accept_draft, jit=quick_compile.jit, **filters):
    """The first token of each of many slots, and how many drafts were accepted."""
    sampling, positions = sampling_of(SLOTS, **filters), jnp.full(SLOTS, 5, jnp.int32)

    @jit
    def call(target, draft):
        logits = jnp.broadcast_to(target, (SLOTS, 2, V))
        if kind == "drawn":
            drafts = draw(jnp.broadcast_to(draft, (SLOTS, 1, V)), sampling, positions)
        else:
            likely = jnp.argsort(-target)[:1].astype(jnp.int32)
            ids = jnp.broadcast_to(likely, (SLOTS, 1))
            drafts = Drafts(ids, jnp.full(SLOTS, int(kind == "certain"), jnp.int32))
        found = verify(logits, drafts, sampling, positions, accept=accept)
        return found.token_ids[:, 0], found.num_tokens - 1

    ids, accepted = call(*map(jnp.asarray, rows()))
    return np.asarray(ids), int(accepted.sum())


def p_value(ids, **filters):
    """Of a chi-square test: tokens that are seldom in one cell."""
    given = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters
    wanted = expected_probs(rows()[0], *given.values()) * len(ids)
    observed = np.bincount(ids, minlength=V)
    if observed[wanted == 0].any():
        return 0.0
    often = wanted >= 5
    cells = np.array([*observed[often], observed[~often].sum()])
    expected = np.array([*wanted[often], wanted[~often].sum()])
    return stats.chisquare(cells[expected > 0], expected[expected > 0]).pvalue


CASES = [
    ("no draft", "none"), ("certain", "top-k"), ("drawn", "all"),
    *(
        pytest.param(kind, name, marks=pytest.mark.slow)
        for kind in ("no draft", "certain", "drawn")
        for name in FILTERS
        if (kind, name) not in {("no draft", "none"), ("certain", "top-k"), ("drawn", "all")}
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_tokens_follow_the_targets_distribution(kind, name):
    ids, accepted = first_tokens(kind, **FILTERS[name])
    assert p_value(ids, **FILTERS[name]) > 1e-3
    assert (accepted > 0) == (kind != "no draft")


def test_a_broken_acceptance_rule_is_noticed():
    ids, _ = first_tokens("certain", accept=lambda u, p, q: u < 0.5)
    assert p_value(ids) < 1e-9


def test_noise_that_is_used_twice_is_noticed():
    """A group's noise is that of a token: the same key, and numbers that are ids."""
    with mock.patch.object(verify_module, "GROUP", RECOVER):
        ids, _ = first_tokens("no draft", jit=jax.jit)
    assert p_value(ids) < 1e-6


def test_a_group_sum_that_forgets_a_token_is_noticed():
    """The sum of the group with the likeliest token, without it."""
    read = row_read.read
    target = rows()[0]
    group = int(target.argmax()) // 256

    def forgetful(*arguments, **options):
        found = read(*arguments, **options)
        sums = found.groups.sums.at[:, group].add(-1.0)
        return found._replace(groups=GroupSums(found.groups.maxima, sums))

    with mock.patch.object(row_read, "read", forgetful):
        ids, _ = first_tokens("no draft")
    assert p_value(ids) < 1e-6


def test_a_residual_that_keeps_the_rejected_token_is_noticed():
    taken = residual._without_taken

    def nothing_taken(logits, sums, drawing, inverse):
        return taken(logits, sums, drawing._replace(taken_ids=drawing.taken_ids * 0 - 1), inverse)

    with mock.patch.object(residual, "_without_taken", nothing_taken):
        ids, _ = first_tokens("certain")
    assert p_value(ids) < 1e-6


def test_drafts_from_the_likeliest_tokens_are_accepted_as_often():
    """q among 64 tokens, beside the whole q: acceptance is the sum of min(p, q)."""
    rng = np.random.default_rng(0)
    ranks = np.arange(1, 30_001)
    kept, whole = [], []
    for slope in (2.0, 2.4, 3.0):  # flatter rows lose more: docs/drafters.md
        logits = rng.permutation(-slope * np.log(ranks))
        draft = logits + rng.normal(0, 0.5, len(ranks))
        p, q = (np.exp(x) / np.exp(x).sum() for x in (logits, draft))
        row = jnp.asarray(draft, jnp.float32)[None, None]
        found = draw(row, sampling_of(1), jnp.zeros(1, jnp.int32)).q
        compact = np.zeros(len(ranks))
        compact[np.asarray(found.ids)[0, 0]] = np.exp(np.asarray(found.logprobs)[0, 0])
        np.testing.assert_allclose(compact.sum(), 1, atol=1e-5)
        kept.append(np.minimum(p, compact).sum())
        whole.append(np.minimum(p, q).sum())
    assert np.mean(kept) >= 0.99 * np.mean(whole)


def test_an_empty_proposal_has_a_q_of_its_shape():
    drafts = none_drawn(3, 2, V)
    found = draw(jnp.zeros((3, 1, V)), sampling_of(3), jnp.zeros(3, jnp.int32))
    assert drafts.q.ids.shape[2:] == found.q.ids.shape[2:]
