"""A model's tokenizer: text and conversations to ids, ids to bytes.

transformers reads a model directory, and makes ids and conversations' texts (extra `hf`). Of a GGUF
file transformers reads nothing without torch: there `gguf_tokenizer.py` says what a tokenizer.json
would, and the `tokenizers` library, which transformers itself stands on, makes the ids. What a
token's bytes are is asked of the library once for every token (`token_bytes.py`); decoding then
needs that table alone.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jax_specdec.checkpoint.gguf_file import Gguf, is_gguf, read_gguf
from jax_specdec.checkpoint.model_config import CheckpointError
from jax_specdec.text import gguf_tokenizer
from jax_specdec.text.chat_template import ChatTemplate
from jax_specdec.text.control_tokens import ControlTokens
from jax_specdec.text.detokenize import TokenTable
from jax_specdec.text.token_bytes import bytes_of_tokens
from jax_specdec.text.transformers_library import (
    FILE,
    INSTALL,
    MissingExtra,
    read_directory,
    renderer,
)

__all__ = ["FILE", "MissingExtra", "Tokenizer"]


class Tokenizer:
    """The tokenizer of a model directory or of a GGUF file.

    Attributes:
      token_bytes: [V] each id's bytes of text; b"" for special tokens, and for ids that the model
        has and the tokenizer lacks.
      special: ids that are not text, to their names.
      beyond: ids that the tokenizer has and the model lacks, to their names.
      eos_token_ids: the token that the tokenizer names as a text's end; none where it names none.
    """

    def __init__(
        self,
        directory: str | Path,
        vocab_size: int | None = None,
        *,
        special_in_messages: bool = False,
    ) -> None:
        """Read a tokenizer.

        Args:
          directory: in Hugging Face layout, or a GGUF file.
          vocab_size: V of the model, which is often more than the tokenizer's; None: all of the
            tokenizer's ids and no other. Tokens of the tokenizer with ids from V on are none of the
            model's: a prompt that has one is refused.
          special_in_messages: a message of a conversation may hold special tokens, by their texts.
            Otherwise the template alone writes them, and in messages they are text.

        Raises:
          FileNotFoundError: there are no files of a tokenizer.
          MissingExtra: a library is not installed.
          CheckpointError: the files are damaged or of a kind that is not supported.
        """
        self._directory = Path(directory)
        self._special_in_messages = special_in_messages
        is_file = is_gguf(directory)
        opened = _of_gguf(self._directory) if is_file else _of_directory(self._directory)
        self._backend, self._encode, self._templates, self._named, eos = opened
        try:
            raw_bytes = bytes_of_tokens(self._backend)
        except CheckpointError as error:
            where = self._directory if is_file else self._directory / FILE
            raise CheckpointError(f"{where}: {error}") from error
        size = max(raw_bytes, default=-1) + 1 if vocab_size is None else vocab_size
        self.beyond = {id: str(self._backend.id_to_token(id)) for id in raw_bytes if id >= size}
        special = {
            id: token.content
            for id, token in self._backend.get_added_tokens_decoder().items()
            if token.special
        }
        self.token_bytes: list[bytes] = [b""] * size
        self.special = {id: special.get(id, f"[id {id}]") for id in range(size)}
        for id, raw in raw_bytes.items():
            if id < size and id not in special:
                del self.special[id]
                self.token_bytes[id] = raw
        self.eos_token_ids = () if eos is None or eos >= size else (eos,)

    def table(self) -> TokenTable:
        """The table of strings and bytes by id, for records and texts."""
        return TokenTable(self.token_bytes, self.special)

    def to_json(self) -> str:
        """The text of a tokenizer.json, for another library."""
        text: str = self._backend.to_str()
        return text

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of a prompt, after what the tokenizer puts before a text (BOS).

        Raises:
          CheckpointError: the tokenizer cannot read it, or a token of it is none of the model's.
        """
        return self._checked(self._ids(text, special=True))

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        functions: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """The ids of a conversation, up to where the model is to answer.

        Arguments are those of `ChatTemplate.render`.

        Raises:
          CheckpointError: there is no chat template, it refuses the messages, or a token is none of
            the model's.
          MissingExtra: a library is not installed.
        """
        template = self._template
        if template is None:
            raise CheckpointError(
                f"{self._directory} has no chat template (chat_template.jinja, or in "
                "tokenizer_config.json): write a prompt instead of messages"
            )
        try:
            return self._checked(self._chat_ids(template, messages, functions, options))
        except RecursionError as error:
            raise CheckpointError("the conversation has values that are nested too deep") from error

    def _chat_ids(
        self,
        template: ChatTemplate,
        messages: Sequence[Mapping[str, Any]],
        functions: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any] | None,
    ) -> Sequence[int]:
        rest = {"functions": functions, "options": options or {}}
        marked = None if self._special_in_messages else self._control.marked((messages, rest))
        if marked is None:
            # The template writes the special tokens itself.
            text = template.render(messages, functions, options)
            return self._ids(text, special=False)
        (messages, rest), marks = marked
        text = template.render(messages, rest["functions"], rest["options"])
        return self._control.encode(text, marks)

    def prepare(self) -> None:
        """Import and compile what conversations need, which the first one would wait for.

        Raises:
          MissingExtra: a library is not installed.
          CheckpointError: the chat template is not valid.
        """
        if self._template is not None:
            renderer()
            _ = self._control

    def _ids(self, text: str, *, special: bool) -> Sequence[int]:
        try:
            return self._encode(text, special)
        except Exception as error:  # the library raises nothing narrower
            raise CheckpointError(f"the tokenizer cannot read this text: {error}") from error

    def _checked(self, ids: Sequence[int]) -> tuple[int, ...]:
        for id in self.beyond.keys() & ids if self.beyond else ():
            raise CheckpointError(
                f"the prompt has the token {self.beyond[id]!r} (id {id}), and the model has ids "
                f"below {len(self.token_bytes)}: leave it out"
            )
        return tuple(ids)

    @cached_property  # only conversations need it
    def _template(self) -> ChatTemplate | None:
        if self._templates is None:
            return None
        try:
            return ChatTemplate(self._templates, self._named)
        except CheckpointError as error:
            raise CheckpointError(f"{self._directory}: {error}") from error

    @cached_property
    def _control(self) -> ControlTokens:
        return ControlTokens(self._backend, self._template.texts if self._template else "")


