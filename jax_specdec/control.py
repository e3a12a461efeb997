"""The control channel: what the engine tells its model worker, one JSON object a line. Never jax.

Only the way to the worker; everything that comes back travels through shared memory. The end of
the channel means that the engine is gone, so a worker never outlives it.
"""

import json
import operator
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ipc.wire import LogprobsMode
from jax_specdec.requests import Request, SamplingParams

# A lead whose follower was killed by a signal exits with this plus the signal's number, as a shell
# says it of a command.
GROUP_KILLED = 128


DRAFTERS = ("mtp", "ngram", "suffix", "none")  # by which a worker may be told to draft


class ControlError(ValueError):
    """A line that is not a command; says what is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """The first command: what to run, and where its messages go."""

    ring: str  # the name of the ring to attach to
    weights: str  # a safetensors file or a Hugging Face directory; empty: those of the package
    drafter: str  # "mtp", "ngram", "suffix" or "none"
    num_drafts: int
    num_slots: int
    max_length: int  # prompt and emitted tokens of a request
    prefill_chunk: int = 64  # prompt tokens between two steps
    prefix_reuse: bool = True  # what prompts have in common is run once
    vocab_size: int = 0  # token ids that the engine takes for known; the model has as many or more
    process_rank: int = 0
    prefill_only: bool = False  # run prompts, send first tokens, and hand the requests over
    adaptive: bool = False  # fewer drafts for a request whose drafts are seldom accepted
    corpus: str = ""  # a UTF-8 text file that the suffix drafter searches too; empty for none
    dtype: str = ""  # to compute in; empty for that of the weights
    tensor_parallel: int = 1  # devices among which the model is split
    num_processes: int = 1  # with a device each, where it is not 1: then as many as devices


@dataclass(frozen=True, kw_only=True)
class Admit:
    """Run `request` in `slot`; its messages carry `generation`.

    `draft_token_ids` are drafts that a prefill node handed over: they are verified in the
    request's first step, as certain ones (no draft model's distribution came with them).
    """

    slot: int
    generation: int
    request: Request
    draft_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Evict:
    """Take `slot` back from its request, if it is still that generation.

    The worker frees the slot and says so in its next message: preempted, to be scheduled again,
    or with `reschedule` false a recovery stop, which ends the request with an error.
    """

    slot: int
    generation: int
    reschedule: bool = True


@dataclass(frozen=True, kw_only=True)
class Release:
    """Stop what runs in `slot`, if it is still that generation."""

    slot: int
    generation: int


@dataclass(frozen=True, kw_only=True)
class Shutdown:
    """Finish the step under way and end the stream."""


@dataclass(frozen=True, kw_only=True)
class Advance:
    """Launch the next step: from the lead of several processes to its followers."""


Command = Start | Admit | Evict | Release | Shutdown | Advance
_COMMANDS: dict[str, Callable[..., Command]] = {
    "start": Start,
    "admit": Admit,
    "evict": Evict,
    "release": Release,
    "shutdown": Shutdown,
    "advance": Advance,
}


def to_line(command: Command) -> str:
    """One line, with its newline; NumPy integers (token ids) are written as numbers."""
    name = type(command).__name__.lower()
    return json.dumps({"command": name, **asdict(command)}, default=operator.index) + "\n"


def from_line(line: str) -> Command:
    """The command of one line.

    Raises:
      ControlError: the line is not one whole command.
    """
    try:
        fields = json.loads(line)
        make = _COMMANDS[fields.pop("command")]
        if make is Admit:
            fields["request"] = _request(fields["request"])
            fields["draft_token_ids"] = tuple(fields.get("draft_token_ids", ()))
        return make(**fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ControlError(f"not a command: {line[:200]!r} ({error!r})") from error


def _request(fields: dict[str, Any]) -> Request:
    params = dict(fields["params"])
    params["logprobs_mode"] = LogprobsMode(params["logprobs_mode"])
    for name in ("stop_token_ids", "extra_token_ids"):
        params[name] = tuple(params[name])
    params["stop_sequences"] = tuple(tuple(ids) for ids in params["stop_sequences"])
    return Request(
        id=fields["id"],
        prompt_token_ids=tuple(fields["prompt_token_ids"]),
        params=SamplingParams(**params),
    )
