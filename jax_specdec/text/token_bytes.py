"""The bytes of each token of a vocabulary, so that joined they are the tokenizer's own texts.

A token's bytes are what it adds to a text, by the library's `decode`. A token of half a character
adds none that can be read off, so there its piece says which bytes it has: byte-level BPE (GPT-2,
Llama 3, Qwen) writes each byte as one character, SentencePiece-style BPE (Llama 2, Gemma) bytes
that no piece covers as <0x0A>. A text's first space, which some tokenizers drop, belongs to its
first token here: a continuation begins in the middle of a text.

Source: https://huggingface.co/docs/tokenizers/api/decoders
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax_specdec.checkpoint.model_config import CheckpointError
from jax_specdec.text.detokenize import byte_level_bytes

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_HALF = "\N{REPLACEMENT CHARACTER}"
# Decoders of one token after the other; others look at what stands beside.
_OF_ONE = {"ByteLevel", "ByteFallback", "Metaspace", "Fuse", "Replace", "Strip"}
_MOST_TRIED = 4096  # tokens, to find one of plain letters


def bytes_of_tokens(backend: Any) -> dict[int, bytes]:
    """The bytes of every id of a `tokenizers.Tokenizer`, special tokens included.

    Raises:
      CheckpointError: its texts are not those of its tokens, joined; says which decoder it has.
    """
    decoder = backend.decoder
    decoders = [*_flat(None if decoder is None else json.loads(decoder.__getstate__()))]
    _check(decoders)
    pieces = {id: piece for piece, id in backend.get_vocab(with_added_tokens=True).items()}
    ids = sorted(pieces)
    before = _plain_token(backend, ids)
    prefix = backend.decode(before, skip_special_tokens=False)
    texts = backend.decode_batch([[*before, id] for id in ids], skip_special_tokens=False)
    kinds = {decoder["type"] for decoder in decoders}
    added = backend.get_added_tokens_decoder()
    raw = {}
    for id, text in zip(ids, texts, strict=True):
        addition = text[len(prefix) :]
        if _HALF not in addition:
            raw[id] = addition.encode()
        elif id in added:  # whose é the library reads as a byte-level letter: a byte, and no text
            raw[id] = pieces[id].encode()
        else:
            raw[id] = _of_piece(pieces[id], kinds, addition)
    return raw


def _of_piece(piece: str, kinds: set[str], text: str) -> bytes:
    """The bytes of a token whose text has U+FFFD: of half a character, or of that character."""
    raw = text.encode()
    if "ByteLevel" in kinds:
        try:
            raw = byte_level_bytes(piece)
        except ValueError:  # a piece that is not byte-level is plain text
            raw = piece.encode()
    elif "ByteFallback" in kinds and (byte := _BYTE.fullmatch(piece)):
        raw = bytes([int(byte[1], 16)])
    if raw.decode(errors="replace") != text:
        raise CheckpointError(
            f"the tokenizer reads its token {piece!r} as {text!r}, and no bytes are known for that"
        )
    return raw


def _plain_token(backend: Any, ids: Sequence[int]) -> list[int]:
    """A token to stand before others, as a text's first one is read differently; none if none."""
    tried = ids[:_MOST_TRIED]
    texts = backend.decode_batch([[id] for id in tried], skip_special_tokens=False)
    pairs = list(zip(tried, texts, strict=True))
    letters = (id for id, text in pairs if text.isascii() and text.isalpha())
    others = (id for id, text in pairs if text.strip() == text != "" and _HALF not in text)
    first = next(letters, next(others, None))
    return [] if first is None else [first]


def _check(decoders: Sequence[Mapping[str, Any]]) -> None:
    """Refuse decoders for which a token's text depends on others than the first.

    Raises:
      CheckpointError: names it.
    """
    fused = False
    for decoder in decoders:
        kind = decoder.get("type")
        fused = fused or kind == "Fuse"
        pattern = decoder.get("pattern", {}).get("String", "")
        across = kind == "Replace" and fused and len(pattern) != 1
        behind = kind == "Strip" and decoder.get("stop", 0) > 0
        if kind not in _OF_ONE or across or behind:
            raise CheckpointError(
                f"the tokenizer has a {kind!r} decoder"
                f"{' of several characters at once' if across else ''}"
                f"{' of what ends a text' if behind else ''}, which is not supported: a token's "
                f"text would depend on its neighbors. Supported are {', '.join(sorted(_OF_ONE))}"
            )


def _flat(decoder: Any) -> Iterator[Mapping[str, Any]]:
    """The decoders of a tokenizer.json, those of a `Sequence` one after the other."""
    if decoder is None:
        return
    if decoder.get("type") == "Sequence":
        for inner in decoder["decoders"]:
            yield from _flat(inner)
    else:
        yield decoder
