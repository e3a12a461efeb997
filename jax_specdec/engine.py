"""The engine: a process without jax that feeds model workers and delivers their records.

It owns the slots: it admits a request into a slot under a new generation, releases the slot when
the request's last record is out, and gives it to the next one. Commands go to a worker as lines on
its standard input; everything else comes back through shared memory.

The pure parts are elsewhere (`output_processor`); this is the edge with processes and clocks.
"""

import collections
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

from ipc.errors import RingError, RingTimeout
from ipc.polling import wait_readable
from ipc.ring import ReceivedMessage
from jax_specdec import output_processor
from jax_specdec.control import Admit, Release
from jax_specdec.decode import Message, MessageError, decode
from jax_specdec.engine_config import EngineConfig, check
from jax_specdec.output_processor import ProcessorError, ProcessorState
from jax_specdec.records import FinishReason, Records
from jax_specdec.requests import NotServed, Request, RequestError
from jax_specdec.worker_client import WORKER, WorkerFailed, WorkerProcess

__all__ = ["Engine", "EngineConfig", "NotServed", "Update", "WorkerFailed", "check"]

HEARTBEAT_SECONDS = 0.25  # between two looks at workers that send nothing


@dataclass(frozen=True)
class Update:
    """What one message brought."""

    message: Message | None  # None for records that close a lost worker's requests
    received: ReceivedMessage | None
    records: Records

    @property
    def latency_ns(self) -> int | None:
        """From the worker's commit to the engine's own copy, nanoseconds."""
        if self.received is None:
            return None
        return self.received.receive_time_ns - self.received.send_time_ns


@dataclass
class Rank:
    """One worker, its ring and what the engine knows about it."""

    worker: WorkerProcess
    state: ProcessorState
    free: list[int]
    generations: list[int]
    live: dict[str, int] = field(default_factory=dict)  # request id to slot


class Engine:
    """Runs requests on its workers; use it as a context manager."""

    def __init__(
        self, config: EngineConfig, *, num_ranks: int = 1, program: Sequence[str] = WORKER
    ) -> None:
        """Start `num_ranks` workers (`program`), each with a ring and slots of its own."""
        self.config = config
        self.ranks: list[Rank] = []
        try:
            for process_rank in range(num_ranks):
                slots = config.num_slots
                self.ranks.append(
                    Rank(
                        worker=WorkerProcess(
                            config,
                            process_rank=process_rank,
                            program=program,
                            doorbell=num_ranks > 1,
                        ),
                        state=ProcessorState.empty(slots, process_rank=process_rank),
                        free=list(range(slots))[::-1],
                        generations=[0] * slots,
                    )
                )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(drain=kind is None)

    def close(self, *, drain: bool = False) -> None:
        """Stop every worker; nothing stays in shared memory."""
        with contextlib.ExitStack() as stack:  # all of them, whatever happens at one
            for rank in self.ranks:
                stack.callback(rank.worker.stop, drain=drain)

    def generate(self, requests: Sequence[Request]) -> Iterator[Update]:
        """Run `requests`, as many at once as there are slots; yields what each message brought.

        Who stops iterating early gives up the requests that are left; the engine can go on with
        others.

        Raises:
          RequestError: one of them cannot be served; none was started then.
          WorkerFailed: a worker ended early, or sent what cannot be; the records that close every
            request that had begun came before.
        """
        for request in requests:
            check(request, self.config)
        names = collections.Counter(request.id for request in requests)
        if twice := [name for name, count in names.items() if count > 1]:
            raise RequestError(f"request ids must differ: {twice[0]!r} occurs twice")
        waiting = collections.deque(requests)
        try:
            while waiting or any(rank.live for rank in self.ranks):
                for rank in self.ranks:
                    while waiting and rank.free:
                        self._admit(rank, waiting.popleft())
                yield from self._receive()
        finally:
            for rank in self.ranks:
                for request_id in list(rank.live):
                    self._free(rank, request_id)

    def _admit(self, rank: Rank, request: Request) -> None:
        slot = rank.free.pop()
        rank.generations[slot] = (rank.generations[slot] + 1) & 0xFFFFFFFF
        generation = rank.generations[slot]
        rank.state = output_processor.admit(rank.state, slot, generation, request)
        rank.live[request.id] = slot
        rank.worker.tell(Admit(slot=slot, generation=generation, request=request))

    def _receive(self) -> Iterator[Update]:
        """The next message of each ring that has one; waits until one has."""
        busy = [rank for rank in self.ranks if rank.live]
        for rank in _wait(busy):
            try:
                received = _take(rank, alone=len(busy) == 1)
                if received is None:
                    continue
                message = decode(received.data)
                rank.state, records = output_processor.step(rank.state, message)
            except (RingError, MessageError, ProcessorError) as error:
                for other in busy:
                    other.state, records = output_processor.flush(
                        other.state, reason=FinishReason.WORKER_LOST
                    )
                    yield from self._deliver(other, None, None, records)
                raise rank.worker.failure(error) from error
            yield from self._deliver(rank, message, received, records)

    def _deliver(
        self,
        rank: Rank,
        message: Message | None,
        received: ReceivedMessage | None,
        records: Records,
    ) -> Iterator[Update]:
        for record in records.events():
            if record.reschedule:
                raise NotServed(f"request {record.request_id!r} was preempted: not served yet")
            self._free(rank, record.request_id)
        yield Update(message, received, records)

    def _free(self, rank: Rank, request_id: str) -> None:
        slot = rank.live.pop(request_id)
        rank.state = output_processor.release(rank.state, slot)
        rank.worker.tell(Release(slot=slot, generation=rank.generations[slot]))
        rank.free.append(slot)


def _wait(ranks: Sequence[Rank]) -> list[Rank]:
    """Those that may have a message: the one there is, or as soon as one of several has."""
    if len(ranks) == 1:
        return list(ranks)
    by_name = {rank.worker.ring.name: rank for rank in ranks}
    rings = wait_readable([rank.worker.ring for rank in ranks], HEARTBEAT_SECONDS)
    return [by_name[ring.name] for ring in rings]


def _take(rank: Rank, *, alone: bool) -> ReceivedMessage | None:
    """The rank's next message; waits a heartbeat for it where no other rank does."""
    if not alone:
        return rank.worker.ring.try_receive()
    try:
        return rank.worker.ring.receive(HEARTBEAT_SECONDS)
    except RingTimeout:
        return None
