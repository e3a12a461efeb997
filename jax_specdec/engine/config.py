"""An engine's configuration, and the check of requests against it. Never jax."""

from dataclasses import dataclass, fields
from typing import Literal, get_args

from ipc import wire
from jax_specdec.checkpoint.model_config import DTYPES
from jax_specdec.control import DRAFTERS, WorkerConfig
from jax_specdec.requests import Request, RequestError
from jax_specdec.wording import counted

OnWorkerLoss = Literal["stop", "continue", "restart"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig(WorkerConfig):
    """What to run. Values are checked here, except those that need a file or a device.

    Attributes, beside those of `WorkerConfig`, which all workers share:
      ring_slots: messages that may wait for the engine.
      rehearse: shortly before a message is expected, process the last one once more and drop the
        outcome, so that the next one finds warm caches. Records then come about 0.3 ms sooner, for
        as much of the engine's time, which it would otherwise sleep. With several workers, any of
        which may be next, the engine does not rehearse.
      num_ranks: workers that decode, each with its own slots and ring.
      num_prefill_ranks: workers that only run prompts: a request's first token comes from one of
        them, the rest from a decode worker, which recomputes the prompt. 0: decode workers do both.
      on_worker_loss: what happens when a worker ends early. "stop": everything stops. "continue":
        the other workers go on without it. "restart": a new worker takes its place.
      resume_lost: where the engine goes on, a lost worker's requests continue after their last
        delivered token; otherwise they end with the reason `WORKER_LOST`.
      max_restarts: restarts in each worker's place; after that, a loss is as with "continue".
      max_silence: seconds. A worker that has requests and sends nothing for longer counts as
        hanging, and is lost. A worker is silent too while it imports and compiles. None: no limit.

    Raises:
      ValueError: names a value that is out of range, and the range.
    """

    ring_slots: int = 16
    rehearse: bool = True
    num_ranks: int = 1
    num_prefill_ranks: int = 0
    on_worker_loss: OnWorkerLoss = "stop"
    resume_lost: bool = False
    max_restarts: int = 3
    max_silence: float | None = None

    def __post_init__(self) -> None:
        limits = (
            ("vocab_size", 1, 2**31 - 1),
            ("num_drafts", 0, wire.MAX_DRAFTS),
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
                f"max_silence = {self.max_silence} must be above 0, or None for no limit"
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
    def worker(self) -> WorkerConfig:
        """The part that each worker is told."""
        return WorkerConfig(
            **{field.name: getattr(self, field.name) for field in fields(WorkerConfig)}
        )

    @property
    def message_bytes(self) -> int:
        """Size of a step's largest message: every slot sends all that a request may ask for."""
        tokens = [self.num_drafts + 1] * self.num_slots
        columns = [min(wire.MAX_TOP_K, self.vocab_size) + 1] * self.num_slots
        chosen = [wire.MAX_CHOSEN] * self.num_slots
        return wire.WORD_BYTES * wire.words_bound(tokens, columns, chosen)


def check(request: Request, config: EngineConfig) -> None:
    """Refuse a request that the workers cannot serve, before any of it reaches them.

    Raises:
      RequestError: an id outside the vocabulary, more tokens than a slot holds, or a K above V.
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
