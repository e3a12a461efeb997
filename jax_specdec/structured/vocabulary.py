"""A model's tokens as llguidance knows them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jax_specdec.checkpoint.gguf_file import is_gguf
from jax_specdec.requests import RequestError
from jax_specdec.structured.grammar import library
from jax_specdec.text import byte_tokens
from jax_specdec.text.tokenizer import FILE, MissingExtra, Tokenizer

MASK_WORD = 32  # bits


class Vocabulary:
    """The bytes of V tokens, and which of them are no text.

    Attributes:
      tokenizer: llguidance's.
      size: V.
      end: the token that stands for the end of a text in masks of llguidance; of a request, any of
        its stop tokens that are no text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.size: int = tokenizer.vocab_size
        self.end: int = tokenizer.eos_token

    @property
    def num_words(self) -> int:
        """Words of a bit mask of all tokens."""
        return -(-self.size // MASK_WORD)

    def ends(self, stop_token_ids: Sequence[int]) -> tuple[int, ...]:
        """Those of a request's stop tokens that end a text without being a part of it.

        Raises:
          RequestError: there is none.
        """
        special = self.tokenizer.is_special_token
        end_ids = tuple(id for id in stop_token_ids if id < self.size and special(id))
        if not end_ids:
            raise RequestError(
                f"structured needs a stop token that is no text, and stop_token_ids = "
                f"{list(stop_token_ids[:8])} has none: name the tokenizer's end of text"
            )
        return end_ids


def read_vocabulary(texts: str, vocab_size: int) -> Vocabulary:
    """The vocabulary of a model.

    Args:
      texts: a directory with tokenizer.json, or a GGUF file; any other name means bytes, for the
        model that comes with the package.
      vocab_size: V of the model.

    Raises:
      RequestError: there is no such tokenizer, it does not fit, or a library is missing.
    """
    library()  # whose lack is none of the tokenizer
    if texts and (Path(texts).is_dir() or is_gguf(texts)):
        try:
            ours = Tokenizer(texts, vocab_size)
            size = max([vocab_size, *(id + 1 for id in ours.beyond)])
            theirs = library().LLTokenizer(ours.to_json(), n_vocab=size)
            return vocabulary_of(
                [
                    ours.special.get(id, "").encode() or raw
                    for id, raw in enumerate(ours.token_bytes)
                ],
                [*ours.special],
                theirs.tokenize_str,
            )
        except MissingExtra as error:
            raise RequestError(f"structured answers are not served: {error}") from error
        except (ValueError, OSError) as error:
            raise RequestError(
                f"structured answers are not served: the tokenizer does not fit: {error}"
            ) from error
    if vocab_size != byte_tokens.VOCAB_SIZE:
        raise RequestError(
            f"structured answers of a model of {vocab_size} tokens need its tokenizer: name a "
            f"directory with {FILE} (EngineConfig.tokenizer)"
        )
    tokens = [byte_tokens.token_bytes(id) for id in range(vocab_size)]
    return vocabulary_of(tokens, range(byte_tokens.EOS_ID, vocab_size))


def vocabulary_of(
    token_bytes: Sequence[bytes],
    special: Sequence[int],
    encode: Callable[[str], Sequence[int]] = lambda text: (),
) -> Vocabulary:
    """A vocabulary of these tokens.

    Args:
      token_bytes: [V] of each token; of a special one its name.
      special: ids of tokens that are no text; the first one stands for ends of texts.
      encode: the tokens that a text usually has, which are the ones allowed where a grammar leaves
        one text alone. Where they are not of its bytes: the longest ones, one after the other.

    Raises:
      RequestError: no token is special.
    """
    if not special:
        raise RequestError("structured answers need a token that is no text, to end one")
    tokens = _Tokens(token_bytes, special, encode)
    made = library().LLTokenizer(tokens)
    tokens.longest = made.greedy_tokenize
    return Vocabulary(made)


class _Tokens:
    """A tokenizer in Python, as `LLTokenizer` asks for it."""

    bos_token_id = None
    is_tokenizer_wrapper = True

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        special: Sequence[int],
        encode: Callable[[str], Sequence[int]],
    ) -> None:
        self.tokens = list(token_bytes)
        self.special_token_ids = list(special)
        self.eos_token_id = special[0]
        self.longest: Callable[[str], list[int]] = lambda text: []
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        ids = [*self._encode(text)]
        has_all = max(ids, default=0) < len(self.tokens)
        same = has_all and b"".join(map(self.tokens.__getitem__, ids)) == text.encode()
        return ids if same else self.longest(text)
