"""Requests: a prompt, its sampling parameters and the logprobs to send.

Values are checked here, once, at the boundary: all code behind it relies on these limits.
"""

import copy
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import index
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

import jax_specdec.beside.ipc  # noqa: F401
from ipc.field_docs import with_field_docs
from ipc.wire import (
    MAX_CHOSEN,
    MAX_CHOSEN_OF_ROW,
    MAX_KEPT,
    MAX_TOP_K,
    LogprobsMode,
    RowValue,
)

# Below the range, the rounding of float32 logits (1e-6 near 16) changes probabilities by per cents:
# use greedy. Above it, logits that differ by 100 change probabilities by 1 %: use a uniform draw.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-4, 1e4
MAX_TOKEN_ID = 2**31 - 1  # ids are int32, whatever the vocabulary
MAX_PENALTY = 2.0  # of presence and frequency, either way, as in OpenAI's API
# Beyond, float32 logits might overflow.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
MAX_BIAS_SIZE = 100.0  # of a token's logit_bias, either way, as in OpenAI's API
MAX_BIASED_IDS = 1024  # entries of logit_bias
MAX_HELD_IDS = 1024  # stop token ids of a request with min_tokens
# Numbers of a row, by the field that asks for them: also their name in records and answers.
ROW_VALUES = {value.name.lower(): value for value in (RowValue.ENTROPY, RowValue.LOG_SUM_EXP)}
DIGEST_BITS = 1 << RowValue.DIGEST_LOW | 1 << RowValue.DIGEST_HIGH
# The bits of `RowValue` that a field asks for.
ROW_FIELDS = {name: 1 << value for name, value in ROW_VALUES.items()} | {"row_digest": DIGEST_BITS}
STRUCTURES = ("json_schema", "regex", "choice", "grammar")
MAX_STRUCTURE = 1 << 16  # characters of one: it is compiled for every request


class RequestError(ValueError):
    """A request that cannot be served; says which value is wrong and what it may be."""


@with_field_docs
class Structured(NamedTuple):
    """The form of a text, from its first token to its end.

    Attributes:
      kind: one of STRUCTURES.
      text: a JSON schema; a regular expression, for all of the text; a JSON list of strings, of
        which it is one; or a grammar, in Lark as llguidance reads it, or in GBNF.
    """

    kind: str
    text: str


