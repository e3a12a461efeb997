"""The suffix drafter against plain Python."""

from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest

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


def plain_suffix(text, drafter, limit):
    """The drafts by definition, one place after the other."""
    # (match, place) in the order in which places are looked at.
    own = [(common_ending(text[:i], text, drafter.max_match), i) for i in range(1, len(text))]
    longest = max([match for match, _ in own], default=0)
    places = [text[i:] for match, i in reversed(own) if match == longest > 0]
    places = places[: drafter.max_candidates]
    if longest < drafter.min_match:
        return []
    drafts, total = [], len(places)
    most = min(limit, drafter.num_drafts, int(np.float32(longest) * drafter.drafts_per_match))
    while len(drafts) < most:
        following = [(place + drafts)[len(drafts)] for place in places]
        winner, count = Counter(following).most_common(1)[0]  # of equal ones the first seen
        if np.float32(count) < np.float32(drafter.min_share) * np.float32(total):
            break
        places = [p for p, t in zip(places, following, strict=True) if t == winner]
        drafts.append(winner)
    return drafts


CASES = [
    SuffixDrafter(4),
    SuffixDrafter(2, max_match=3, min_match=2, drafts_per_match=0.5, max_candidates=2),
    SuffixDrafter(4, max_match=6, min_share=0.6, drafts_per_match=2.0),
    SuffixDrafter(5, max_candidates=3, drafts_per_match=4.0, min_share=0.0),
    SuffixDrafter(4, max_match=5, min_share=1.0, max_candidates=5),
]


@pytest.mark.parametrize("drafter", CASES, ids=range(len(CASES)))
def test_against_plain_python(drafter):
    """Texts and limits of every length, and drafts, too."""
    random, drafted = np.random.default_rng(0), set()
    for _ in range(3):
        texts = [random.integers(0, 3, random.integers(1, 33)).tolist() for _ in range(64)]
        limits = random.integers(0, drafter.num_drafts + 1, 64).tolist()
        given = zip(texts, limits, strict=True)
        expected = [plain_suffix(text, drafter, most) for text, most in given]
        assert propose(drafter, texts, limits, length=32) == expected
        drafted |= {*map(len, expected)}
    most = min(drafter.num_drafts, int(drafter.max_match * drafter.drafts_per_match))
    assert drafted == {*range(most + 1)}


@pytest.mark.fast
@pytest.mark.parametrize(("fields", "message"), [
    ({"num_drafts": 0}, "must be positive"),
    ({"min_match": 0}, "min_match must be at least 1"),
    ({"min_match": 5, "max_match": 4}, "at most max_match"),
    ({"drafts_per_match": 0.01}, "drafts nothing"),
    ({"drafts_per_match": float("nan")}, "drafts nothing"),
    ({"min_share": 1.5}, "from 0 to 1"), ({"max_candidates": 0}, "must be positive"),
])  # fmt: skip
def test_a_drafter_that_cannot_work_says_so(fields, message):
    with pytest.raises(ValueError, match=message):
        SuffixDrafter(**{"num_drafts": 2} | fields)
