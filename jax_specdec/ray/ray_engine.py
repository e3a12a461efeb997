"""An engine made of many: requests in, batches of columns out, on any number of nodes. Never jax.

Ray places the replicas, starts lost ones anew, and carries the batches. Here requests are kept
until they have ended, so that one whose replica is lost goes on elsewhere from its own tokens.
"""

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

import numpy as np

from jax_specdec.engine.config import EngineConfig, check
from jax_specdec.engine.engine import Engine
from jax_specdec.engine.errors import EngineClosed, EngineFull, WeightsError, WorkerFailed
from jax_specdec.engine.stream import Stream
from jax_specdec.ray import placement
from jax_specdec.ray.batch import ColumnBatch, Part
from jax_specdec.ray.book import Book, Entry, end_rows
from jax_specdec.ray.collected import Collected
from jax_specdec.ray.config import RayConfig
from jax_specdec.ray.errors import ClusterError, full_store
from jax_specdec.ray.head import Head
from jax_specdec.ray.installed import ray
from jax_specdec.ray.member import Member
from jax_specdec.ray.replica import MakeEngine, ReplicaStatus, Weights
from jax_specdec.ray.routes import Load, Routes
from jax_specdec.records.batch import FinishReason
from jax_specdec.requests import Request, RequestError
from jax_specdec.wording import counted

logger = logging.getLogger("jax_specdec.ray")
logger.addHandler(logging.NullHandler())
LOOK_SECONDS = 0.25


