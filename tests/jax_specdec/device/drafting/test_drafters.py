"""Drafters one by one and by name; the loop's tests have their proposals verified."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.control import DRAFTERS
from jax_specdec.device.drafting.by_name import make_drafter
from jax_specdec.device.drafting.draft_model import DraftModel
from jax_specdec.device.drafting.drafters import MtpDrafter, NgramDrafter, NoDrafter
from jax_specdec.device.drafting.suffix import SuffixDrafter
from jax_specdec.text import byte_tokens
from tests.support.draft_contexts import compiled, context


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
    assert propose(NgramDrafter(3), context(texts, limit)) == expected


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


# By their names ----------------------------------------------------------------------------------

CONFIG = ModelConfig.tiny(vocab_size=byte_tokens.VOCAB_SIZE)


def test_every_name_that_an_engine_takes_is_a_drafter():
    assert {name: make_drafter(name, 3, CONFIG, draft_model=CONFIG) for name in DRAFTERS} == {
        "none": NoDrafter(),
        "ngram": NgramDrafter(3),
        "suffix": SuffixDrafter(3),
        "mtp": MtpDrafter(CONFIG, 3),
        "model": DraftModel(CONFIG, CONFIG, 3),
    }
    assert make_drafter("mtp", 0, CONFIG) == NoDrafter()


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_a_name_that_is_not_known_is_refused(num_drafts):
    with pytest.raises(ValueError, match="choose one of mtp, model, ngram, suffix, none"):
        make_drafter("mpt", num_drafts, CONFIG)
