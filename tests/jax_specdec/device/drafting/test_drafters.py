"""Drafters one by one; the loop's tests have their proposals verified."""

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.device.drafting.drafters import MtpDrafter, NgramDrafter, NoDrafter
from tests.support.draft_contexts import compiled, context

pytestmark = pytest.mark.fast
NGRAM = NgramDrafter(3)
both = pytest.mark.parametrize("with_jit", [True, pytest.param(False, marks=pytest.mark.slow)])


def propose(drafter, seen, with_jit=True):
    call = compiled(drafter) if with_jit else functools.partial(drafter.propose, None)
    drafts, _ = call((), seen)
    ids, nums = np.asarray(drafts.token_ids), np.asarray(drafts.num)
    return [row[:n].tolist() for row, n in zip(ids, nums, strict=True)]


@both
def test_ngrams_continue_as_the_latest_longest_match_did(with_jit):
    texts = [
        [1, 2, 3, 4, 5, 1, 2, 3],  # the trigram 1 2 3 went on 4 5 1
        [7, 5, 8, 5, 6, 5],  # 5 alone: the latest one went on with 6 5, then repeats
        [2, 3, 9, 1, 3, 4, 2, 3],  # the bigram 2 3 beats the later 3
        [1, 2, 3, 4],  # nothing repeats
        [4],  # too short for anything
        [6, 6],  # a repetition repeats
    ]
    got = propose(NGRAM, context(texts), with_jit)
    assert got == [[4, 5, 1], [6, 5, 6], [9, 1, 3], [], [], [6, 6, 6]]


@both
def test_the_limit_holds_per_slot(with_jit):
    texts = [[1, 2, 3, 1, 2, 3]] * 4
    got = propose(NGRAM, context(texts, [0, 1, 2, 3]), with_jit)
    assert got == [[], [1], [1, 2], [1, 2, 3]]


def plain_ngram(text, num_drafts, max_ngram=3):
    for n in range(max_ngram, 0, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == text[-n:] and len(text) > n:
                source = start + n
                period = len(text) - source
                return [text[source + i % period] for i in range(num_drafts)]
    return []


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=4, max_size=4))
def test_ngram_against_plain_python(texts):
    expected = [plain_ngram(text, 3) for text in texts]
    assert propose(NGRAM, context(texts)) == expected


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