class RayEngine:
    """Runs requests on replicas of an engine, over a Ray cluster; use it as a context manager."""

    def __init__(
        self,
        config: EngineConfig,
        cluster: RayConfig | None = None,
        *,
        make_engine: MakeEngine = Engine,
    ) -> None:
        """Ask Ray for the replicas; requests may be submitted at once, and wait for the first.

        Args:
          config: of each replica. `on_worker_loss`, `resume_lost` and `max_attempts` hold for
            replicas as they do for workers; with "restart", Ray starts each anew `max_restarts`
            times, on another node where its own is gone.
          cluster: how many replicas, on which devices; None: one, on a CPU.
          make_engine: what makes a replica's engine, in its process.

        Raises:
          ModuleNotFoundError: Ray is not installed; says how to.
          ValueError: the model does not divide among the nodes.
          ConnectionError: no cluster answers at the address.
        """
        self.config, self.cluster = config, cluster or RayConfig()
        self.cluster.check(config)
        self._lock = threading.Condition(threading.RLock())
        self._updating = threading.Lock()
        self._changing = False  # an update of the weights is between its two halves
        self._weights = Weights(version=config.weights_version, path=config.weights)
        self._failure: BaseException | None = None
        self._closed = False
        self._started = placement.start(self.cluster.address)
        self._book = Book(Routes(config.prefill_chunk))
        self._name = uuid.uuid4().hex[:8]
        slots = config.num_slots * config.num_ranks
        ahead = slots if self.cluster.ahead is None else self.cluster.ahead
        self._load = partial(Load, slots, ahead)
        replica_config = _of_replica(config, slots + ahead)
        self.members = [
            Member(
                number,
                partial(
                    placement.Place,
                    number,
                    f"{self._name}:replica-{number}",
                    replica_config,
                    self.cluster,
                    make_engine,
                ),
                self,
            )
            for number in range(self.cluster.replicas)
        ]
        self._head = Head(self.cluster.head_timeout)
        self._began = time.monotonic()
        for member in self.members:
            member.start()
        self._watch = threading.Thread(target=self._look, name="fleet of jax_specdec", daemon=True)
        self._watch.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all replicas, and the requests that are left, with the reason `ABORT`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._end([(entry, FinishReason.ABORT) for entry in self._book.all()])
            self._lock.notify_all()
        reachable = self._head.answers
        for member in self.members:
            member.close(reachable=reachable)
        self._head.close()
        self._watch.join()
        if self._started:
            ray().shutdown()

    @property
    def status(self) -> tuple[ReplicaStatus, ...]:
        """Each replica's numbers, its workers' included; waits for the replicas' answers."""
        return tuple(member.status() for member in self.members)

    @property
    def num_waiting(self) -> int:
        """Requests that no replica has."""
        with self._lock:
            return self._book.num_waiting

    @property
    def weights_version(self) -> int:
        """Of the weights that new requests run with."""
        return self._weights.version

    @property
    def traffic(self) -> dict[str, int]:
        """What came from all replicas so far: `batches`, `bytes`, `rows`, `tokens`, `calls`."""
        names = ("batches", "bytes", "rows", "tokens", "calls")
        return {name: sum(member.traffic[name] for member in self.members) for name in names}

    def generate(self, requests: Sequence[Request]) -> Iterator[ColumnBatch]:
        """Run `requests` on all replicas; yields what came, in batches of many requests.

        Where this iterator is not read, replicas wait (`RayConfig.backlog`), and their workers.
        Leaving it ends the requests that are left. Other requests may run beside these.

        Raises:
          RequestError: one of the requests cannot be served; then no request was started.
          WorkerFailed: a replica is lost, and `on_worker_loss` stops all or none is left. The
            batches before it closed every request.
          ClusterError: the cluster does not serve.
        """
        taken = [self._checked(request) for request in requests]
        names = {request.id for request in taken}
        if len(names) < len(taken):
            raise RequestError("a request id occurs twice: ids must differ")
        collected = Collected(self.cluster.backlog)
        with self._lock:
            self._admit([Entry(request, collected) for request in taken])
        try:
            left = len(taken)
            while left:
                batch = collected.next()
                left -= int(np.count_nonzero(batch.finish_reasons))
                yield batch
            if (failure := collected.error) is not None:
                raise failure
        finally:
            collected.close()
            for request in taken:
                self._abort(request.id, collected)

    def submit(
        self, request: Request, *, priority: int = 0, deadline: float | None = None
    ) -> Stream[Part]:
        """Run a request beside those that run already; returns its parts as they come.

        Any thread may call it. A part is what a batch has for the request. One whose reader is
        `EngineConfig.max_backlog` parts behind ends, as with `Engine.submit`.

        Raises:
          RequestError: the request cannot be served, or its id is that of an open one.
          EngineFull: `EngineConfig.max_waiting` requests wait here.
          EngineClosed, WorkerFailed, ClusterError: the engine has ended.
        """
        stream: Stream[Part] = Stream(
            self._checked(request), self._end_stream, max_backlog=self.config.max_backlog
        )
        due = None if deadline is None else time.monotonic() + deadline
        with self._lock:
            if self._book.num_waiting >= self.config.max_waiting:
                raise EngineFull(
                    f"{counted(self._book.num_waiting, 'request')} wait for a slot, as many as may "
                    "(EngineConfig.max_waiting): try again later"
                )
            self._admit([Entry(request, stream, priority=priority, due=due)])
        return stream

    async def stream(
        self, request: Request, *, priority: int = 0, deadline: float | None = None
    ) -> AsyncIterator[Part]:
        """Run a request, and yield its parts in an asyncio program; arguments as `submit`.

        Leaving the loop early, and cancelling its task, ends the request.
        """
        with self.submit(request, priority=priority, deadline=deadline) as parts:
            async for part in parts:
                yield part

    def abort(self, request_id: str) -> bool:
        """End a request; its next row is its last one, with the reason `ABORT`.

        Returns False, and does nothing, where the request has ended or is not known.
        """
        return self._abort(request_id, None)

    def update_weights(
        self, weights: str | Path | Mapping[str, Any], *, timeout: float | None = None
    ) -> int:
        """Let all replicas use other weights of the same model, or none; returns their version.

        Arrays are put into Ray's object store once, and each node fetches them once. All replicas
        load them beside those that they use; once all have, each uses them from its next step on.
        A replica that is lost after that begins with the new ones.

        Args:
          weights: a path that every node can read, or arrays; as `Engine.update_weights`.
          timeout: seconds until all must have loaded them.

        Raises:
          WeightsError: a replica refuses them, was lost before all had them, or needs longer: all
            use the weights that they had.
          EngineClosed, WorkerFailed, ClusterError: the engine has ended, or a store is full.
        """
        with self._updating:
            version = self._weights.version + 1
            new = Weights(version=version, **self._content(weights))
            with self._lock:
                self._check_open()
                self._changing = True
                members = [member for member in self.members if member.ready]
            try:
                if not members:
                    raise WeightsError("no replica is ready to load weights: try again later")
                asked = [(member, member.load_weights(new, timeout)) for member in members]
                refusals = [
                    f"replica {member.number}: {why}"
                    for member, answer in asked
                    if (why := answer())
                ]
                if refusals:
                    for member in members:
                        member.forget_weights()
                    raise WeightsError("; ".join(refusals))
                self._weights = new
                answers = [(member, member.use_weights()) for member in members]
                for member, used in answers:
                    if used() != version:  # Ray starts it anew, with the new ones
                        member.kill("it lost a worker while its weights changed")
                return version
            finally:
                with self._lock:
                    self._changing = False
                    self._lock.notify_all()

    def _content(self, weights: str | Path | Mapping[str, Any]) -> dict[str, Any]:
        if not isinstance(weights, Mapping):
            return {"path": str(Path(weights).absolute())}
        arrays = {name: np.asarray(value) for name, value in weights.items()}
        size = sum(array.nbytes for array in arrays.values())
        errors = ray("ray.exceptions")
        try:
            return {"arrays": [ray().put(arrays)]}
        except (errors.ObjectStoreFullError, errors.OutOfDiskError) as error:
            raise full_store(f"weights of {size} bytes", error) from error

    def _checked(self, request: Request) -> Request:
        check(request, self.config)
        if request.params.prompt_logprobs is not None:
            raise RequestError(
                f"request {request.id!r}: batches of columns have no prompt_logprobs; score "
                "prompts with an Engine on each node (examples/ray_score.py)"
            )
        return request

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise EngineClosed("the engine is closed: make a new one")

    def _admit(self, entries: Sequence[Entry]) -> None:
        """Let requests wait, and send what can be sent; the lock is held."""
        self._check_open()
        for entry in entries:
            if entry.request.id in self._book.entries:
                raise RequestError(f"request id {entry.request.id!r} is that of an open request")
        for entry in entries:
            self._book.add(entry)
        self._send()

    def _send(self) -> None:
        """Send what waits to replicas that have room; the lock is held."""
        now = time.monotonic()
        for replica, entries in self._book.assigned().items():
            self.members[replica].submit([entry.order(now) for entry in entries])

    def _end_stream(self, stream: Stream[Part], reason: FinishReason) -> None:
        self._abort(stream.request.id, stream, reason)

    def _abort(self, name: str, consumer: Any, reason: FinishReason = FinishReason.ABORT) -> bool:
        with self._lock:
            entry = self._book.entries.get(name)
            if entry is None or (consumer is not None and entry.consumer is not consumer):
                return False
            if entry.replica is not None:
                self.members[entry.replica].abort([entry.key])
            self._end([(entry, reason)])
            self._send()
            return True

    def _end(self, ends: Sequence[tuple[Entry, FinishReason]]) -> None:
        """End requests here; the lock is held."""
        if not ends:
            return
        for entry, _ in ends:
            self._book.drop(entry)
        self._deliver(end_rows(ends), [entry for entry, _ in ends])

    def _deliver(self, batch: ColumnBatch, entries: Sequence[Entry]) -> list[Collected]:
        """Give rows to those who asked for them, with the lock held; which iterators got some."""
        first = entries[0].consumer
        if isinstance(first, Collected) and all(entry.consumer is first for entry in entries):
            first.put(batch)
            return [first]
        collected: dict[int, tuple[Collected, list[int]]] = {}
        for row, entry in enumerate(entries):
            consumer = entry.consumer
            if isinstance(consumer, Collected):
                collected.setdefault(id(consumer), (consumer, []))[1].append(row)
            else:
                self._put(cast("Stream[Part]", consumer), Part(batch, row))
        for consumer, rows in collected.values():
            consumer.put(batch.take(rows))
        return [consumer for consumer, _ in collected.values()]

    def _put(self, stream: Stream[Part], part: Part) -> None:
        if not stream.put(part) and part.finish_reason is None:
            logger.warning("request %r ends: nobody reads its parts", part.request_id)
            self._abort(part.request_id, stream)
        elif part.finish_reason is not None:
            stream.close()

    # What the members call.

    def joined(self, member: Member, version: int) -> bool:
        """Let a replica have requests, if it has the weights in use; else it must get them."""
        with self._lock:
            while self._changing and not self._closed:
                self._lock.wait(LOOK_SECONDS)
            if version != self._weights.version:
                return False
            member.ready = True
            self._book.join(member.number, self._load())
            self._send()
            return True

    @property
    def weights(self) -> Weights:
        """Those in use, for a replica that begins."""
        return self._weights

    def over(self) -> bool:
        """Whether no member shall go on."""
        return self._closed or self._failure is not None

    def brought(self, member: Member, rows: Any) -> None:
        """Take a batch of a replica; waits where its reader is behind.

        Raises:
          BatchError: it contradicts what came before.
        """
        with self._lock:
            batch, entries = self._book.take(rows, member.number)
            self._send()
            readers = self._deliver(batch, entries) if entries else ()
        for reader in readers:
            reader.wait_for_room()

    def lost(self, member: Member, why: str, *, coming: bool) -> None:
        """Note that a replica is lost, and whether Ray starts it anew."""
        with self._lock:
            member.ready = False
            if self.over():
                return
            logger.warning("replica %d is lost: %s", member.number, why)
            report = WorkerFailed(f"replica {member.number} is lost: {why}")
            left = coming or any(other.coming for other in self.members if other is not member)
            if self.config.on_worker_loss == "stop" or not left:
                self._fail(report)
                return
            ends = self._book.lose(
                member.number,
                resume=self.config.resume_lost,
                max_attempts=self.config.max_attempts,
            )
            self._end(ends)
            self._send()

    def _fail(self, error: BaseException) -> None:
        """End everything with an error; the lock is held."""
        if self._failure is not None:
            return
        self._failure = error
        entries = list(self._book.all())
        consumers = {id(entry.consumer): entry.consumer for entry in entries}
        for consumer in consumers.values():
            if isinstance(consumer, Collected):
                consumer.error = error
        for entry in entries:
            self._book.drop(entry)
        if entries:
            batch = end_rows([(entry, FinishReason.WORKER_LOST) for entry in entries])
            for row, entry in enumerate(entries):
                if isinstance(entry.consumer, Stream):
                    entry.consumer.put(Part(batch, row))
                    entry.consumer.close(error)
            for consumer in consumers.values():
                if isinstance(consumer, Collected):
                    mine = [row for row, entry in enumerate(entries) if entry.consumer is consumer]
                    if mine:
                        consumer.put(batch.take(mine))
        self._lock.notify_all()

    def _look(self) -> None:
        """Look at deadlines and at the head, until the end."""
        while not self.over():
            time.sleep(LOOK_SECONDS)
            problem = self._head.problem()
            for member in self.members:
                member.look()
            now = time.monotonic()
            with self._lock:
                if self.over():
                    return
                if problem:
                    self._fail(ClusterError(problem))
                    return
                due = [e for e in self._book.all() if e.due is not None and e.due <= now]
                for entry in due:
                    self._abort(entry.request.id, entry.consumer, FinishReason.DEADLINE)
                late = now - self._began > self.cluster.start_timeout
                if late and not any(m.begun for m in self.members):
                    self._fail(ClusterError(self._no_room()))
                    return

    def _no_room(self) -> str:
        problems = {member.problem for member in self.members if member.problem}
        with contextlib.suppress(Exception):
            have = placement.nodes_of(ray().nodes())
            problems.add(f"the nodes have {have}")
        return (
            f"no replica took requests within {self.cluster.start_timeout:g} seconds "
            f"(RayConfig.start_timeout); each needs {dict(self.cluster.devices)} on "
            f"{counted(self.cluster.nodes, 'node')}: {'; '.join(sorted(problems))}. Ask for fewer "
            "devices, or add nodes"
        )


def _of_replica(config: EngineConfig, most: int) -> EngineConfig:
    from dataclasses import replace

    return replace(config, max_waiting=max(most, config.max_waiting))
