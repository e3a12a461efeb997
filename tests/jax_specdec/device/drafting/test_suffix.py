"""The suffix drafter and its corpus, against plain Python."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_specdec.device.drafting.corpus import SEPARATOR, Corpus
from jax_specdec.device.drafting.suffix import SuffixDrafter
from tests.support.draft_contexts import compiled, context


def propose(drafter, texts, limit=None, *, length=16):
    """The drafts of slots that hold `texts`, as lists."""
    seen = context(texts, limit or [drafter.num_drafts] * len(texts), length)
    empty, state = drafter.init(len(texts), length)
    drafts, _ = compiled(drafter)(state, seen)
    assert drafts.q is None
    assert (drafts.token_ids.shape, drafts.num.shape) == (empty.token_ids.shape, empty.num.shape)
    assert (drafts.token_ids.dtype, drafts.num.dtype) == (jnp.int32, jnp.int32)
    ids, nums = np.asarray(drafts.token_ids), np.asarray(drafts.num)
    assert (ids[np.arange(ids.shape[1]) >= nums[:, None]] == 0).all()
    return [row[:n].tolist() for row, n in zip(ids, nums, strict=True)]


def common_ending(one, other, most):
    count = 0
    while count < min(len(one), len(other), most) and one[-1 - count] == other[-1 - count]:
        count += 1
    return count


def plain_suffix(text, documents, drafter, limit):
    """The drafts by definition, one place after the other."""
    # (match, place) in the order in which places are looked at.
    own = [(common_ending(text[:i], text, drafter.max_match), i) for i in range(1, len(text))]
    longest = max([match for match, _ in own], default=0)
    places = [text[i:] for match, i in reversed(own) if match == longest > 0]
    places = places[: drafter.max_candidates]
    repeats = True
    if documents:
        flat = [SEPARATOR]
        for document in documents:
            flat += [*document, SEPARATOR]
        most, depth = min(drafter.max_match, drafter.corpus.max_context), 1
        while depth < drafter.corpus.max_context:
            depth *= 2
        ordered = sorted(
            (i for i in range(1, len(flat)) if flat[i] >= 0 and flat[i - 1] >= 0),
            key=lambda i: ([flat[i - n] if i >= n else -2 for n in range(1, depth + 1)], i),
        )
        matches = [common_ending(flat[:i], text, most) for i in ordered]
        best = max(matches, default=0)
        if best > longest:
            longest, repeats = best, False
            places = [flat[i : flat.index(SEPARATOR, i)]
                      for i, m in zip(ordered, matches, strict=True) if m == best]  # fmt: skip
            shown = min(len(places), drafter.max_candidates)
            places = [places[len(places) * which // shown] for which in range(shown)]
    if longest < drafter.min_match:
        return []
    drafts, total = [], len(places)
    most = min(limit, drafter.num_drafts, int(np.float32(longest) * drafter.drafts_per_match))
    while len(drafts) < most:
        ahead = len(drafts)
        following = [(place + drafts if repeats else place)[ahead : ahead + 1] for place in places]
        votes = Counter(token for tokens in following for token in tokens)
        if not votes:
            break
        winner, count = votes.most_common(1)[0]  # of equal ones the first seen
        if np.float32(count) < np.float32(drafter.min_share) * np.float32(total):
            break
        places = [p for p, t in zip(places, following, strict=True) if t == [winner]]
        drafts.append(winner)
    return drafts


def with_corpus(seed, num_drafts=4, max_context=32, **fields):
    """Documents of ids 0 to 2: one is empty, one is a single token, one repeats itself."""
    random = np.random.default_rng(seed)
    sizes = [0, 1, 2, 12, *random.integers(3, 9, 3)]
    documents = [random.integers(0, 3, size).tolist() for size in sizes] + [[1] * 9]
    corpus = Corpus.of([np.array(d, np.int32) for d in documents], max_context=max_context)
    return documents, SuffixDrafter(num_drafts, corpus, **fields)


CASES = [
    ([], SuffixDrafter(4)),
    ([], SuffixDrafter(2, max_match=3, min_match=2, drafts_per_match=0.5, max_candidates=2)),
    with_corpus(0, 5),
    with_corpus(1, max_context=3, max_candidates=3, drafts_per_match=4.0, min_share=0.0),
    with_corpus(2, max_context=1, max_match=6, min_share=0.6, drafts_per_match=2.0),
    with_corpus(3, max_context=7, max_match=5, min_share=1.0, max_candidates=5),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_against_plain_python(case):
    """Texts and limits of every length, and drafts, too."""
    (documents, drafter), random, drafted = CASES[case], np.random.default_rng(case), set()
    for _ in range(3):
        texts = [random.integers(0, 3, random.integers(1, 33)).tolist() for _ in range(64)]
        limits = random.integers(0, drafter.num_drafts + 1, 64).tolist()
        given = zip(texts, limits, strict=True)
        expected = [plain_suffix(text, documents, drafter, most) for text, most in given]
        assert propose(drafter, texts, limits, length=32) == expected
        drafted |= {*map(len, expected)}
    most = min(drafter.num_drafts, int(drafter.max_match * drafter.drafts_per_match))
    assert drafted == {*range(most + 1)}


def test_an_empty_corpus_is_none():
    for documents in ([], [[]], [[7]]):
        corpus = Corpus.of([np.array(d, np.int32) for d in documents])
        assert propose(SuffixDrafter(2, corpus, max_match=4), [[7, 7], [1]]) == [[7], []]


@pytest.mark.fast
def test_a_drafter_is_static_and_equal_content_is_equal():
    one, same, other = (Corpus.of([np.array(d)]) for d in ([1, 2], [1, 2], [1, 3]))
    assert (one, hash(one)) == (same, hash(same))
    assert one != other
    assert Corpus.of([np.array([1, 2])], max_context=4) != one
    assert SuffixDrafter(2, one) == SuffixDrafter(2, same) != SuffixDrafter(2, other)
    traced = []
    call = jax.jit(lambda drafter: traced.append(drafter), static_argnums=0)
    for corpus in (one, same, other):
        call(SuffixDrafter(2, corpus))
    assert traced == [SuffixDrafter(2, one), SuffixDrafter(2, other)]
    assert len(repr(SuffixDrafter(2, one))) < 400  # the arrays stay out of error messages
    with pytest.raises(ValueError, match="read-only"):
        one.text[0] = 7


@pytest.mark.fast
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_drafts": 0}, "must be positive"),
        ({"min_match": 0}, "min_match must be at least 1"),
        ({"min_match": 5, "max_match": 4}, "at most max_match"),
        ({"drafts_per_match": 0.01}, "drafts nothing"),
        ({"drafts_per_match": float("nan")}, "drafts nothing"),
        ({"min_share": 1.5}, "from 0 to 1"),
        ({"max_candidates": 0}, "must be positive"),
    ],
)
def test_a_drafter_that_cannot_work_says_so(fields, message):
    with pytest.raises(ValueError, match=message):
        SuffixDrafter(**{"num_drafts": 2} | fields)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([[1], [3, -1]], "document 1 has ids from -1 to 3"),
        ([[2**31]], "from 0 to 2147483647"),
        ([[[1, 2]]], "a list of integers"),
        ([[0.5]], "a list of integers"),
    ],
)
def test_a_corpus_of_something_else_is_refused(documents, message):
    with pytest.raises(ValueError, match=message):
        Corpus.of([np.array(d) for d in documents])
    with pytest.raises(ValueError, match="at least 1"):
        Corpus.of([], max_context=0)
