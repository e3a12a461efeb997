"""Special tokens in a conversation: the template writes them, and a message cannot.

A message that holds the text of a special token would otherwise be encoded as that token, so that a
user could end a turn and begin one of the system's. So before a template sees a conversation, each
such text in it is put between two marks, characters that nothing in it has. In what the template
makes of it, what is between marks is text, and what is not is the template's own.

All of it is then encoded in one piece, as transformers would encode it: the tokens that a template
writes are written under other names, which nobody outside knows, and the tokenizer knows them by
these names alone.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from jax_specdec.checkpoint.model_config import CheckpointError

_FIRST_MARK, _LAST_MARK = 0xA000, 0xA48C  # letters of Yi: printed as they are, changed by no case
_PRIVATE = (0xF0000, 0xFFFFD)  # characters for private use, which no vocabulary has
_SECRET = 8  # characters of a name: 128 bits
# Roles whose words are the model's own: what it wrote as a token that is text is that token again.
_OWN = ("assistant",)


class ControlTokens:
    """The tokens of a tokenizer that only a template may write.

    They are its special tokens and, of its other added tokens, those that the template has in its
    text (DeepSeek's roles are such): these are tokens in messages of the model, which writes them
    itself, and in no other's.
    """

    def __init__(self, backend: Any, template_text: str) -> None:
        """Find them.

        Args:
          backend: a `tokenizers.Tokenizer`.
          template_text: the literal strings of the chat template.
        """
        self._backend, self._template_text = backend, template_text
        added = [
            token for token in backend.get_added_tokens_decoder().values() if token.content.strip()
        ]
        self._every = any_of([token.content for token in added])
        self._special = any_of([token.content for token in added if token.special])
        self._names = [
            token.content for token in added if token.special or token.content in template_text
        ]
        self._control = any_of(self._names)
        # Tokens that are looked for in a text as it is once it is normalized.
        loose = any(token.normalized for token in added if token.content in self._names)
        self._normalizer = backend.normalizer if loose else None

    def marked(self, conversation: "Conversation") -> "tuple[Conversation, Marks] | None":
        """The conversation with its control tokens between marks; None where it has none.

        Raises:
          CheckpointError: there are no characters left for marks.
        """
        messages, rest = conversation
        if not any(map(self._is_in, _texts([messages, rest]))):
            return None
        marks = Marks(_texts([messages, rest, self._template_text]))
        marked = [
            marks.put(message, self._special if message.get("role") in _OWN else self._control)
            for message in messages
        ]
        return (marked, marks.put(rest, self._control)), marks

    def _is_in(self, text: str) -> bool:
        if self._normalizer is not None and self._control.search(
            self._normalizer.normalize_str(text)
        ):
            return True
        return self._control.search(text) is not None

    def encode(self, text: str, marks: "Marks") -> list[int]:
        """The ids of what a template made of a marked conversation.

        Raises:
          CheckpointError: the tokenizer cannot be made to know its tokens by other names.
        """
        private, renamed = self._renamed
        written = [
            piece
            if is_text
            else self._every.sub(lambda match: private.get(match[0], match[0]), piece)
            for piece, is_text in marks.pieces(text, self._control)
        ]
        ids: list[int] = renamed.encode("".join(written), add_special_tokens=False).ids
        return ids

    @cached_property  # a second tokenizer, for whose texts need it
    def _renamed(self) -> tuple[dict[str, str], Any]:
        """Other names of the control tokens, and the tokenizer that knows them by these."""
        import tokenizers

        low, high = _PRIVATE
        numbers = (int.from_bytes(os.urandom(4), "big") for _ in range(_SECRET))
        secret = "".join(chr(low + number % (high - low)) for number in numbers)
        private = {name: secret + chr(low + at) for at, name in enumerate(self._names)}
        rules = json.loads(self._backend.to_str())
        for token in rules["added_tokens"]:
            token["content"] = private.get(token["content"], token["content"])
        _rename(rules["model"], private)
        renamed = tokenizers.Tokenizer.from_str(json.dumps(rules))
        for name, other in private.items():
            if renamed.token_to_id(other) != self._backend.token_to_id(name):
                raise CheckpointError(
                    f"the message has {name!r}, which is a token of the template's alone, and in "
                    "this tokenizer it cannot be written as text: leave it out"
                )
        return private, renamed


Conversation = tuple[Sequence[Mapping[str, Any]], Any]
"""Messages, and all else that a template is given."""


class Marks:
    """Two characters that stand before and behind the text of a control token."""

    def __init__(self, texts: Iterator[str]) -> None:
        """Choose two that no text has, as they are or as JSON may write them.

        Raises:
          CheckpointError: there are none.
        """
        joined = "\0".join(texts)
        lower = joined.lower()
        free = (
            chr(code)
            for code in range(_FIRST_MARK, _LAST_MARK + 1)
            if chr(code) not in joined and f"{code:04x}" not in lower
        )
        self.begin, self.end = next(free, ""), next(free, "")
        if not self.end:
            raise CheckpointError(
                "the messages have the text of a special token, and every letter of Yi or its "
                "number, one of which would mark that: leave either out"
            )

    def put(self, value: Any, control: re.Pattern[str]) -> Any:
        """The value with its control tokens between the marks, in names and values."""
        if isinstance(value, str):
            return control.sub(f"{self.begin}\\g<0>{self.end}", value)
        if isinstance(value, Mapping):
            return {
                self.put(name, control): self.put(inner, control) for name, inner in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.put(inner, control) for inner in value]
        return value

    def pieces(self, text: str, control: re.Pattern[str]) -> Iterator[tuple[str, bool]]:
        """The pieces of a text without its marks, and whether each was a control token in them."""
        begin, end = (f"(?:{mark}|\\\\u{ord(mark):04x})" for mark in (self.begin, self.end))
        mark = re.compile(f"{begin}({control.pattern}){end}|{begin}|{end}")
        for at, piece in enumerate(mark.split(text)):
            if piece:  # every second one was between marks
                yield piece, at % 2 == 1


def any_of(names: Sequence[str]) -> re.Pattern[str]:
    """A pattern of the names in a text, as a tokenizer finds them: the first, the longest there.

    Names that begin alike are compared together: some tokenizers have thousands.
    """
    tree: dict[str, Any] = {}
    for name in names:
        node = tree
        for letter in name:
            node = node.setdefault(letter, {})
        node[""] = {}  # a name ends here
    return re.compile(_pattern(tree) if tree else "(?!)")


def _pattern(tree: Mapping[str, Any]) -> str:
    """A regular expression of the rests of names; the longest one is tried first."""
    rests = [re.escape(letter) + _pattern(rest) for letter, rest in tree.items() if letter]
    if not rests:
        return ""
    joined = rests[0] if len(rests) == 1 else f"(?:{'|'.join(rests)})"
    return f"(?:{joined})?" if "" in tree else joined


def _texts(value: Any) -> Iterator[str]:
    """Every string in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts(name)
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def _rename(model: dict[str, Any], private: Mapping[str, str]) -> None:
    """Change the names of tokens in the model of a tokenizer.json."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {private.get(name, name): id for name, id in vocabulary.items()}
    else:  # Unigram: names and their scores
        model["vocab"] = [[private.get(name, name), score] for name, score in vocabulary]
    if isinstance(unknown := model.get("unk_token"), str):
        model["unk_token"] = private.get(unknown, unknown)
    if "merges" in model:
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        model["merges"] = [pair for pair in pairs if not {*pair, "".join(pair)} & private.keys()]
