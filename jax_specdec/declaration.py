"""The most that an engine's requests may ask for: its workers compile programs for it.

Everything static about a program follows from it, so nothing is compiled once an engine is ready,
and a request beyond it is refused where it is submitted.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import jax_specdec.beside.ipc  # noqa: F401
from ipc import wire
from ipc.wire import MAX_CHOSEN, MAX_CHOSEN_OF_ROW, MAX_KEPT, MAX_TOP_K, LogprobsMode
from jax_specdec.requests import MAX_BIASED_IDS, MAX_HELD_IDS, ROW_FIELDS, SamplingParams

MAX_CHANGED_IDS = max(MAX_BIASED_IDS, MAX_HELD_IDS)
# What a request that needs a field asks for.
_ASKING = {
    "sampling": "a temperature",
    "max_logprobs": "logprobs = {}",
    "max_extra_token_ids": "{} extra_token_ids",
    "max_logprobs_mode": "logprobs_mode = {}",
    "kept_token_ids": "kept_token_ids",
    "entropy": "entropy",
    "log_sum_exp": "log_sum_exp",
    "row_digest": "row_digest",
    "draft_logprobs": "draft_logprobs",
    "max_logprobs_of_prompts": "prompt_logprobs = {}",
    "max_extra_token_ids_of_prompts": "{} prompt_extra_token_ids for each token",
    "max_changed_ids": "{} token ids in logit_bias or held back by min_tokens",
    "penalties": "a penalty",
    "grammars": "a structured text",
}


class Excess(NamedTuple):
    """The part of a request that is beyond a declaration."""

    field: str  # of `Serves`
    value: Any  # that the request needs there
    present: Any  # the field's

    def __str__(self) -> str:
        option = f"--{self.field.replace('_', '-')}"
        if not isinstance(self.value, bool):
            option += f" {_shown(self.value)}"
        return (
            f"asks for {_ASKING[self.field].format(_shown(self.value))}, but this engine serves "
            f"{self.field} = {_shown(self.present)}: set {self.field} = {_shown(self.value)} in "
            f"EngineConfig.serves (of a command: {option}), or ask for less"
        )


@dataclass(frozen=True, kw_only=True)
class Serves:
    """The most that requests may ask for.

    More takes longer to start, and no longer to run: a batch runs the programs that its requests
    need. `Serves.of` declares what some requests ask for, and `EVERYTHING` is all that can be.

    Attributes:
      sampling: a temperature.
      max_logprobs: `logprobs` of a request; None for none.
      max_extra_token_ids: its `extra_token_ids`.
      max_logprobs_mode: the costliest `logprobs_mode`: raw, scaled, processed.
      kept_token_ids: the ids that each token was drawn among.
      entropy, log_sum_exp, row_digest: these values of the rows of emitted tokens.
      draft_logprobs: logprobs of drafts; without a drafter that draws, nothing is compiled for it.
      max_logprobs_of_prompts: `prompt_logprobs` of a request; None for none.
      max_extra_token_ids_of_prompts: ids that `prompt_extra_token_ids` names for each token; 0 for
        none. Lists for all positions count there, too, but need no declaration of their own.
      max_changed_ids: token ids in its `logit_bias`, and those that `min_tokens` holds back; 0 for
        neither.
      penalties: presence, frequency and repetition.
      grammars: `structured`.
      alike: every request asks for all of it: there are no programs for less, which cost less.

    Raises:
      ValueError: names a value that is out of range, and the range.
    """

    sampling: bool = True
    max_logprobs: int | None = 20
    max_extra_token_ids: int = 16
    max_logprobs_mode: LogprobsMode = LogprobsMode.RAW
    kept_token_ids: bool = False
    entropy: bool = False
    log_sum_exp: bool = False
    row_digest: bool = False
    draft_logprobs: bool = False
    max_logprobs_of_prompts: int | None = 20
    max_extra_token_ids_of_prompts: int = 0
    max_changed_ids: int = 300  # as many as OpenAI allows
    penalties: bool = True
    grammars: bool = True
    alike: bool = False

    def __post_init__(self) -> None:
        limits = {
            "max_logprobs": MAX_TOP_K,
            "max_extra_token_ids": MAX_CHOSEN,
            "max_logprobs_of_prompts": MAX_TOP_K,
            "max_extra_token_ids_of_prompts": MAX_CHOSEN_OF_ROW,
            "max_changed_ids": MAX_CHANGED_IDS,
        }
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if name not in limits:
                kind = LogprobsMode if name == "max_logprobs_mode" else bool
                if not isinstance(value, kind):
                    raise ValueError(f"serves: {name} = {value!r} must be a {kind.__name__}")
            elif value is None and field.default == 20:
                continue
            elif type(value) is not int or not 0 <= value <= limits[name]:
                raise ValueError(f"serves: {name} = {value!r} must be from 0 to {limits[name]}")

    @classmethod
    def of(cls, all_params: Iterable[SamplingParams]) -> "Serves":
        """The least that serves requests with these parameters, alone and together."""
        needs = {(*_needs(params),) for params in all_params}
        least = {**_LEAST}
        for name, value in itertools.chain.from_iterable(needs):
            least[name] = _larger(least[name], value)
        return cls(**least, alike=len(needs) == 1)

    def including(self, all_params: Iterable[SamplingParams]) -> "Serves":
        """The same, and what serves requests with these parameters."""
        if not (all_params := tuple(all_params)):
            return self
        more = Serves.of(all_params)
        return Serves(
            **{name: _larger(getattr(self, name), getattr(more, name)) for name in _LEAST}
        )

    @property
    def num_prompt_chosen(self) -> int:
        """The most ids that a row of a prompt's logprobs names."""
        return max(self.max_extra_token_ids, self.max_extra_token_ids_of_prompts)

    def limits(self, vocab_size: int) -> wire.Limits:
        """The most that rows of messages have, which bounds a ring's messages."""

        def columns(k: int | None) -> int:
            return 0 if k is None else min(k, vocab_size) + 1

        has_rows = self.max_logprobs is not None
        return wire.Limits(
            columns=columns(self.max_logprobs),
            more=self.max_extra_token_ids + wire.num_values(self.row_values) if has_rows else 0,
            kept=min(MAX_KEPT, vocab_size) if self.kept_token_ids else None,
            prompt_columns=columns(self.max_logprobs_of_prompts),
            prompt_chosen=self.num_prompt_chosen,
        )

    @property
    def row_values(self) -> int:
        """The values of a row that are served, as bits of `RowValue`."""
        return sum(getattr(self, name) * bits for name, bits in ROW_FIELDS.items())

    def excess(self, params: SamplingParams) -> Excess | None:
        """The first thing that a request asks for beyond this; None where it is served."""
        for name, value in _needs(params):
            present = getattr(self, name)
            if _larger(present, value) != present:
                return Excess(name, value, present)
        return None