@with_field_docs
class TokenIdRows(NamedTuple):
    """Token ids of each of n rows, equally many: an array that compares, hashes and travels.

    Attributes:
      data: [n, width] int32 in this machine's byte order.
      width: ids of a row.
    """

    data: bytes
    width: int

    @property
    def array(self) -> NDArray[np.int32]:
        """[n, width] int32, read-only."""
        return np.frombuffer(self.data, np.int32).reshape(-1, self.width)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen and which logprobs come with them.

    Token ids may come in any sequence, also a NumPy array; they are kept as tuples of ints.

    Attributes:
      max_tokens: the most tokens to emit.
      temperature: 0 is greedy; otherwise from MIN_TEMPERATURE to MAX_TEMPERATURE.
      top_k: keep the k most likely tokens; 0 keeps all.
      top_p: keep the smallest set of most likely tokens whose probability reaches this.
      min_p: drop tokens less likely than this times the most likely one.
      seed: makes this request's random numbers: equal seeds give equal tokens, whatever else is in
        the batch. Any whole number; it counts modulo 2**32, and is kept so.
      stop_token_ids: tokens that end the request (the token itself is delivered).
      stop_sequences: sequences of token ids that end the request once they are emitted.
      logprobs: None for none; K for each emitted token's logprob and rank and the K most likely.
      logprobs_mode: the distribution that the logprobs are taken from.
      extra_token_ids: ids whose logprobs are wanted at every position.
      draft_logprobs: also send the draft model's logprobs of the drafts.
      prompt_logprobs: None for none; K for each prompt token's logprob and rank, given the tokens
        before it, and the K most likely there. The first prompt token has none.
      prompt_logprobs_start: the place in the prompt, from 0, of the first token whose row is sent.
        Tokens before it are run, or taken from a cache, and not scored. Place 0 has no row, so 0
        and 1 are all rows.
      prompt_extra_token_ids: [n, C] ids, C at most 512: row i names those whose logprobs are wanted
        at the prompt's i-th scored token, as a teacher's top K, in place of `extra_token_ids`.
        Nested lists or an array; kept as `TokenIdRows`. n is the number of rows that are sent.
      kept_token_ids: also send the ids that each emitted token's processed distribution kept, and
        the log of their share: what a learner needs to score the token as it was drawn.
      entropy, log_sum_exp: also send the entropy of the distribution at each emitted token, in
        nats, and the logarithm of the sum of exp(logit / T) over it; in the mode of the logprobs.
      row_digest: also send a digest of all logits of each emitted token's row, before any change:
        a trainer sees by it whether its own are the same (`pallas_kernels.row_digests`).
      presence_penalty: taken from the logits of tokens that were emitted before, -2 to 2.
      frequency_penalty: taken from them for each time that they were emitted, -2 to 2.
      repetition_penalty: a positive logit of a token of the prompt or of those emitted before is
        divided by it, another one is multiplied; from MIN_REPETITION_PENALTY to
        MAX_REPETITION_PENALTY. 1 changes nothing.
      logit_bias: a number from -100 to 100 for each of some token ids, which is added to their
        logits; a mapping or pairs, kept as pairs.
      min_tokens: tokens that come before any end: `stop_token_ids` are not chosen before, and stop
        sequences not looked for. At most `max_tokens`.
      structured: what the text must be; None: anything. Tokens that it forbids are never chosen,
        and `stop_token_ids` that are no text, of which it needs one, only where it may end.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    logprobs_mode: LogprobsMode = LogprobsMode.RAW
    extra_token_ids: tuple[int, ...] = ()
    draft_logprobs: bool = False
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    prompt_extra_token_ids: TokenIdRows | None = None
    kept_token_ids: bool = False
    entropy: bool = False
    log_sum_exp: bool = False
    row_digest: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    structured: Structured | None = None

    def __post_init__(self) -> None:
        for name in ("stop_token_ids", "extra_token_ids"):
            object.__setattr__(self, name, _ids(name, getattr(self, name)))
        sequences = _items("stop_sequences", self.stop_sequences, "sequences of token ids")
        sequences = tuple(_ids("stop_sequences", sequence) for sequence in sequences)
        object.__setattr__(self, "stop_sequences", sequences)
        _check_whole_number("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_whole_number("top_k", self.top_k, 0, 2**31 - 1)
        object.__setattr__(self, "seed", _modulo_2_32("seed", self.seed))
        for name in ("temperature", "top_p", "min_p"):
            _number(name, getattr(self, name))
        _in_range("min_p", self.min_p, 0.0, 1.0)
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE:
            raise RequestError(
                f"temperature = {self.temperature} must be 0 (greedy) or from {MIN_TEMPERATURE} "
                f"to {MAX_TEMPERATURE}"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p = {self.top_p} must be above 0 and at most 1 (1 keeps all)")
        if self.logprobs is not None:
            _check_whole_number("logprobs", self.logprobs, 0, MAX_TOP_K)
        mode: object = self.logprobs_mode  # of callers without a type checker
        if not isinstance(mode, LogprobsMode):
            modes = ", ".join(f"LogprobsMode.{mode.name}" for mode in LogprobsMode)
            raise RequestError(f"logprobs_mode = {self.logprobs_mode!r} must be one of {modes}")
        if self.prompt_logprobs is not None:
            _check_whole_number("prompt_logprobs", self.prompt_logprobs, 0, MAX_TOP_K)
        _check_whole_number("prompt_logprobs_start", self.prompt_logprobs_start, 0, MAX_TOKEN_ID)
        if self.prompt_logprobs_start and self.prompt_logprobs is None:
            raise RequestError(
                f"prompt_logprobs_start = {self.prompt_logprobs_start} needs prompt_logprobs: ask "
                "for prompt_logprobs = 0 at least, or leave the start out"
            )
        if self.prompt_extra_token_ids is not None:
            if self.prompt_logprobs is None:
                raise RequestError(
                    "prompt_extra_token_ids need prompt_logprobs: ask for prompt_logprobs = 0 at "
                    "least"
                )
            rows = token_id_rows(self.prompt_extra_token_ids)
            object.__setattr__(self, "prompt_extra_token_ids", rows)
        if len(self.extra_token_ids) > MAX_CHOSEN:
            raise RequestError(
                f"{len(self.extra_token_ids)} extra_token_ids; a request may name {MAX_CHOSEN}"
            )
        if self.extra_token_ids and self.logprobs is None:
            raise RequestError("extra_token_ids need logprobs: ask for logprobs = 0 at least")
        for name in ("draft_logprobs", "kept_token_ids", *ROW_FIELDS):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} = {getattr(self, name)!r} must be True or False")
        if self.logprobs is None and (values := [n for n in ROW_FIELDS if getattr(self, n)]):
            raise RequestError(f"{values[0]} needs logprobs: ask for logprobs = 0 at least")
        if any(len(sequence) == 0 for sequence in self.stop_sequences):
            raise RequestError("an empty stop sequence would end every request at once")
        for name, low, high in (
            ("presence_penalty", -MAX_PENALTY, MAX_PENALTY),
            ("frequency_penalty", -MAX_PENALTY, MAX_PENALTY),
            ("repetition_penalty", MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
        ):
            _number(name, getattr(self, name))
            _in_range(name, getattr(self, name), low, high)
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        _check_whole_number("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens = {self.min_tokens} is over max_tokens = {self.max_tokens}: lower it, "
                "or raise max_tokens"
            )
        if self.min_tokens and len(self.stop_token_ids) > MAX_HELD_IDS:
            raise RequestError(
                f"min_tokens = {self.min_tokens} with {len(self.stop_token_ids)} stop_token_ids: "
                f"{MAX_HELD_IDS} may be held back; name fewer, or leave min_tokens out"
            )
        if self.structured is not None:
            object.__setattr__(self, "structured", _structure(self.structured))
            if self.min_tokens:
                raise RequestError(
                    f"min_tokens = {self.min_tokens} with structured: the structure says where the "
                    "text ends; leave min_tokens out, and ask there for a longer text"
                )
            if not self.stop_token_ids:
                raise RequestError(
                    "structured needs stop_token_ids: name the token that ends a text, or nothing "
                    "could come after a complete one"
                )

    @property
    def num_columns(self) -> int:
        """Columns of logprobs in each row: 0 without logprobs, K + 1 otherwise."""
        return 0 if self.logprobs is None else self.logprobs + 1

    @property
    def num_prompt_chosen(self) -> int:
        """Ids that each row of the prompt's logprobs names, beside the top K."""
        rows = self.prompt_extra_token_ids
        return len(self.extra_token_ids) if rows is None else rows.width

    @property
    def of_prompt(self) -> "SamplingParams":
        """The parameters of a prompt's rows, as if its tokens were emitted: its K, no values.

        Of extra token ids only the number counts.
        """
        named = copy.copy(self)
        changes: dict[str, Any] = dict.fromkeys(("kept_token_ids", *ROW_FIELDS), False)
        changes |= {
            "logprobs": self.prompt_logprobs,
            "extra_token_ids": (0,) * self.num_prompt_chosen,
        }
        for name, value in changes.items():
            object.__setattr__(named, name, value)
        return named

    @property
    def row_values(self) -> int:
        """The values of a row that come with the emitted tokens, as bits of `RowValue`."""
        return sum(getattr(self, name) * bits for name, bits in ROW_FIELDS.items())

    @property
    def penalizes(self) -> bool:
        """Whether tokens that came before are chosen with another probability for it."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def changes_logits(self) -> bool:
        """Whether tokens are chosen by other logits than the model's own."""
        held_back = self.min_tokens and self.stop_token_ids
        return bool(self.penalizes or self.logit_bias or held_back or self.structured)

    @property
    def most_kept(self) -> int | None:
        """The most kept ids that travel with a token; None where they were not asked for."""
        if not self.kept_token_ids:
            return None
        if self.temperature == 0:
            return 1
        return min(self.top_k, MAX_KEPT) if self.top_k else MAX_KEPT


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and how to continue it; `id` is the user's own name for it.

    The prompt may be any sequence of token ids, also a NumPy array; it is kept as a tuple of ints.
    The same ids are kept packed as well: whoever makes the request packs them, and the engine sends
    a long prompt without touching its tokens one by one.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)

    def __post_init__(self) -> None:
        if not isinstance(self.id, str):
            raise RequestError(f"request id = {self.id!r} must be a string: str(...) makes it one")
        ids = _ids("prompt_token_ids", self.prompt_token_ids)
        if not ids:
            raise RequestError(f"request {self.id!r} has an empty prompt: give it one token")
        _check_start(self.id, len(ids), self.params)
        object.__setattr__(self, "prompt_token_ids", ids)
        object.__setattr__(self, "_packed", packed_ids(ids))

    @classmethod
    def from_packed(
        cls, id: str, prompt: bytes, params: SamplingParams, num_emitted: int = 0
    ) -> Self:
        """A request whose prompt is packed already; see `packed_ids` and `num_emitted`.

        Raises:
          RequestError: the prompt is empty, or holds what is no token id, or fewer tokens than were
            emitted.
        """
        ids = unpacked_ids(prompt)
        if not ids:
            raise RequestError(f"request {id!r} has an empty prompt: give it one token")
        _check_whole_number("num_emitted", num_emitted, 0, len(ids) - 1)
        _check_start(id, len(ids), params)
        fields = {"_packed": prompt, "_num_emitted": num_emitted}
        return cls._made(id=id, prompt_token_ids=ids, params=params, **fields)

    def continued(self, token_ids: tuple[int, ...], params: SamplingParams) -> "Request":
        """The request with tokens behind its prompt that were emitted for it, unchecked."""
        prompt = self.packed_prompt + packed_ids(token_ids)
        fields = {"_packed": prompt, "_num_emitted": len(token_ids)}
        return _Continued._made(id=self.id, params=params, **fields)

    @property
    def num_emitted(self) -> int:
        """How many tokens at the prompt's end were emitted for it: it goes on elsewhere."""
        count: int = self.__dict__.get("_num_emitted", 0)
        return count

    @property
    def first_scored(self) -> int | None:
        """The place of the first prompt token whose logprobs are wanted, from 1; None for none."""
        if self.params.prompt_logprobs is None:
            return None
        return max(self.params.prompt_logprobs_start, 1)

    @property
    def packed_prompt(self) -> bytes:
        """The prompt's token ids as `packed_ids` makes them."""
        prompt: bytes = self.__dict__["_packed"]
        return prompt

    @classmethod
    def _made(cls, **values: Any) -> Self:
        """A request of values that were checked before."""
        request = object.__new__(cls)
        for name, value in values.items():
            object.__setattr__(request, name, value)
        return request


class _Continued(Request):
    """A request whose ids are unpacked only where somebody asks: an engine sends them packed."""

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        return unpacked_ids(self.packed_prompt)


def _check_start(id: str, length: int, params: SamplingParams) -> None:
    """Refuse a prompt's logprobs from behind its end on."""
    start = params.prompt_logprobs_start
    if start and start >= length:
        raise RequestError(
            f"request {id!r}: prompt_logprobs_start = {start} is beyond the prompt, whose last "
            f"token is at place {length - 1}: start there or before, or leave prompt_logprobs out"
        )
    named, due = params.prompt_extra_token_ids, length - max(start, 1)
    if named is not None and len(named.data) != 4 * named.width * due:
        raise RequestError(
            f"request {id!r}: prompt_extra_token_ids has {len(named.array)} rows for the {due} "
            f"tokens that are scored, from place {max(start, 1)} on: give each of them a row"
        )


def packed_ids(ids: tuple[int, ...]) -> bytes:
    """Token ids as int32 in this machine's byte order."""
    return array("i", ids).tobytes()


def unpacked_ids(data: bytes) -> tuple[int, ...]:
    """The token ids of `packed_ids`.

    Raises:
      RequestError: the bytes are not whole numbers of 32 bits, or one of them is negative.
    """
    if len(data) % 4:
        raise RequestError(f"{len(data)} bytes are no packed token ids: they have 4 bytes each")
    ids = np.frombuffer(data, np.int32)
    if ids.size and int(ids.min()) < 0:
        raise RequestError(f"token id {int(ids.min())} must be from 0 to {MAX_TOKEN_ID}")
    return tuple(ids.tolist())


def _ids(name: str, value: Any) -> tuple[int, ...]:
    """Token ids as plain ints, which can be compared, joined to emitted tokens and packed."""
    ids = _items(name, value, "token ids")
    for id in ids:
        if type(id) is not int or not 0 <= id <= MAX_TOKEN_ID:
            _check_whole_number(name, id, 0, MAX_TOKEN_ID)  # which accepts NumPy's integers
    return tuple(map(index, ids))


def token_id_rows(value: Any) -> TokenIdRows:
    """Ids [n, C], each row a token's own, of an array or nested sequences.

    Raises:
      RequestError: they are no token ids, or rows have several lengths, none or more than 512.
    """
    name = "prompt_extra_token_ids"
    try:
        if isinstance(value, list | tuple) and len(value) == 2 and isinstance(value[0], bytes):
            value = TokenIdRows(*value).array
        ids = np.asarray(value)
    except ValueError:  # lists of several lengths, or bytes that are no such rows
        ids = np.empty(0)
    if ids.ndim != 2 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise RequestError(
            f"{name} must be token ids [n, C]: a list of equally many ids for each scored token"
        )
    if not 1 <= ids.shape[1] <= MAX_CHOSEN_OF_ROW:
        raise RequestError(
            f"{name} names {ids.shape[1]} ids for each token and may name from 1 to "
            f"{MAX_CHOSEN_OF_ROW}: ask for the others in another request"
        )
    for bound in (int(ids.min(initial=0)), int(ids.max(initial=0))):
        _check_whole_number(name, bound, 0, MAX_TOKEN_ID)
    return TokenIdRows(np.ascontiguousarray(ids, np.int32).tobytes(), ids.shape[1])


def biases_of_json(value: Mapping[str, Any]) -> tuple[tuple[int, Any], ...]:
    """The pairs of a JSON object, whose names are token ids as text; numbers are not looked at.

    Raises:
      RequestError: a name is no token id.
    """
    for name in value:
        # Unlike int(): no signs, spaces or underscores, and one way to write each id.
        if not (name.isascii() and name.isdecimal() and len(name) <= 10 and str(int(name)) == name):
            raise RequestError(f"logit_bias names {name[:80]!r}, which is no token id")
    return tuple((int(name), bias) for name, bias in value.items())


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    """A logit bias as pairs of plain numbers, each id once."""
    pairs = _items("logit_bias", value.items() if isinstance(value, Mapping) else value, "pairs")
    if len(pairs) > MAX_BIASED_IDS:
        raise RequestError(
            f"logit_bias has {len(pairs)} entries and may have {MAX_BIASED_IDS}: name fewer tokens"
        )
    biases: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise RequestError(f"logit_bias has {pair!r}, not a token id and a number")
        id, bias = pair
        _check_whole_number("logit_bias: token id", id, 0, MAX_TOKEN_ID)
        name = f"logit_bias of token {id}"
        _number(name, bias)
        _in_range(name, bias, -MAX_BIAS_SIZE, MAX_BIAS_SIZE)
        if index(id) in biases:
            raise RequestError(f"logit_bias names token {id} twice: give it one number")
        biases[index(id)] = float(bias)
    return tuple(biases.items())


def _structure(value: Any) -> Structured:
    """A structure of a known kind, whose text is not looked at."""
    try:
        kind, text = value
    except (TypeError, ValueError):
        raise RequestError(f"structured = {value!r} must be a pair of a kind and a text") from None
    if kind not in STRUCTURES or not isinstance(text, str):
        raise RequestError(
            f"structured = {value!r}: the kind must be one of {', '.join(STRUCTURES)}, and the "
            "text a string"
        )
    if len(text) > MAX_STRUCTURE:
        raise RequestError(
            f"the {kind} of structured has {len(text)} characters and may have {MAX_STRUCTURE}: "
            "make it smaller"
        )
    return Structured(kind, text)


def _items(name: str, value: Any, what: str) -> tuple[Any, ...]:
    try:
        return tuple(value)
    except TypeError:
        raise RequestError(f"{name} = {value!r} must be a sequence of {what}") from None


def _check_whole_number(name: str, value: Any, low: int, high: int) -> None:
    number = _index(value)
    if number is None:
        raise RequestError(f"{name} = {value!r} must be a whole number from {low} to {high}")
    _in_range(name, number, low, high)


def _modulo_2_32(name: str, value: Any) -> int:
    number = _index(value)
    if number is None:
        raise RequestError(f"{name} = {value!r} must be a whole number; it counts modulo 2**32")
    return number % 2**32


def _index(value: Any) -> int | None:
    """The value as a Python int; None where it is no whole number."""
    # OpenAI's chat format has logprobs = true: read as 1, it would be another request.
    try:
        return index(value) if not isinstance(value, bool) else None
    except TypeError:
        return None


def _number(name: str, value: object) -> None:
    # Requests travel to the worker as msgpack, which has no numpy.float32.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} = {value!r} must be a Python number: float(...) makes it one")


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise RequestError(f"{name} = {value} must be from {low} to {high}")
