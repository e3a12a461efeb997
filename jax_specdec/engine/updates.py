"""An engine's updates, one a message or event, and its workers' numbers."""

from dataclasses import dataclass

from ipc import ReceivedMessage, RingCounters
from jax_specdec.engine.errors import WorkerFailed
from jax_specdec.records.batch import Counters, Statistics
from jax_specdec.records.decode import Message
from jax_specdec.records.record import Records


@dataclass(frozen=True)
class Update:
    """The outcome of one message, or of an event without a message, for the requests.

    Attributes:
      message: None for records that no message caused: an abort, a lost worker.
      received: the message as it came out of the ring.
      records: the oldest first. A record without a finish reason is not its request's last one,
        even where it says `reschedule` or hands drafts over: the engine continues the request.
      process_rank: of the worker that sent the message or was lost; None where the request held no
        slot.
      lost: why the worker ended, in the update that reports its loss.
    """

    message: Message | None
    received: ReceivedMessage | None
    records: Records
    process_rank: int | None = None
    lost: WorkerFailed | None = None

    @property
    def latency_ns(self) -> int | None:
        """Nanoseconds from the worker's commit to the engine's own copy."""
        if self.received is None:
            return None
        return self.received.receive_time_ns - self.received.send_time_ns


@dataclass(frozen=True)
class WorkerStatus:
    """One worker's numbers at one moment; after a restart, those of its place.

    Attributes:
      process_rank: the worker's number, as in its messages.
      prefill_only: whether it hands requests over after their first token.
      pid: of its process.
      alive: whether it may still send; False once it was found lost.
      phase: what its processes do, the lead's first, such as "loading 30 of 290" (tensors) or
        "compiling 3 of 5 (step)" (three of five kinds of programs are there).
      devices: what its first process computes on, in JAX's words, which count the devices that the
        process sees; empty until it has loaded its model.
      given: the devices that it sees or uses, such as "CUDA_VISIBLE_DEVICES=2,3"; empty where
        nothing was shared out.
      restarts: workers that were started here in place of a lost one.
      weights_version: of the weights that the worker uses, as it last said.
      request_ids: of the requests that hold a slot, in order of admission.
      ring: counters of the current worker's ring.
      processor: what was not delivered, and why; over all workers that had this place.
      statistics: acceptance; over all workers that had this place.
    """

    process_rank: int
    prefill_only: bool
    pid: int
    alive: bool
    phase: tuple[str, ...]
    devices: tuple[str, ...]
    given: str
    restarts: int
    weights_version: int
    request_ids: tuple[str, ...]
    ring: RingCounters
    processor: Counters
    statistics: Statistics
