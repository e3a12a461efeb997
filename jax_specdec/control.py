"""The control channel: what the engine tells its model worker, one JSON object a line. Never jax.

It leads to the worker only; everything that comes back travels through shared memory. The end of
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
# does for a command.
GROUP_KILLED = 128


DRAFTERS = ("mtp", "ngram", "suffix", "none")  # the values of `WorkerConfig.drafter`


class ControlError(ValueError):
    """A line that is not a command; says what is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """What a worker runs: the part of `EngineConfig` that every worker of an engine is told.

    Attributes:
      vocab_size: ids below it are legal in a prompt; at most the model's.
      weights: a safetensors file, or a directory in Hugging Face layout; empty for the weights
        that come with the package.
      dtype: "bfloat16" or "float32", to compute in; empty for that of the weights. "float16" is for
        a safetensors file or the package's own weights only.
      drafter: "mtp", "ngram", "suffix" or "none".
      num_drafts: draft tokens a step at most.
      adaptive: draft less for a request whose drafts are seldom accepted.
      corpus: a UTF-8 text file that the suffix drafter searches too; empty for none.
      num_slots: requests that decode together.
      max_length: prompt and emitted tokens of a request.
      prefill_chunk: prompt tokens that run between two steps.
      prefix_reuse: run what prompts have in common once, where a slot of the worker still holds it;
        no value depends on it. A prompt whose logprobs are wanted is always run whole.
      tensor_parallel: devices among which each worker splits the model; the vocabulary must divide
        among them. A worker without accelerators makes as many CPU devices.
      processes: each of these devices has a process of its own. The first one publishes; the worker
        is lost when any of them is.
    """

    vocab_size: int
    weights: str = ""
    dtype: str = ""
    drafter: str = "mtp"
    num_drafts: int = 3
    adaptive: bool = False
    corpus: str = ""
    num_slots: int = 8
    max_length: int = 512
    prefill_chunk: int = 64
    prefix_reuse: bool = True
    tensor_parallel: int = 1
    processes: bool = False

    @property
    def num_processes(self) -> int:
        """Processes that compute one worker's model."""
        return self.tensor_parallel if self.processes else 1


@dataclass(frozen=True, kw_only=True)
class Start:
    """The first command: what to run, and where its messages go.

    Attributes:
      config: the same for every worker of an engine.
      ring: the name of the ring to attach to.
      process_rank: the worker's number, which its messages carry.
      prefill_only: run prompts, send first tokens, and hand the requests over.
    """

    config: WorkerConfig
    ring: str
    process_rank: int = 0
    prefill_only: bool = False


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
        if make is Start:
            fields["config"] = WorkerConfig(**fields["config"])
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
