"""A model directory's tokenizer: text and conversations to ids, ids to bytes. Never jax.

Encoding is the `tokenizers` library's (the `hf` extra); decoding needs only the table of bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jax_specdec.checkpoint.hf_config import read_json
from jax_specdec.checkpoint.model_config import CheckpointError
from jax_specdec.text.chat_template import INSTALL, ChatTemplate, MissingExtra, read_template
from jax_specdec.text.detokenize import TokenTable
from jax_specdec.text.token_pieces import Pieces

FILE = "tokenizer.json"


class Tokenizer:
    """What tokenizer.json, tokenizer_config.json and chat_template.jinja say.

    Attributes:
      token_bytes: [V] the bytes of text of each id; b"" for special tokens and for ids that the
        model has and the tokenizer does not.
      special: ids that are no text, to their names.
    """

    def __init__(self, directory: str | Path, vocab_size: int) -> None:
        """Read a model directory.

        Args:
          directory: in Hugging Face layout.
          vocab_size: of the model; often more than the tokenizer's.

        Raises:
          FileNotFoundError: there is no tokenizer.json.
          MissingExtra: tokenizers is not installed.
          CheckpointError: the file is damaged or of a kind that is not supported, or it has ids
            that the model does not have.
        """
        try:
            import tokenizers
        except ImportError as error:
            raise MissingExtra(f"tokenizer.json is read with tokenizers: {INSTALL}") from error
        self._directory = Path(directory)
        path = self._directory / FILE
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing; a tokenizer.model alone is not read: save the tokenizer "
                "again with transformers' AutoTokenizer and save_pretrained"
            )
        rules = read_json(path)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # what the library raises has no narrower type
            raise CheckpointError(f"{path} is no tokenizer: {error}") from error
        added = {int(one["id"]): one for one in rules.get("added_tokens", ())}
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if beyond := {name: id for name, id in vocabulary.items() if id >= vocab_size}:
            name, id = next(iter(beyond.items()))
            raise CheckpointError(
                f"{path}: token {name!r} has id {id}, but the model has ids below {vocab_size}"
            )
        pieces = Pieces(rules)
        self.token_bytes: list[bytes] = [b""] * vocab_size
        self.special = {id: f"[id {id}]" for id in range(vocab_size)}
        for piece, id in vocabulary.items():
            if id in added and added[id]["special"]:
                self.special[id] = piece
                continue
            del self.special[id]
            self.token_bytes[id] = piece.encode() if id in added else pieces.raw(piece)

    def table(self) -> TokenTable:
        """Strings and bytes by id, for records and texts."""
        return TokenTable(self.token_bytes, self.special)

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of a text to go on from, with what the tokenizer puts before it (BOS)."""
        return tuple(self._tokenizer.encode(text).ids)

    def encode_plain(self, text: str) -> np.ndarray:
        """The ids [N] int32 of a text alone."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return np.array(ids, np.int32)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """The ids of a conversation, up to where the model is to answer.

        Raises:
          CheckpointError: there is no chat template, or it refuses the messages.
          MissingExtra: jinja2 is not installed.
        """
        if self._template is None:
            raise CheckpointError(
                f"{self._directory} has no chat template (chat_template.jinja, or in "
                "tokenizer_config.json): give a prompt instead of messages"
            )
        # The template writes the special tokens itself.
        text = self._template.render(messages)
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    @cached_property  # only conversations need it, and jinja2
    def _template(self) -> ChatTemplate | None:
        return read_template(self._directory)


def text_encoder(weights: str, vocab_size: int) -> Callable[[str], np.ndarray] | None:
    """What makes a model's ids of a text, for a shared corpus; None where bytes are its tokens.

    Args:
      weights: a directory in Hugging Face layout, or any other name for a byte-level model.
    """
    if not weights or not Path(weights).is_dir():
        return None
    return Tokenizer(weights, vocab_size).encode_plain
