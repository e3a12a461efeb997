"""A byte-level tokenizer: ids 0..255 are bytes, the rest are special."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

VOCAB_SIZE = 264
"""256 bytes and 8 special ids: a number that 2, 4 and 8 devices can share evenly."""

EOS_ID = 256
"""The id that ends a document. A prompt may begin with it, to start a new document."""

_SPECIAL = ("<|eos|>",) + tuple(f"<|reserved_{i}|>" for i in range(257, VOCAB_SIZE))


def encode(text: str | bytes, *, start_document: bool = False) -> np.ndarray:
    """The ids [N] int32 of a text (as UTF-8) or of bytes.

    Text that looks like a special token becomes its bytes: only the model and the caller make
    special ids.

    Args:
      text: the text, or its bytes.
      start_document: put `EOS_ID` first.
    """
    raw = text.encode() if isinstance(text, str) else text
    ids = np.frombuffer(raw, np.uint8).astype(np.int32)
    return np.concatenate([np.array([EOS_ID], np.int32), ids]) if start_document else ids


def token_bytes(token_id: int) -> bytes:
    """The byte of an id; for a special id its name, such as `b"<|eos|>"`.

    Raises:
      ValueError: the id is outside 0..VOCAB_SIZE-1.
    """
    if not 0 <= token_id < VOCAB_SIZE:
        raise ValueError(f"token id {token_id} is outside 0..{VOCAB_SIZE - 1}")
    return bytes([token_id]) if token_id < 256 else _SPECIAL[token_id - 256].encode()


def decode_bytes(token_ids: Iterable[int]) -> bytes:
    """The bytes of ids, special ids by their names; the inverse of `encode` without special ids."""
    return b"".join(token_bytes(int(token_id)) for token_id in token_ids)


def decode(token_ids: Iterable[int]) -> str:
    """The text of ids; bytes that are not UTF-8, such as half a character, become U+FFFD."""
    return decode_bytes(token_ids).decode(errors="replace")
