"""Every drafter by its name, and the choices that are refused."""

import numpy as np
import pytest

from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.control import DRAFTERS
from jax_specdec.device.drafting.by_name import make_drafter
from jax_specdec.device.drafting.corpus import Corpus
from jax_specdec.device.drafting.drafters import MtpDrafter, NgramDrafter, NoDrafter
from jax_specdec.device.drafting.suffix import SuffixDrafter
from jax_specdec.text import byte_tokens

pytestmark = pytest.mark.fast

CONFIG = ModelConfig.tiny(vocab_size=byte_tokens.VOCAB_SIZE)


def test_names():
    assert make_drafter("none", 3, CONFIG) == NoDrafter()
    assert make_drafter("ngram", 3, CONFIG) == NgramDrafter(3)
    assert make_drafter("suffix", 3, CONFIG) == SuffixDrafter(3)
    assert make_drafter("mtp", 3, CONFIG) == MtpDrafter(CONFIG, 3)
    assert make_drafter("mtp", 0, CONFIG) == NoDrafter()


def test_every_name_that_an_engine_takes_is_another_drafter():
    made = [type(make_drafter(name, 3, CONFIG, draft_model=CONFIG)) for name in DRAFTERS]
    assert len({*made}) == len(DRAFTERS) == 5


def test_a_corpus_is_one_document_in_the_models_tokens(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text("déjà vu")
    expected = Corpus.of([np.frombuffer("déjà vu".encode(), np.uint8)])
    assert make_drafter("suffix", 2, CONFIG, corpus=str(path)).corpus == expected
    other = ModelConfig.tiny(vocab_size=20)
    drafter = make_drafter("suffix", 2, other, corpus=str(path), encode=lambda t: np.arange(len(t)))
    assert drafter.corpus == Corpus.of([np.arange(7)])


def test_what_cannot_be_chosen(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_bytes(b"\xff\xfe")
    for num_drafts in (2, 0):
        with pytest.raises(
            ValueError, match="'mpt' is not known: choose one of mtp, model, ngram, suffix, none"
        ):
            make_drafter("mpt", num_drafts, CONFIG)
    with pytest.raises(ValueError, match="only suffix has a corpus"):
        make_drafter("ngram", 2, CONFIG, corpus=str(path))
    with pytest.raises(ValueError, match="not UTF-8"):
        make_drafter("suffix", 2, CONFIG, corpus=str(path))
    with pytest.raises(ValueError, match="needs the tokenizer of a model of 20 tokens"):
        make_drafter("suffix", 2, ModelConfig.tiny(vocab_size=20), corpus=str(path))
    with pytest.raises(FileNotFoundError):
        make_drafter("suffix", 2, CONFIG, corpus=str(tmp_path / "missing"))
