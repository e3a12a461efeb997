"""Draws where a row has many groups of tokens: their distribution, and what spoils it.

A group has 256 tokens, so these rows have several. Every filter, with no draft, a certain one and a
drawn one; then a residual and noise that are broken on purpose.
"""

import functools
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.numbers.random_draws import GROUP, RECOVER, Source, gumbel
from pallas_kernels.sampling import Drafts, Sampling, draw, row_draws, row_read, verify
from pallas_kernels.sampling.rows import GroupedRows
from pallas_kernels.sampling.verification import accepted_by_ratio
from tests.support import quick_compile, token_statistics
from tests.support.expected_probs import expected_probs, kept_by_sorting

V, SLOTS, FEW = 1100, 6000, 1500  # five groups, the last one short
NUM_GROUPS, POSITION = 5, 5
FILTERS = {
    "none": {},
    "top-k": {"top_k": 300},
    "few": {"top_k": 40},  # of the candidates, and without groups
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.01},
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


def sampling_of(count, temperature=1.0, **filters):
    return Sampling.of(count, temperature=temperature, **filters, seed=np.arange(count))


@functools.partial(quick_compile.jit, static_argnums=0)
def verified(drawn, target, draft, sampling, num, purpose=GROUP, kept=False):
    """The first token of each slot, and the number of accepted drafts: one program for all tests.

    Args:
      drawn: whether drafts are drawn from the draft model's row [V]; else each is the token that
        the target's row [V] has for the likeliest.
      num: how many drafts each slot has, 0 or 1.
      purpose: of the noise that groups get.
      kept: the rejected token stays in the residual.
    """
    positions = jnp.full(len(num), POSITION, jnp.int32)
    best_group, best_token = row_draws.best_group, row_draws.best_token

    def without_taken(drawing):
        return drawing._replace(excluded_ids=jnp.where(kept, -1, drawing.excluded_ids))

    spoiled = {
        "GROUP": purpose,
        "best_group": lambda *given: best_group(*given[:2], without_taken(given[2])),
        "best_token": lambda drawing, *listed: best_token(without_taken(drawing), *listed),
    }
    with mock.patch.multiple(row_draws, **spoiled):
        if drawn:
            drafts = draw(jnp.broadcast_to(draft, (len(num), 1, V)), sampling, positions)
        else:
            likely = jnp.argmax(target).astype(jnp.int32)
            drafts = Drafts(jnp.broadcast_to(likely, (len(num), 1)), num)
        logits = jnp.broadcast_to(target, (len(num), 2, V))
        # With a rule of one's own, certain drafts have a residual too.
        found = verify(logits, drafts, sampling, positions, accept=accepted_by_ratio)
    return found.token_ids[:, 0], found.num_tokens - 1


def first_tokens(kind, purpose=GROUP, kept=False, slots=FEW, **filters):
    """The first token of each of many slots, and how many drafts were accepted."""
    num = np.full(slots, kind != "no draft", np.int32)
    given = *rows(), sampling_of(slots, **filters), num
    ids, accepted = verified(kind == "drawn", *given, purpose, kept)
    return np.asarray(ids), int(accepted.sum())


def p_value(ids, **filters):
    given = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters
    probs = expected_probs(rows()[0], *given.values())
    return token_statistics.p_value([(token,) for token in ids.tolist()], lambda _: probs)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "name", "slots"),
    [
        ("no draft", "none", FEW), ("certain", "all", FEW), ("certain", "few", FEW),
        *(pytest.param(kind, name, SLOTS, marks=pytest.mark.slow)
          for kind, names in (("no draft", ["none"]), ("certain", ["all", "few", "top-k"]),
                              ("drawn", FILTERS)) for name in names),
    ],
)  # fmt: skip
def test_tokens_follow_the_targets_distribution(kind, name, slots):
    ids, accepted = first_tokens(kind, slots=slots, **FILTERS[name])
    assert p_value(ids, **FILTERS[name]) > 1e-3
    assert (accepted > 0) == (kind != "no draft")


@pytest.mark.long
def test_what_spoils_the_distribution_is_noticed():
    """The rejected token stays in the residual; the noise of groups is that of tokens."""
    for kind, spoiled in (("certain", {"kept": True}), ("no draft", {"purpose": RECOVER})):
        ids, _ = first_tokens(kind, **spoiled)
        assert p_value(ids) < 1e-6


def test_no_group_is_drawn_where_few_tokens_are_kept():
    """Groups that are wrong change the draws of rows that keep many tokens, and no other's."""
    few = np.arange(FEW) % 2 == 0
    top_k = np.where(few, *(FILTERS[name]["top_k"] for name in ("few", "top-k")))
    sound, wrong = (first_tokens("no draft", one, top_k=top_k)[0] for one in (GROUP, RECOVER))
    assert (sound == wrong)[few].all()
    assert (sound != wrong)[~few].any()


