"""Token ids to strings and bytes; each id's strings are made on their first use.

A token is a piece of bytes, not of text: one character can take several tokens, and a token can
end inside a character. So the bytes are what is true, and every string is derived from them. This
takes a table of bytes, or a function, and no tokenizer library.
"""

import codecs
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

_T = TypeVar("_T")

NO_SPECIAL: Mapping[int, str] = MappingProxyType({})


class Cache(dict[int, _T]):
    """Values by token id, each made on its first use: `map(cache.__getitem__, ids)` is fast."""

    def __init__(self, make: Callable[[int], _T]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token_id: int) -> _T:
        value = self[token_id] = self._make(token_id)
        return value


class TokenTable:
    r"""The strings and bytes of each token id; one table serves every request of a tokenizer.

    Attributes are by token id.

    Attributes:
      raw: the token's bytes of text; None for a special token, which is no part of any text.
      text_bytes: the same, but b"" for a special token; joined, they are the text's bytes.
      text: the token as the chat format shows it: bytes that are not UTF-8 on their own as `\xNN`,
        a special token by its name.
      completion_text: the token as the completions format shows it: `text`, after "bytes:" where
        the token is not UTF-8 on its own.
      chat: the pair of `text` and the bytes as integers, as JSON has them.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes] | Callable[[int], bytes],
        special: Mapping[int, str] = NO_SPECIAL,
    ) -> None:
        """Make a table in which nothing is looked up yet.

        Args:
          token_bytes: the bytes of every id, or a function that gives them.
          special: ids of special tokens to their names, such as {2: "</s>"}.
        """
        self._source = token_bytes
        self.special = dict(special)
        self.raw: Cache[bytes | None] = Cache(self._raw)
        self.text_bytes: Cache[bytes] = Cache(lambda token_id: self.raw[token_id] or b"")
        self.text: Cache[str] = Cache(self._text)
        self.completion_text: Cache[str] = Cache(self._completion_text)
        self.chat: Cache[tuple[str, tuple[int, ...] | None]] = Cache(self._chat)

    def is_text(self, token_id: int) -> bool:
        """Whether the token is valid UTF-8 on its own."""
        try:
            self.text_bytes[token_id].decode()
        except UnicodeDecodeError:
            return False
        return True

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of ids, without special tokens; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.text_bytes.__getitem__, token_ids)).decode(errors="replace")

    def _raw(self, token_id: int) -> bytes | None:
        """An id's bytes, looked up.

        Raises:
          ValueError: the tokenizer does not have the id; -1 stands for "no token".
        """
        if token_id in self.special:
            return None
        source = self._source
        if callable(source):
            return source(token_id)
        if not 0 <= token_id < len(source):
            raise ValueError(f"token id {token_id} is outside 0..{len(source) - 1}")
        return source[token_id]

    def _text(self, token_id: int) -> str:
        raw = self.raw[token_id]
        if raw is None:
            return self.special[token_id]
        return raw.decode(errors="backslashreplace")

    def _completion_text(self, token_id: int) -> str:
        return ("" if self.is_text(token_id) else "bytes:") + self.text[token_id]

    def _chat(self, token_id: int) -> tuple[str, tuple[int, ...] | None]:
        raw = self.raw[token_id]
        return self.text[token_id], None if raw is None else tuple(raw)


class TextStream:
    """One request's text as its tokens come; a character appears once its last byte is there.

    The strings that `push` and `finish` return, joined, are `TokenTable.decode` of all ids.
    """

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.length = 0  # characters returned so far

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete."""
        raw = b"".join(map(self._table.text_bytes.__getitem__, token_ids))
        return self._counted(self._decoder.decode(raw))

    def push_with_offsets(self, token_ids: Collection[int]) -> tuple[str, list[int]]:
        """The text that these tokens complete, and each token's offset in the whole text.

        Offsets count characters. A token that begins inside a character has its offset.
        """
        parts, offsets = [], []
        for token_id in token_ids:
            raw = self._table.text_bytes[token_id]
            parts.append(self._counted(self._decoder.decode(raw[:1])))
            # The first byte's character is the last one returned, or the one still incomplete.
            complete = raw and not self._decoder.getstate()[0]
            offsets.append(self.length - 1 if complete else self.length)
            parts.append(self._counted(self._decoder.decode(raw[1:])))
        return "".join(parts), offsets

    @property
    def inside_character(self) -> bool:
        """Whether the last token ended inside a character, which is no part of the text yet."""
        return bool(self._decoder.getstate()[0])

    def finish(self) -> str:
        """U+FFFD if the text ends inside a character, otherwise the empty string."""
        return self._counted(self._decoder.decode(b"", final=True))

    def _counted(self, text: str) -> str:
        self.length += len(text)
        return text


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a token of a byte-level BPE vocabulary, from its string in tokenizer.json.

    Such a vocabulary writes each byte as one printable character (GPT-2's `bytes_to_unicode`,
    https://github.com/openai/gpt-2/blob/master/src/encoder.py).

    Raises:
      ValueError: a character stands for no byte: the token is special, or not byte-level.
    """
    try:
        return bytes(map(_BYTE_OF.__getitem__, token))
    except KeyError as error:
        raise ValueError(
            f"token {token!r}: {error.args[0]!r} stands for no byte of a byte-level vocabulary"
        ) from None


def _byte_of() -> dict[str, int]:
    """The byte of each character: printable Latin-1 is itself, U+0100 and on the other bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + n): byte for n, byte in enumerate(others)
    }


_BYTE_OF = _byte_of()
