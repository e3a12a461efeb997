"""The model that a server offers: its name, its texts and its limits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jax_specdec.checkpoint.hf_config import eos_token_ids
from jax_specdec.serve.errors import MAX_SHOWN, ApiError
from jax_specdec.text import byte_tokens
from jax_specdec.text.chat_template import with_functions
from jax_specdec.text.detokenize import TokenTable
from jax_specdec.text.tokenizer import Tokenizer

TINY = "tiny"


class Encoder(Protocol):
    """Text and conversations to token ids."""

    def encode(self, text: str) -> tuple[int, ...]: ...

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        functions: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]: ...

    def prepare(self) -> None:
        """Do beforehand what the first conversation would wait for."""


@dataclass(frozen=True)
class ServedModel:
    """A model by which requests are read and answered.

    Attributes:
      name: what clients call it.
      created: when it was first served, in seconds since 1970.
      encoder: its tokenizer.
      table: the strings of its tokens.
      vocab_size: V.
      max_length: prompt and emitted tokens of a request.
      eos_token_ids: tokens that end a text.
    """

    name: str
    created: int
    encoder: Encoder
    table: TokenTable
    vocab_size: int
    max_length: int
    eos_token_ids: tuple[int, ...]

    @property
    def listed(self) -> dict[str, Any]:
        """The model as OpenAI's list of models has it."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "jax-specdec",
            "max_model_len": self.max_length,
        }

    def check_name(self, name: str) -> None:
        """Refuse the name of another model.

        Raises:
          ApiError: 404; it says which model is served.
        """
        if name != self.name:
            raise ApiError(
                404,
                f"the model {name[:MAX_SHOWN]!r} is not served here; {self.name!r} is",
                param="model",
                code="model_not_found",
            )


class TinyEncoder:
    """Bytes, for the model that comes with the package; a text begins a document.

    That model has read Python and no conversations: messages become comments.
    """

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(byte_tokens.encode(text, start_document=True).tolist())

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        functions: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        messages = with_functions(messages, functions)
        lines = [f"# {message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join([*lines, "# assistant:"]))

    def prepare(self) -> None:
        pass


def tiny_model(**options: Any) -> ServedModel:
    """The model that comes with the package; `options` as for `directory_model`."""
    special = range(byte_tokens.EOS_ID, byte_tokens.VOCAB_SIZE)
    names = {token_id: byte_tokens.token_bytes(token_id).decode() for token_id in special}
    return ServedModel(
        encoder=TinyEncoder(),
        table=TokenTable(byte_tokens.token_bytes, names),
        vocab_size=byte_tokens.VOCAB_SIZE,
        eos_token_ids=(byte_tokens.EOS_ID,),
        **options,
    )


def directory_model(
    directory: Path,
    vocab_size: int | None,
    eos: tuple[int, ...] | None = None,
    *,
    special_in_messages: bool = False,
    **options: Any,
) -> ServedModel:
    """A model whose tokenizer is in a directory: a checkpoint, or a model of the user's own.

    Args:
      directory: with tokenizer.json.
      vocab_size: V; None where the model has the tokenizer's ids and no other.
      eos: tokens that end a text; None: `eos_token_id` of generation_config.json, or none. The one
        that the tokenizer names ends a text too.
      special_in_messages: as `Tokenizer`.
      options: `name`, `created` and `max_length` of the `ServedModel`.

    Raises:
      FileNotFoundError, MissingExtra, CheckpointError: as `Tokenizer`.
    """
    tokenizer = Tokenizer(directory, vocab_size, special_in_messages=special_in_messages)
    if eos is None:
        eos = eos_token_ids(directory) or ()
    return ServedModel(
        encoder=tokenizer,
        table=tokenizer.table(),
        vocab_size=len(tokenizer.token_bytes),
        eos_token_ids=tuple(dict.fromkeys((*eos, *tokenizer.eos_token_ids))),
        **options,
    )
