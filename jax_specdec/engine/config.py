"""What an engine runs, and which requests it can serve. Never jax."""

from dataclasses import dataclass
from typing import Literal, get_args

from ipc import wire
from jax_specdec.checkpoint.model_config import DTYPES
from jax_specdec.control import DRAFTERS
from jax_specdec.requests import Request, RequestError
from jax_specdec.wording import counted

MAX_DRAFTS = 64  # far beyond what pays; every draft is a row of each slot and step

OnWorkerLoss = Literal["stop", "continue", "restart"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What to run; what needs no file and no device is checked when it is made.

    Attributes:
      drafter: "mtp", "ngram", "suffix" or "none".
      num_drafts: draft tokens a step at most.
      num_slots: requests that decode together.
      max_length: prompt and emitted tokens of a request.
      vocab_size: ids below it are legal in a prompt; at most the model's.
      weights: a safetensors file, or a directory in Hugging Face layout; empty for the weights
        that come with the package.
      dtype: "bfloat16" or "float32", to compute in; empty for that of the weights. "float16" is for
        a safetensors file or the package's own weights only.
      prefill_chunk: prompt tokens that run between two steps.
      prefix_reuse: run what prompts have in common once, where a slot of the worker still holds it;
        no value depends on it. A prompt whose logprobs are wanted is always run whole.
      ring_slots: messages that may wait for the engine.
      rehearse: shortly before a message is expected, take the last one once more, into nothing: the
        next one finds warm caches, and its records are there 0.3 ms sooner or so, for as much of
        the engine's time, in which it would sleep. Several ranks, of which any may be next, do not.
      adaptive: draft less for a request whose drafts are seldom accepted.
      corpus: a UTF-8 text file that the suffix drafter searches too; empty for none.
      num_ranks: workers that decode, each with its own slots and ring.
      num_prefill_ranks: workers that only run prompts: a request's first token comes from one of
        them, the rest from a decode worker, which recomputes the prompt. 0: decode workers do both.
      tensor_parallel: devices among which each worker splits the model; the vocabulary must divide
        among them. A worker without accelerators makes as many CPU devices.
      processes: each of these devices has a process of its own. The first one publishes; the worker
        is lost when any of them is.
      on_worker_loss: what becomes of a rank whose worker ended early. "stop": everything stops.
        "continue": the others go on without it. "restart": a new worker takes its place.
      resume_lost: where the engine goes on, requests that a lost worker had go on after their last
        delivered token; otherwise they end with the reason `WORKER_LOST`.
      max_restarts: of each rank; from then on, it is as with "continue".
      max_silence: seconds; a worker that has requests and sends nothing for longer hangs, and is
        lost. Its imports and compilations are silent too. None: the engine waits.

    Raises:
      ValueError: a value that cannot be; names it, and what can.
    """

    drafter: str = "mtp"
    num_drafts: int = 3
    num_slots: int = 8
    max_length: int = 512
    vocab_size: int
    weights: str = ""
    dtype: str = ""
    prefill_chunk: int = 64
    prefix_reuse: bool = True
    ring_slots: int = 16
    rehearse: bool = True
    adaptive: bool = False
    corpus: str = ""
    num_ranks: int = 1
    num_prefill_ranks: int = 0
    tensor_parallel: int = 1
    processes: bool = False
    on_worker_loss: OnWorkerLoss = "stop"
    resume_lost: bool = False
    max_restarts: int = 3
    max_silence: float | None = None

    def __post_init__(self) -> None:
        limits = (
            ("vocab_size", 1, 2**31 - 1),
            ("num_drafts", 0, MAX_DRAFTS),
            ("num_slots", 1, 2**16),
            ("max_length", 2, 2**31 - 1),
            ("prefill_chunk", 1, 2**16),
            ("ring_slots", 1, 2**16),
            ("num_ranks", 1, 2**10),
            ("num_prefill_ranks", 0, 2**10),
            ("tensor_parallel", 1, 2**10),
            ("max_restarts", 0, 2**31 - 1),
        )
        for name, low, high in limits:
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} = {getattr(self, name)} must be from {low} to {high}")
        if self.max_silence is not None and not self.max_silence > 0:
            raise ValueError(
                f"max_silence = {self.max_silence} must be above 0, or None to wait for ever"
            )
        choices = (
            ("drafter", DRAFTERS, ""),
            ("dtype", ("", *DTYPES), "; empty for that of the weights"),
            ("on_worker_loss", get_args(OnWorkerLoss), ""),
        )
        for name, known, more in choices:
            if (value := getattr(self, name)) not in known:
                named = ", ".join(filter(None, known))
                raise ValueError(f"{name} = {value!r} must be one of {named}{more}")

    @property
    def message_bytes(self) -> int:
        """The largest message that a step can make: every slot with all that may be asked for."""
        tokens = [self.num_drafts + 1] * self.num_slots
        columns = [min(wire.MAX_TOP_K, self.vocab_size) + 1] * self.num_slots
        chosen = [wire.MAX_CHOSEN] * self.num_slots
        return wire.WORD_BYTES * wire.words_bound(tokens, columns, chosen)


def check(request: Request, config: EngineConfig) -> None:
    """Refuse what cannot be served, before any of it reaches the worker.

    Raises:
      RequestError: an id outside the vocabulary, or more tokens than a slot holds.
    """
    params, ids = request.params, request.prompt_token_ids
    for name, named in (("prompt", ids), ("extra", params.extra_token_ids)):
        if named and not 0 <= min(named) <= max(named) < config.vocab_size:
            wrong = next(i for i in named if not 0 <= i < config.vocab_size)
            raise RequestError(
                f"request {request.id!r}: {name} token id {wrong} is outside the vocabulary "
                f"(0 to {config.vocab_size - 1})"
            )
    if len(ids) + params.max_tokens > config.max_length:
        raise RequestError(
            f"request {request.id!r}: {counted(len(ids), 'prompt token')} and max_tokens = "
            f"{params.max_tokens} exceed the {config.max_length} tokens of a slot; "
            "shorten one of them or raise max_length"
        )
    for name in ("logprobs", "prompt_logprobs"):
        k = getattr(params, name)
        if k is not None and k > config.vocab_size:
            raise RequestError(
                f"request {request.id!r}: {name} = {k}, but the vocabulary has only "
                f"{counted(config.vocab_size, 'token')}"
            )