_Opened = tuple[
    Any, Callable[[str, bool], Sequence[int]], str | Mapping[str, str] | None, Mapping[str, str],
    int | None,
]  # fmt: skip
"""A `tokenizers.Tokenizer`; a text to ids, with or without what comes before a text; the chat
template or several by name; names such as "bos_token" to their strings; the end of a text."""


def _of_directory(directory: Path) -> _Opened:
    read = read_directory(directory)
    backend = read.backend_tokenizer
    # What is cut off or put behind a text there is for training.
    backend.no_truncation()
    backend.no_padding()

    def encode(text: str, special: bool) -> Sequence[int]:
        encoding = read(text, add_special_tokens=special, verbose=False)
        ids: Sequence[int] = encoding["input_ids"]
        return ids

    return backend, encode, read.chat_template, read.special_tokens_map, read.eos_token_id


def _of_gguf(path: Path) -> _Opened:
    try:
        import tokenizers
    except ImportError as error:
        raise MissingExtra(f"a GGUF file's tokenizer needs tokenizers: {INSTALL}") from error
    file: Gguf = read_gguf(path)
    rules = gguf_tokenizer.tokenizer_rules(file)
    try:
        backend = tokenizers.Tokenizer.from_str(json.dumps(rules))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{path} is not a tokenizer: {error}") from error

    def encode(text: str, special: bool) -> Sequence[int]:
        ids: Sequence[int] = backend.encode(text, add_special_tokens=special).ids
        return ids

    named = gguf_tokenizer.special_tokens(file)
    eos = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
    return backend, encode, gguf_tokenizer.chat_templates(file), named, eos