@functools.partial(quick_compile.jit, static_argnums=2)
def num_candidates(rows, sampling, k=None):
    return row_read.read_sampled_rows(GroupedRows.of(rows), sampling, k).num_candidates


def test_no_candidates_are_looked_for_where_none_would_do():
    """Of a power law 19 have 0.67 of the weight and 128 0.83; of a steeper one 0.88 and 0.96."""
    ranks = np.random.default_rng(0).permutation(80_000) + 1
    rows = jnp.asarray(np.log(ranks)[None] * [[-1.3], [-1.6]], jnp.float32)
    assert num_candidates(rows, Sampling.of(2, top_p=0.95)).tolist() == [20, 128]


@pytest.mark.parametrize("k", [None, 5, 20, 60, 200])
def test_rows_that_top_p_cuts_short_take_few_candidates(k):
    """20 where fewer are kept, or more than 128: whatever the rows beside it."""
    sizes = [1, 19, 20, 21, 25, 134, 136, 300]  # of equal logits, of which top-p keeps 95 in 100
    x = np.full((len(sizes), 2000), -60, np.float32)
    for row, size in zip(x, sizes, strict=True):
        row[7 : 7 + size] = 1
    few, more = max(k or 0, 20), 128

    def read(rows, **parameters):
        sampling = Sampling.of(len(rows), **{"temperature": 0.7, "top_p": 0.95} | parameters)
        return num_candidates(rows, sampling, k).tolist()

    def needed(most):
        return [few if few < more and not few - 1 <= 0.95 * n <= most else more for n in sizes]

    assert read(x) == needed(most=more)
    assert [read(row[None])[0] for row in x] == read(x)
    assert [read(x, top_k=count) for count in (100, 200, 2000)] == [[100] * 8, [128] * 8, read(x)]
    assert read(x, min_p=0.1) == needed(most=V)
    assert read(x, temperature=0.0) == read(x, top_p=1.0) == [0] * len(sizes)


@quick_compile.jit
def noises(seeds, groups):
    """The noise of all groups [N, G], and of the tokens [N, 256] of these groups [N]."""
    source = Source(seeds, jnp.full(seeds.shape, POSITION, jnp.int32))
    numbers = jnp.broadcast_to(jnp.arange(NUM_GROUPS, dtype=jnp.int32), (len(seeds), NUM_GROUPS))
    ids = groups[:, None] * 256 + jnp.arange(256, dtype=jnp.int32)[None]
    return gumbel(source, GROUP, numbers), gumbel(source, RECOVER, ids)


def decided_in_float64(row, seeds, temperature, kept=True):
    """The tokens [N] that the same noise gives a row [V], and everything else in float64.

    Of those that are `kept` [V].
    """
    missing = NUM_GROUPS * 256 - V
    scaled = (row.astype(np.float64) - row.max()) / np.float32(temperature)
    x = np.pad(np.where(kept, scaled, -np.inf), (0, missing), constant_values=-np.inf).reshape(
        NUM_GROUPS, 256
    )
    of_groups, _ = noises(seeds, jnp.zeros(len(seeds), jnp.int32))
    with np.errstate(divide="ignore"):  # a group of which nothing is kept
        sums = np.log(np.exp(x).sum(axis=1))
    group = (sums + np.asarray(of_groups, np.float64)).argmax(axis=1)
    _, of_tokens = noises(seeds, jnp.asarray(group, jnp.int32))
    return group * 256 + (x[group] + np.asarray(of_tokens, np.float64)).argmax(axis=1)


def cut_row(kind):
    """A row [V] whose groups lose more or less to a cut that keeps 300 tokens."""
    ids = np.arange(V)
    if kind == "ties":  # the first 300: one group whole, and a part of the next
        return np.zeros(V, np.float32)
    if kind == "close":  # one whole, of two a few that are little above the rest, two not at all
        high = (ids < 256) | ((ids < 768) & (ids % 256 < 22))
        return np.where(high, 1, 0.9).astype(np.float32)
    x = np.random.default_rng(9).normal(0, 1, V)
    x[256:512] = x[600:700] = -np.inf
    x[1030] = 6  # much of its group: a draft that is left out
    return x.astype(np.float32)


