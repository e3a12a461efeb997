"""The bytes of each piece of a tokenizer.json vocabulary.

Two kinds of vocabulary are read: byte-level BPE (GPT-2, Llama 3, Qwen), which writes each byte as
one character, and SentencePiece-style BPE (Llama 2), which writes a space as U+2581 and bytes
that no piece covers as <0x0A>. A `Strip` of a text's first space is left out: a continuation begins
in the middle of a text.

Source: https://huggingface.co/docs/tokenizers/api/decoders
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from jax_specdec.checkpoint.model_config import CheckpointError
from jax_specdec.text.detokenize import byte_level_bytes

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