def _needs(params: SamplingParams) -> Iterator[tuple[str, Any]]:
    """The fields that a request needs, and what it needs there."""
    held = len(set(params.stop_token_ids)) if params.min_tokens else 0
    yield "sampling", params.temperature > 0
    yield "max_logprobs", params.logprobs
    yield "max_extra_token_ids", len(params.extra_token_ids)
    if params.num_columns or params.prompt_logprobs is not None:
        yield "max_logprobs_mode", params.logprobs_mode
    yield "kept_token_ids", params.kept_token_ids
    yield "entropy", params.entropy
    yield "log_sum_exp", params.log_sum_exp
    yield "row_digest", params.row_digest
    yield "draft_logprobs", params.draft_logprobs
    yield "max_logprobs_of_prompts", params.prompt_logprobs
    named = params.prompt_extra_token_ids
    yield "max_extra_token_ids_of_prompts", 0 if named is None else named.width
    yield "max_changed_ids", max(len(params.logit_bias), held)
    yield "penalties", params.penalizes
    yield "grammars", params.structured is not None


def _larger(present: Any, value: Any) -> Any:
    """The larger of two values of a field; None is less than 0."""
    return value if present is None or (value is not None and value > present) else present


def _shown(value: Any) -> str:
    return value.name.lower() if isinstance(value, LogprobsMode) else str(value)


_LEAST: dict[str, Any] = {
    "sampling": False, "max_logprobs": None, "max_extra_token_ids": 0,
    "max_logprobs_mode": LogprobsMode.RAW, "kept_token_ids": False, "entropy": False,
    "log_sum_exp": False, "row_digest": False, "draft_logprobs": False,
    "max_logprobs_of_prompts": None, "max_extra_token_ids_of_prompts": 0, "max_changed_ids": 0,
    "penalties": False, "grammars": False,
}  # fmt: skip
USUAL = Serves()
EVERYTHING = Serves(
    sampling=True, max_logprobs=MAX_TOP_K, max_extra_token_ids=MAX_CHOSEN,
    max_logprobs_mode=LogprobsMode.PROCESSED, kept_token_ids=True, entropy=True, log_sum_exp=True,
    row_digest=True, draft_logprobs=True,
    max_logprobs_of_prompts=MAX_TOP_K, max_extra_token_ids_of_prompts=MAX_CHOSEN_OF_ROW,
    max_changed_ids=MAX_CHANGED_IDS, penalties=True, grammars=True,
)  # fmt: skip