CUTS = [
    {}, {"top_k": 300}, {"top_k": 257}, {"top_p": 0.6}, {"min_p": 0.92}, {"min_p": 0.3},
    {"temperature": 0.7, "top_k": 400, "top_p": 0.9, "min_p": 0.01},
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ties", "close", "masked"])
def test_a_group_that_a_cut_reaches_has_its_kept_sum(kind):
    """Each token is the one that its noise decides, also where a rejected draft is left out."""
    row, number = cut_row(kind), np.arange(FEW)
    drafted, number = number % 2 == 1, number // 2 % len(CUTS)
    cuts = [{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | cut for cut in CUTS]
    options = {name: np.array([cut[name] for cut in cuts])[number] for name in cuts[0]}
    asked = sampling_of(FEW, **options), drafted.astype(np.int32), GROUP, False
    ids, accepted = map(np.asarray, verified(False, row, row, *asked))
    seeds, num_partly, num_rejected = jnp.arange(FEW, dtype=jnp.uint32), 0, 0
    for n, cut in enumerate(cuts):
        kept, _, near = kept_by_sorting(row, **cut)
        if near or kept.sum() <= 128:  # candidates: none is drawn by its group
            continue
        groups = np.split(kept, range(256, V, 256))
        num_partly += any(0 < group.sum() < len(group) for group in groups)
        for rejected in (False, True):
            slots = (number == n) & (drafted == rejected) & (accepted == 0)
            left = kept & ((np.arange(V) != row.argmax()) | (not rejected))
            expected = decided_in_float64(row, seeds, cut["temperature"], left)
            np.testing.assert_array_equal(ids[slots], expected[slots], err_msg=str(cut))
            num_rejected += rejected * slots.sum()
    assert num_partly >= 2
    assert num_rejected > 100


@pytest.mark.slow
def test_float32_decides_less_than_one_draw_in_100_000():
    """Of 102,000 draws at most one differs from what the same noise decides in float64."""
    rng = np.random.default_rng(7)
    without = jnp.zeros(SLOTS, jnp.int32)
    different = later = 0
    for n in range(17):
        row = rng.normal(0, rng.uniform(0.5, 4), V).astype(np.float32)
        seeds = jnp.arange(SLOTS, dtype=jnp.uint32) + jnp.uint32(n * SLOTS)
        sampling = sampling_of(SLOTS, 0.7)._replace(seed=seeds)
        ids, _ = verified(False, jnp.asarray(row), jnp.asarray(row), sampling, without)
        exact = decided_in_float64(row, seeds, 0.7)
        different += int((np.asarray(ids) != exact).sum())
        # The control: logits that are off by a thousandth.
        off = row + rng.normal(0, 1e-3, V)
        later += int((decided_in_float64(off, seeds, 0.7) != exact).sum()) if n == 0 else 0
    assert different <= 1
    assert later > 1


@pytest.mark.slow
def test_kept_tokens_in_many_groups_draw_the_same():
    """Groups are summed again a few at a time, here two: as often as the kept tokens need."""
    target, draft = map(jnp.asarray, rows())
    without = jnp.zeros(SLOTS, jnp.int32)
    sampling = sampling_of(SLOTS, **FILTERS["top-k"])
    usual, _ = verified(False, target, draft, sampling, without)
    with mock.patch.object(row_draws, "DRAWN_GROUPS", 2):
        again, _ = quick_compile.jit(lambda *given: verified.__wrapped__(False, *given))(
            target, draft, sampling, without
        )
    np.testing.assert_array_equal(usual, again)
    # Two groups alone would not have all of these.
    assert len(set(np.asarray(usual) // 256)) > 2


def test_drafts_from_the_likeliest_tokens_are_accepted_as_often():
    """q among 64 tokens, beside the whole q: acceptance is the sum of min(p, q)."""
    rng = np.random.default_rng(0)
    ranks = np.arange(1, 30_001)
    kept, whole = [], []
    for slope in (2.0, 2.4, 3.0):  # flatter rows lose more: docs/drafters.md
        logits = rng.permutation(-slope * np.log(ranks))
        logits = np.roll(logits, -logits.argmax())  # token 0 is one of them
        draft = logits + rng.normal(0, 0.5, len(ranks))
        p, q = (np.exp(x) / np.exp(x).sum() for x in (logits, draft))
        row = jnp.asarray(draft, jnp.float32)[None, None]
        found = draw(row, sampling_of(1), jnp.zeros(1, jnp.int32)).q
        assert Drafts.none(1, 1, len(ranks)).q.ids.shape == found.ids.shape  # an empty proposal's
        compact = np.zeros(len(ranks))
        compact[np.asarray(found.ids)[0, 0]] = np.exp(np.asarray(found.logprobs)[0, 0])
        np.testing.assert_allclose(compact.sum(), 1, atol=1e-5)
        kept.append(np.minimum(p, compact).sum())
        whole.append(np.minimum(p, q).sum())
    assert np.mean(kept) >= 0.99 * np.mean(whole)
