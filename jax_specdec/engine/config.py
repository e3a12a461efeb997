"""An engine's configuration, and the check of requests against it."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Literal, get_args

import numpy as np

from ipc import wire
from jax_specdec.checkpoint.model_config import WEIGHT_DTYPES
from jax_specdec.control import BEAT_SECONDS, DRAFT_WIDTHS, DRAFTERS, IMPLEMENTATIONS, WorkerConfig
from jax_specdec.declaration import Serves
from jax_specdec.requests import Request, RequestError, SamplingParams
from jax_specdec.wording import pluralize

MAX_RESTART_DELAY = 30.0  # seconds


class Restarts:
    """The losses that count against one place.

    A loss that is older than the window counts no more. One that is put down to a request is
    forgiven: the place is not to blame.
    """

    def __init__(self, most: int, window: float, delay: float) -> None:
        """Begin without a loss.

        Args:
          most: successors within the window.
          window: seconds.
          delay: seconds before the first successor; each further one within the window waits twice
            as long as the one before, and `MAX_RESTART_DELAY` at most.
        """
        self._most, self._window, self._delay = most, window, delay
        self._charged: dict[int, float] = {}  # when each loss was, by its number

    def charge(self, number: int, now: float) -> None:
        """Count a loss."""
        self._charged[number] = now

    def forgive(self, numbers: Iterable[int]) -> None:
        """Count losses no more."""
        for number in numbers:
            self._charged.pop(number, None)

    def forget(self, now: float) -> None:
        """Count no loss that is as old as the window; for a worker that has taken requests.

        One that never did so does not call it: otherwise a model that takes longer to fail than the
        window lasts would be started for ever.
        """
        old = [number for number, when in self._charged.items() if now - when >= self._window]
        self.forgive(old)

    def __len__(self) -> int:
        """How many losses count."""
        return len(self._charged)

    def allows(self, *, more: int = 0) -> bool:
        """Whether a successor may be started now, after so many more losses."""
        return self._most > 0 and len(self._charged) + more <= self._most

    @property
    def delay(self) -> float:
        """Seconds until the next successor starts."""
        doubled: float = self._delay * 2 ** max(len(self._charged) - 1, 0)
        return min(doubled, MAX_RESTART_DELAY)

    def __str__(self) -> str:
        return f"{len(self._charged)} of {self._most} within {self._window:g} s"


LEAST_HEARTBEAT_TIMEOUT = 2 * BEAT_SECONDS

OnWorkerLoss = Literal["stop", "continue", "restart"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig(WorkerConfig):
    """The settings of an engine, checked here, except those that need a file or a device.

    It has the attributes of `WorkerConfig`, which all workers share, and more.

    Attributes:
      prepare: parameters of requests that are served too, beside those of `serves`: another way to
        write it.
      ring_slots: messages that may wait for the engine.
      checksum: every message carries a checksum (XXH3-64), so that damage in shared memory ends the
        worker's stream with an error instead of arriving as values. docs/ring.md has its price.
      num_ranks: workers that decode, each with its own slots and ring.
      num_prefill_ranks: workers that only run prompts: a request's first token comes from one of
        them, the rest from a decode worker, which recomputes the prompt. 0: decode workers do both.
      on_worker_loss: what happens when a worker ends early. "stop": everything stops. "continue":
        the other workers go on without it. "restart": a new worker takes its place.
      resume_lost: where the engine goes on, a lost worker's requests continue after their last
        delivered token; otherwise they end with the reason `WORKER_LOST`.
      max_restarts: restarts in each worker's place within `restart_window`; after that, a loss is
        as with "continue". A loss that is put down to a request does not count.
      restart_window: seconds. A loss that is older counts no more.
      restart_delay: seconds before the first of them; each further one waits twice as long as the
        one before, and `MAX_RESTART_DELAY` at most.
      max_attempts: workers that may be lost while they have a request, which gets no further
        meanwhile. Then it ends with the reason `ATTEMPTS_EXHAUSTED`, once it was lost without
        others that may be what ended the worker: those that are lost together are tried apart.
      heartbeat_timeout: seconds. A worker whose process says nothing of itself for longer is lost;
        it does so each second, whatever it computes or compiles. One that is on this host, and
        visibly works all the time, is not: it reads a large tensor, for example.
      max_silence: seconds. A worker that has requests and makes no progress for longer hangs, and
        is lost, even if its heart beats. Importing, loading and compiling may last. None: no limit.
      devices: the accelerators that the workers share out, as CUDA_VISIBLE_DEVICES or its kin name
        them; empty for all that the engine finds. Each worker gets `tensor_parallel` of its own;
        one that is named twice is shared by two workers.
      control_address: where the engine listens for its workers, as ZeroMQ writes it, such as
        `tcp://10.0.0.1:*`, which is encrypted. Empty: a socket file that only this user can reach.
      max_waiting: requests that may wait for a slot; `Engine.submit` refuses one more.
      max_backlog: records of a stream that may wait for its consumer; one more ends its request.
      output_folder: where the workers' output is kept, in a file for each. Empty: a temporary
        directory, of which only the files of lost workers outlive the engine.

    Raises:
      ValueError: names a value that is out of range, and the range.
    """

    prepare: tuple[SamplingParams, ...] = ()
    ring_slots: int = 16
    checksum: bool = True
    num_ranks: int = 1
    num_prefill_ranks: int = 0
    on_worker_loss: OnWorkerLoss = "stop"
    resume_lost: bool = False
    max_restarts: int = 3
    restart_window: float = 600.0
    restart_delay: float = 0.5
    max_attempts: int = 2
    heartbeat_timeout: float = 10.0
    max_silence: float | None = 60.0
    devices: tuple[str, ...] = ()
    control_address: str = ""
    max_waiting: int = 1024
    max_backlog: int = 1024
    output_folder: str = ""

    def __post_init__(self) -> None:
        limits = (
            ("vocab_size", 1, 2**31 - 1),
            ("weights_version", 0, 2**32 - 1),
            ("num_drafts", 0, wire.MAX_DRAFTS),
            ("num_slots", 1, 2**16),
            ("max_length", 2, 2**31 - 1),
            ("prefill_chunk", 1, 2**16),
            ("row_tile", 8, 2**16),
            ("ring_slots", 1, 2**16),
            ("num_ranks", 1, 2**10),
            ("num_prefill_ranks", 0, 2**10),
            ("tensor_parallel", 1, 2**10),
            ("max_restarts", 0, 2**31 - 1),
            ("restart_window", 1, 2**31 - 1),
            ("restart_delay", 0, MAX_RESTART_DELAY),
            ("max_attempts", 1, 2**31 - 1),
            ("max_waiting", 1, 2**31 - 1),
            ("max_backlog", 1, 2**31 - 1),
            ("heartbeat_timeout", LEAST_HEARTBEAT_TIMEOUT, 2**31 - 1),
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
            ("draft_width", DRAFT_WIDTHS, ""),
            ("dtype", ("", *WEIGHT_DTYPES), "; empty for that of the weights"),
            ("implementation", ("", *IMPLEMENTATIONS), "; empty for kernels that are proved here"),
            ("on_worker_loss", get_args(OnWorkerLoss), ""),
        )
        for name, names, more in choices:
            if (value := getattr(self, name)) not in names:
                named = ", ".join(filter(None, names))
                raise ValueError(f"{name} = {value!r} must be one of {named}{more}")

        if self.row_tile % 8:
            raise ValueError(f"row_tile = {self.row_tile} must be a multiple of 8")
        if (self.drafter == "model") != bool(self.draft_model):
            raise ValueError(
                f"drafter = {self.drafter!r} with draft_model = {self.draft_model!r}: the drafter "
                '"model", and no other, needs a smaller model that drafts'
            )

        if self.own_model:
            self._check_own_model()

    def _check_own_model(self) -> None:
        if not all(self.own_model.partition(":")):
            raise ValueError(
                f"own_model = {self.own_model!r} must be module:function, such as my_models:make"
            )
        wrong = {
            "drafter": self.drafter in ("mtp", "model"),
            "tensor_parallel": self.tensor_parallel > 1,
        }
        for name in (name for name, is_wrong in wrong.items() if is_wrong):
            raise ValueError(
                f"{name} = {getattr(self, name)!r} is not for a model of your own: own_model goes "
                "with the drafters ngram, suffix and none, on one device"
            )

    @functools.cached_property
    def declared(self) -> Serves:
        """The most that requests may ask for: `serves`, and what `prepare` has."""
        return self.serves.including(self.prepare)

    @property
    def worker(self) -> WorkerConfig:
        """The part that each worker is told."""
        values = {field.name: getattr(self, field.name) for field in fields(WorkerConfig)}
        return WorkerConfig(**values | {"serves": self.declared})

    def restarts(self) -> Restarts:
        """A new count of losses, of one worker or replica; without "restart" it allows none."""
        most = self.max_restarts if self.on_worker_loss == "restart" else 0
        return Restarts(most, self.restart_window, self.restart_delay)

    @property
    def message_bytes(self) -> int:
        """Size of the largest message: every slot sends all that is served."""
        sizes = (self.num_slots, self.num_drafts + 1, self.prefill_chunk)
        return wire.WORD_BYTES * wire.message_bound(*sizes, self.serves.limits(self.vocab_size))


def check_request(request: Request, config: EngineConfig) -> None:
    """Refuse a request that the workers cannot serve, before any of it reaches them.

    Raises:
      RequestError: an id outside the vocabulary, more tokens than a slot holds, a K above V, or
        something that the engine does not serve.
    """
    params, ids = request.params, request.prompt_token_ids
    # A long prompt's ids are not looked at one by one: the engine has other requests to see to.
    prompt = np.frombuffer(request.packed_prompt, np.int32)
    extra = np.array(params.extra_token_ids, np.int32)
    biased = np.array([id for id, _ in params.logit_bias], np.int32)
    named_rows = params.prompt_extra_token_ids
    of_rows = np.frombuffer(b"" if named_rows is None else named_rows.data, np.int32)
    for name, named in (
        ("prompt", prompt), ("extra", extra), ("prompt_extra", of_rows), ("logit_bias", biased)
    ):  # fmt: skip
        if named.size and not 0 <= int(named.min()) <= int(named.max()) < config.vocab_size:
            wrong = int(named[(named < 0) | (named >= config.vocab_size)][0])
            raise RequestError(
                f"request {request.id!r}: {name} token id {wrong} is outside the vocabulary "
                f"(0 to {config.vocab_size - 1})"
            )
    if len(ids) + params.max_tokens > config.max_length:
        raise RequestError(
            f"request {request.id!r}: {pluralize(len(ids), 'prompt token')} and max_tokens = "
            f"{params.max_tokens} exceed the {config.max_length} tokens of a slot; "
            "shorten one of them or raise max_length (of a command: --max-length)"
        )
    for name in ("logprobs", "prompt_logprobs"):
        k = getattr(params, name)
        if k is not None and k > config.vocab_size:
            raise RequestError(
                f"request {request.id!r}: {name} = {k}, but the vocabulary has only "
                f"{pluralize(config.vocab_size, 'token')}"
            )
    if (excess := config.declared.excess(params)) is not None:
        raise RequestError(f"request {request.id!r} {excess}")
