"""A fleet: its members, the table of requests, deliveries, deadlines, the end.

One lock holds all of it. Who waits for a reader, or for Ray, does so without the lock.
"""

import atexit
import contextlib
import itertools
import logging
import os
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from jax_specdec.engine.config import EngineConfig
from jax_specdec.engine.errors import EngineClosed, WorkerFailed
from jax_specdec.engine.result_queue import ResultQueue
from jax_specdec.engine.stream import Stream
from jax_specdec.ray import placement
from jax_specdec.ray.batch import ColumnBatch, Part
from jax_specdec.ray.config import RayConfig
from jax_specdec.ray.errors import ClusterError, lost_errors
from jax_specdec.ray.head import HeadWatch
from jax_specdec.ray.replica import MakeEngine
from jax_specdec.ray.replica_handle import FleetCalls, ReplicaHandle
from jax_specdec.ray.replica_types import Weights
from jax_specdec.ray.request_table import Entry, RequestTable, end_rows
from jax_specdec.ray.routes import Load, Routes
from jax_specdec.records.batch import FinishReason
from jax_specdec.requests import RequestError
from jax_specdec.wording import pluralize

logger = logging.getLogger("jax_specdec.ray")
FLEET_LOOK_SECONDS = 0.25


class Fleet:
    """The replicas of a `RayEngine`, and the requests that are open.

    Attributes:
      members: by number.
      weights: those in use, with which replicas begin.
    """

    def __init__(self, config: EngineConfig, cluster: RayConfig, make_engine: MakeEngine) -> None:
        """Join the cluster and ask for the replicas."""
        self.config, self.cluster = config, cluster
        self.weights = Weights(version=config.weights_version, path=config.weights)
        self._lock = threading.Condition(threading.RLock())
        self._changing = False  # an update of the weights is between its two halves
        self._failure: BaseException | None = None
        self._closed = False
        self._started = placement.join_cluster(cluster.address)
        self._losses = itertools.count(1)
        self._restarts = [config.restarts() for _ in range(cluster.replicas)]
        self._table = RequestTable(Routes(config.prefill_chunk))
        slots = config.num_slots * config.num_ranks
        ahead = slots if cluster.ahead is None else cluster.ahead
        self._load = partial(Load, slots, ahead)
        of_replica = replace(config, max_waiting=max(slots + ahead, config.max_waiting))
        name = uuid.uuid4().hex[:8]
        self.members = [
            ReplicaHandle(
                number,
                partial(
                    placement.ReplicaPlace, number, f"{name}:replica-{number}", of_replica, cluster,
                    make_engine,
                ),
                FleetCalls(
                    over=self.over, weights=lambda: self.weights, joined=self.joined,
                    brought=self.brought, lost=self.lost, failed=self.fail,
                ),
                cluster,
            )
            for number in range(cluster.replicas)
        ]  # fmt: skip
        self._head = HeadWatch(cluster.head_timeout)
        self._began = time.monotonic()
        with contextlib.ExitStack() as begun:
            self._close_members(begun, reachable=True)
            begun.callback(setattr, self, "_closed", True)
            for member in self.members:
                member.start()
            begun.pop_all()
        self._watch = threading.Thread(
            target=self._watch_all, name="fleet of jax_specdec", daemon=True
        )
        self._watch.start()
        # Ray's own hook, registered before this one, ends actors without a word to them.
        self._at_exit = partial(_close_at_exit, self, os.getpid())
        atexit.register(self._at_exit)

    def close(self) -> None:
        """End all replicas, and the requests that are left, with the reason `ABORT`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._end([(entry, FinishReason.ABORT) for entry in self._table.all()])
            self._lock.notify_all()
        atexit.unregister(self._at_exit)
        with contextlib.ExitStack() as closing:  # all of it is done, and then an error raised
            if self._started:
                closing.callback(placement.leave_cluster)
            closing.callback(self._watch.join)
            closing.callback(self._head.close)
            self._close_members(closing, reachable=self._head.answers)

    def _close_members(self, closing: contextlib.ExitStack, *, reachable: bool) -> None:
        for member in reversed(self.members):
            closing.callback(member.close, reachable=reachable)

    @property
    def num_waiting(self) -> int:
        """Requests that no replica has."""
        with self._lock:
            return self._table.num_waiting

    def begin_change(self) -> list[ReplicaHandle]:
        """Let no replica join until `end_change`; those that take requests now.

        Raises:
          EngineClosed, WorkerFailed, ClusterError: the engine has ended.
        """
        with self._lock:
            self.check_open()
            self._changing = True
            return [member for member in self.members if member.ready]

    def end_change(self) -> None:
        """Let replicas join again, with the weights that are in use now."""
        with self._lock:
            self._changing = False
            self._lock.notify_all()

    def admit(self, entries: Sequence[Entry]) -> None:
        """Let requests wait, and send what can be sent."""
        with self._lock:
            self.check_open()
            for entry in entries:
                if (name := entry.request.id) in self._table.entries:
                    raise RequestError(f"request id {name!r} is that of an open request")
            for entry in entries:
                self._table.add(entry)
            self._send()

    def abort(self, name: str, consumer: Any, reason: FinishReason = FinishReason.ABORT) -> bool:
        with self._lock:
            entry = self._table.entries.get(name)
            if entry is None or (consumer is not None and entry.consumer is not consumer):
                return False
            if entry.replica is not None:
                self.members[entry.replica].abort([entry.key])
            self._end([(entry, reason)])
            self._send()
            return True

    def check_open(self) -> None:
        """Refuse what nobody can do any more.

        Raises:
          EngineClosed, WorkerFailed, ClusterError: the engine has ended.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._closed:
                raise EngineClosed("the engine is closed: make a new one")

    def _send(self) -> None:
        """Send what waits to replicas that have room; the lock is held."""
        now = time.monotonic()
        for replica, entries in self._table.assigned().items():
            try:
                self.members[replica].submit([entry.submission(now) for entry in entries])
            except ClusterError as error:
                self._fail(error)
                return

    def _end(self, ends: Sequence[tuple[Entry, FinishReason]]) -> None:
        """End requests here; the lock is held."""
        if not ends:
            return
        for entry, _ in ends:
            self._table.drop(entry)
        self._deliver(end_rows(ends), [entry for entry, _ in ends])

    def _deliver(
        self, batch: ColumnBatch, entries: Sequence[Entry], error: BaseException | None = None
    ) -> list[ResultQueue[ColumnBatch]]:
        """Give rows to those who asked for them, with the lock held; which queues got some.

        Args:
          error: why requests end with these rows.
        """
        rows_of: dict[int, tuple[Any, list[int]]] = {}
        for row, entry in enumerate(entries):
            rows_of.setdefault(id(entry.consumer), (entry.consumer, []))[1].append(row)
        queues = []
        for consumer, rows in rows_of.values():
            if isinstance(consumer, ResultQueue):
                consumer.put(batch if len(rows) == len(entries) else batch.take(rows))
                consumer.finish(error, int(np.count_nonzero(batch.finish_reasons[rows])))
                consumer.wake()
                queues.append(consumer)
            else:
                for row in rows:
                    self._put(consumer, Part(batch, row), error)
        return queues

    def _put(self, stream: Stream[Part], part: Part, error: BaseException | None) -> None:
        if not stream.put(part) and part.finish_reason is None:
            logger.warning("request %r ends: nobody reads its parts", part.request_id)
            self.abort(part.request_id, stream)
        elif part.finish_reason is not None:
            stream.finish(error)

    # What the members call.

    def joined(self, member: ReplicaHandle, version: int) -> bool:
        """Let a replica have requests, if it has the weights in use; else it must get them."""
        with self._lock:
            while self._changing and not self._closed:
                self._lock.wait(FLEET_LOOK_SECONDS)
            if version != self.weights.version:
                return False
            member.ready = True
            self._table.join(member.number, self._load())
            self._send()
            return True

    def over(self) -> bool:
        """Whether no member shall go on."""
        return self._closed or self._failure is not None

    def brought(self, member: ReplicaHandle, rows: Any) -> None:
        """Take a batch of a replica; waits where its reader is behind.

        Raises:
          BatchError: it contradicts what came before.
        """
        with self._lock:
            batch, entries = self._table.take(rows, member.number)
            readers = self._deliver(batch, entries) if entries else ()
            self._send()
        for reader in readers:
            reader.wait_for_room()

    def lost(self, member: ReplicaHandle, why: str, coming: bool, charged: bool) -> None:
        """Note that a replica is lost, and whether it comes again.

        Args:
          coming: Ray could start it again, were it allowed to.
          charged: the loss is not one that was noted before.
        """
        with self._lock:
            member.ready = False
            if self.over():
                return
            number = next(self._losses)
            coming = coming and self._may_return(member, number if charged else None)
            member.coming = coming
            logger.warning("replica %d is lost: %s", member.number, why)
            report = WorkerFailed(f"replica {member.number} is lost: {why}")
            has_others = coming or any(
                other.coming for other in self.members if other is not member
            )
            if self.config.on_worker_loss == "stop" or not has_others:
                self._fail(report)
                return
            ends = self._table.lose(
                member.number,
                number=number,
                resume=self.config.resume_lost,
                max_attempts=self.config.max_attempts,
            )
            self._end(ends)
            self._send()

    def _may_return(self, member: ReplicaHandle, number: int | None) -> bool:
        """Whether a lost replica may be started again, as a worker may; the lock is held."""
        restarts, now = self._restarts[member.number], time.monotonic()
        if member.begun:
            restarts.forget(now)
        if number is not None:
            blamed = None
            if self.config.resume_lost:
                blamed = self._table.blamed(member.number, max_attempts=self.config.max_attempts)
            if blamed is None:
                restarts.charge(number, now)
            else:
                for restart in self._restarts:
                    restart.forgive(blamed.losses)
        return restarts.allows()

    def fail(self, error: BaseException) -> None:
        """End everything with an error."""
        with self._lock:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """End everything with an error; the lock is held."""
        if self._failure is not None:
            return
        self._failure = error
        entries = list(self._table.all())
        for entry in entries:
            self._table.drop(entry)
        if entries:
            lost = [(entry, FinishReason.WORKER_LOST) for entry in entries]
            self._deliver(end_rows(lost), entries, error)
        self._lock.notify_all()

    def _watch_all(self) -> None:
        """Look until the end; without a watch nothing may go on, for deadlines would pass."""
        try:
            self._look()
        except Exception as error:  # any: a thread has no caller, so the fleet's readers get it
            if not self.over():
                logger.exception("the fleet ends: a mistake in its watch")
                self.fail(error)

    def _look(self) -> None:
        """Look at deadlines and at the head, until the end."""
        while not self.over():
            time.sleep(FLEET_LOOK_SECONDS)
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
                due = [e for e in self._table.all() if e.due is not None and e.due <= now]
                for entry in due:
                    self.abort(entry.request.id, entry.consumer, FinishReason.DEADLINE)
                late = now - self._began > self.cluster.start_timeout
                if late and not any(m.begun for m in self.members):
                    self._fail(ClusterError(self._no_room()))
                    return

    def _no_room(self) -> str:
        problems = {member.problem for member in self.members if member.problem}
        with contextlib.suppress(ConnectionError, *lost_errors()):
            have = placement.nodes_of(self._head.nodes())
            problems.add(f"the nodes have {have}")
        return (
            f"no replica took requests within {self.cluster.start_timeout:g} seconds "
            f"(RayConfig.start_timeout); each needs {dict(self.cluster.devices)} on "
            f"{pluralize(self.cluster.nodes, 'node')}: {'; '.join(sorted(problems))}. Ask for "
            "fewer devices, or add nodes"
        )


def _close_at_exit(fleet: Fleet, pid: int) -> None:
    if os.getpid() == pid:  # a forked child inherits this
        fleet.close()
