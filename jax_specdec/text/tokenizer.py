"""A model directory's tokenizer: text and conversations to ids, ids to bytes.

The `tokenizers` library (extra `hf`) encodes; decoding needs only the table of bytes. Two kinds of
vocabulary are read: byte-level BPE (GPT-2, Llama 3, Qwen), which writes each byte as one character,
and SentencePiece-style BPE (Llama 2), which writes a space as U+2581 and bytes that no piece covers
as <0x0A>. A `Strip` of a text's first space is left out: a continuation begins in the middle of a
text. Source: https://huggingface.co/docs/tokenizers/api/decoders
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jax_specdec.checkpoint.gguf_file import Gguf, is_gguf, read_gguf
from jax_specdec.checkpoint.hf_config import read_json
from jax_specdec.checkpoint.model_config import CheckpointError
from jax_specdec.text.chat_template import INSTALL, ChatTemplate, MissingExtra, read_template
from jax_specdec.text.detokenize import TokenTable, byte_level_bytes
from jax_specdec.text.gguf_tokenizer import special_tokens, tokenizer_rules

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_HARMLESS = {"Fuse", "Strip"}  # joining pieces; and the first space of a whole text


class Pieces:
    """Reads the pieces of one vocabulary."""

    def __init__(self, tokenizer: Mapping[str, Any]) -> None:
        """Read the rules.

        Args:
          tokenizer: the object in tokenizer.json.

        Raises:
          CheckpointError: the decoder is of a kind whose pieces have no bytes of their own.
        """
        self._byte_level = False
        self._byte_fallback = False
        self._replaced: list[tuple[str, str]] = []
        for decoder in _flat(tokenizer.get("decoder")):
            kind = decoder.get("type")
            if kind == "ByteLevel":
                self._byte_level = True
            elif kind == "ByteFallback":
                self._byte_fallback = True
            elif kind == "Metaspace":
                self._replaced.append((decoder.get("replacement", "▁"), " "))
            elif kind == "Replace" and "String" in decoder.get("pattern", {}):
                self._replaced.append((decoder["pattern"]["String"], decoder["content"]))
            elif kind not in _HARMLESS:
                raise CheckpointError(
                    f"tokenizer.json has a {kind!r} decoder, which is not supported; supported "
                    "are ByteLevel, and Replace, Metaspace and ByteFallback"
                )

    def raw(self, piece: str) -> bytes:
        """The bytes of a piece of the vocabulary; an added token is plain text, not a piece."""
        if self._byte_level:
            try:
                return byte_level_bytes(piece)
            except ValueError:  # a piece that is not byte-level is plain text
                return piece.encode()
        if self._byte_fallback and (byte := _BYTE.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        for old, new in self._replaced:
            piece = piece.replace(old, new)
        return piece.encode()


def _flat(decoder: Any) -> Iterator[Mapping[str, Any]]:
    """The decoders of a tokenizer.json, those of a `Sequence` one after the other."""
    if decoder is None:
        return
    if decoder.get("type") == "Sequence":
        for inner in decoder["decoders"]:
            yield from _flat(inner)
    else:
        yield decoder


FILE = "tokenizer.json"


class Tokenizer:
    """The tokenizer of tokenizer.json, tokenizer_config.json and chat_template.jinja, or a GGUF's.

    Attributes:
      token_bytes: [V] each id's bytes of text; b"" for special tokens, and for ids that the model
        has and the tokenizer lacks.
      special: ids that are not text, to their names.
    """

    def __init__(self, directory: str | Path, vocab_size: int | None = None) -> None:
        """Read a model directory.

        Args:
          directory: in Hugging Face layout, or a GGUF file.
          vocab_size: V of the model, which is often more than the tokenizer's; None: all of the
            tokenizer's ids and no other.

        Raises:
          FileNotFoundError: there is no tokenizer.json.
          MissingExtra: tokenizers is not installed.
          CheckpointError: the file is damaged or of a kind that is not supported, or it has ids
            that the model lacks.
        """
        self._directory = Path(directory)
        self._gguf = read_gguf(self._directory) if is_gguf(directory) else None
        path = self._directory if self._gguf else self._directory / FILE
        rules, self._tokenizer = _open(path, self._gguf)
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if vocab_size is None:
            vocab_size = max(vocabulary.values(), default=-1) + 1
        if beyond := {name: id for name, id in vocabulary.items() if id >= vocab_size}:
            name, id = next(iter(beyond.items()))
            raise CheckpointError(
                f"{path}: token {name!r} has id {id}, but the model has ids below {vocab_size}"
            )
        pieces = Pieces(rules)
        added = {int(one["id"]): one for one in rules.get("added_tokens", ())}
        self.token_bytes: list[bytes] = [b""] * vocab_size
        self.special = {id: f"[id {id}]" for id in range(vocab_size)}
        for piece, id in vocabulary.items():
            if id in added and added[id]["special"]:
                self.special[id] = piece
                continue
            del self.special[id]
            self.token_bytes[id] = piece.encode() if id in added else pieces.raw(piece)

    def table(self) -> TokenTable:
        """The table of strings and bytes by id, for records and texts."""
        return TokenTable(self.token_bytes, self.special)

    def to_json(self) -> str:
        """The text of a tokenizer.json, for another library."""
        text: str = self._tokenizer.to_str()
        return text

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of a prompt, after what the tokenizer puts before a text (BOS)."""
        return tuple(self._tokenizer.encode(text).ids)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], functions: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int, ...]:
        """The ids of a conversation, up to where the model is to answer.

        Arguments are those of `ChatTemplate.render`.

        Raises:
          CheckpointError: there is no chat template, or it refuses the messages.
          MissingExtra: jinja2 is not installed.
        """
        if self._template is None:
            raise CheckpointError(
                f"{self._directory} has no chat template (chat_template.jinja, or in "
                "tokenizer_config.json): write a prompt instead of messages"
            )
        # The template writes the special tokens itself.
        text = self._template.render(messages, functions)
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    @cached_property  # only conversations need it, and jinja2
    def _template(self) -> ChatTemplate | None:
        if self._gguf is None:
            return read_template(self._directory)
        source = self._gguf.fields.get("tokenizer.chat_template")
        return None if source is None else ChatTemplate(source, special_tokens(self._gguf))


def _open(path: Path, file: Gguf | None) -> tuple[dict[str, Any], Any]:
    """The object in a tokenizer.json, or made of a GGUF file, and the library's tokenizer of it."""
    try:
        import tokenizers
    except ImportError as error:
        raise MissingExtra(f"tokenizer.json is read with tokenizers: {INSTALL}") from error
    if file is None and not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing; a tokenizer.model alone is not read: save the tokenizer again "
            "with transformers' AutoTokenizer and save_pretrained"
        )
    rules = read_json(path) if file is None else tokenizer_rules(file)
    try:
        return rules, tokenizers.Tokenizer.from_str(json.dumps(rules))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{path} is not a tokenizer: {error}") from error
