"""Drafters by the names that the command line and the control channel use."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.control import DRAFTERS
from jax_specdec.device.drafting.corpus import Corpus
from jax_specdec.device.drafting.draft_model import DraftModel
from jax_specdec.device.drafting.drafters import Drafter, MtpDrafter, NgramDrafter, NoDrafter
from jax_specdec.device.drafting.suffix import SuffixDrafter
from jax_specdec.device.model.own_model import Model
from jax_specdec.device.model.sharding import ONE_DEVICE, Parallel
from jax_specdec.text import byte_tokens

Encode = Callable[[str], np.ndarray]  # text to token ids [N]


def make_drafter(
    name: str,
    num_drafts: int,
    config: Model,
    *,
    corpus: str = "",
    encode: Encode | None = None,
    parallel: Parallel = ONE_DEVICE,
    draft_model: ModelConfig | None = None,
) -> Drafter:
    """Make the drafter called `name`.

    Args:
      name: one of `DRAFTERS`.
      num_drafts: the most drafts a slot and step; 0 makes any name a `NoDrafter`.
      config: the configuration of the model that the drafts are for.
      corpus: a UTF-8 text file that the suffix drafter searches too; empty for none.
      encode: the model's own tokenizer, for the corpus; None for byte-level tokens.
      parallel: the devices among which that model is split.
      draft_model: the configuration of the smaller model that drafts, for the name "model".

    Raises:
      ValueError: the name is not known, the model has no head for it, or this drafter or this model
        cannot use the corpus.
      OSError: the corpus cannot be read.
    """
    if name not in DRAFTERS:
        raise ValueError(f"drafter {name!r} is not known: choose one of {', '.join(DRAFTERS)}")
    if corpus and name != "suffix":
        raise ValueError(
            f"corpus {corpus!r} would not be read: the drafter is {name}, and only suffix has a "
            "corpus: choose suffix, or leave the corpus out"
        )
    drafter: Drafter
    if name == "none" or num_drafts == 0:
        return NoDrafter()
    elif name == "ngram":
        drafter = NgramDrafter(num_drafts)
    elif name == "suffix":
        drafter = SuffixDrafter(num_drafts, _read(corpus, config, encode) if corpus else None)
    elif not isinstance(config, ModelConfig):
        raise ValueError(f"the drafter {name} is not for a model of your own: choose another one")
    elif name == "model":
        if draft_model is None:
            raise ValueError("the drafter model needs a draft_model: a smaller one that drafts")
        drafter = DraftModel(draft_model, config, num_drafts, parallel)
    else:
        drafter = MtpDrafter(config, num_drafts, parallel)
    return drafter


def _read(path: str, config: Model, encode: Encode | None) -> Corpus:
    """Read the file's text as one document, in the model's tokens."""
    if encode is None:
        if config.vocab_size != byte_tokens.VOCAB_SIZE:
            raise ValueError(
                f"corpus {path!r} needs the tokenizer of a model of {config.vocab_size} tokens: "
                f"bytes are the tokens of this package's own model, of {byte_tokens.VOCAB_SIZE}"
            )
        encode = byte_tokens.encode
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"corpus {path!r} is not UTF-8 text: {error}") from error
    return Corpus.of([encode(text)])
