"""Drafters one by one; the loop's tests have their proposals verified."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.device.drafting.drafters import MtpDrafter, NgramDrafter, NoDrafter
from tests.support.draft_contexts import compiled, context

pytestmark = pytest.mark.fast
NGRAM = NgramDrafter(3)


def propose(drafter, seen):
    drafts, _ = compiled(drafter)((), seen)
    ids, nums = np.asarray(drafts.token_ids), np.asarray(drafts.num)
    return [row[:n].tolist() for row, n in zip(ids, nums, strict=True)]


def plain_ngram(text, num_drafts, max_ngram=3):
    for n in range(max_ngram, 0, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == text[-n:] and len(text) > n:
                source = start + n
                period = len(text) - source
                return [text[source + i % period] for i in range(num_drafts)]
    return []


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=4, max_size=4),
    st.lists(st.integers(0, 3), min_size=4, max_size=4),
)
def test_ngram_against_plain_python(texts, limit):
    """The latest of the longest matches goes on; a repetition repeats."""
    expected = [plain_ngram(text, most) for text, most in zip(texts, limit, strict=True)]
    assert propose(NGRAM, context(texts, limit)) == expected


def test_no_drafter_is_a_normal_case():
    assert propose(NoDrafter(), context([[1, 1, 1]])) == [[]]
    assert propose(NoDrafter(3), context([[1, 1, 1]])) == [[]]
    drafts, _ = NoDrafter(2).init(4, 8)
    assert drafts.token_ids.shape == (4, 2)


def test_a_drafter_that_cannot_work_says_so():
    with pytest.raises(ValueError, match="no MTP head"):
        MtpDrafter(ModelConfig.tiny(num_mtp_layers=0), 2)
    with pytest.raises(ValueError, match="must be positive"):
        NgramDrafter(0)
    with pytest.raises(ValueError, match="must be positive"):
        MtpDrafter(ModelConfig.tiny(), 0)
    with pytest.raises(ValueError, match="min_ngram"):
        NgramDrafter(2, max_ngram=1, min_ngram=2)
