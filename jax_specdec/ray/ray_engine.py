"""An engine made of many: requests in, batches of columns out, on any number of nodes.

Ray places the replicas, starts lost ones again, and carries the batches. Here requests are kept
until they have ended, so that one whose replica is lost goes on elsewhere from its own tokens.
"""

import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from jax_specdec.engine.config import EngineConfig, check_request
from jax_specdec.engine.engine import Engine
from jax_specdec.engine.errors import EngineFull, WeightsError
from jax_specdec.engine.result_queue import ResultQueue
from jax_specdec.engine.stream import Stream
from jax_specdec.ray.batch import ColumnBatch, Part
from jax_specdec.ray.config import RayConfig
from jax_specdec.ray.errors import full_store, ray
from jax_specdec.ray.fleet import Fleet
from jax_specdec.ray.replica import MakeEngine
from jax_specdec.ray.replica_types import ReplicaStatus, Weights
from jax_specdec.ray.request_table import Entry
from jax_specdec.records.batch import FinishReason
from jax_specdec.requests import Request, RequestError
from jax_specdec.structured.checks import StructureChecks
from jax_specdec.structured.limits import GateFull
from jax_specdec.wording import pluralize


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
            replicas as they do for workers; with "restart", Ray starts each again `max_restarts`
            times within `restart_window`, on another node where its own is gone.
          cluster: how many replicas, on which devices; None: one, on a CPU.
          make_engine: what makes a replica's engine, in its process.

        Raises:
          ModuleNotFoundError: Ray is not installed; says how to.
          ValueError: the model does not divide among the nodes.
          ConnectionError: no cluster answers at the address.
        """
        self.config, self.cluster = config, cluster or RayConfig()
        self.cluster.check(config)
        self._structures = StructureChecks(config.texts, config.vocab_size)
        self._updating = threading.Lock()
        self._fleet = Fleet(config, self.cluster, make_engine)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all replicas, and the requests that are left, with the reason `ABORT`."""
        self._structures.close()
        self._fleet.close()

    @property
    def status(self) -> tuple[ReplicaStatus, ...]:
        """Each replica's numbers, its workers' included; waits for the replicas' answers."""
        return tuple(member.status() for member in self._fleet.members)

    @property
    def num_waiting(self) -> int:
        """Requests that no replica has."""
        return self._fleet.num_waiting

    @property
    def weights_version(self) -> int:
        """Of the weights that new requests run with."""
        return self._fleet.weights.version

    @property
    def traffic(self) -> dict[str, int]:
        """Counts of all replicas so far: `batches`, `bytes`, `rows`, `tokens`, `calls`."""
        names = ("batches", "bytes", "rows", "tokens", "calls")
        return {name: sum(member.traffic[name] for member in self._fleet.members) for name in names}

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
        for request in requests:
            self.check(request)
        if len({request.id for request in requests}) < len(requests):
            raise RequestError("a request id occurs twice: ids must differ")
        batches: ResultQueue[ColumnBatch] = ResultQueue(len(requests), self.cluster.backlog)
        self._fleet.admit([Entry(request, batches) for request in requests])
        try:
            yield from batches
        finally:
            batches.abandon()
            for request in requests:
                self._fleet.abort(request.id, batches)

    def check(self, request: Request) -> None:
        """Refuse a request that `submit` would, as `Engine.check` does."""
        check_request(request, self.config)
        try:
            self._structures.check(request)
        except GateFull as error:
            raise EngineFull(str(error)) from error

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
        self.check(request)
        stream: Stream[Part] = Stream(request, self._end, max_backlog=self.config.max_backlog)
        due = None if deadline is None else time.monotonic() + deadline
        if (waiting := self._fleet.num_waiting) >= self.config.max_waiting:
            raise EngineFull(
                f"{pluralize(waiting, 'request')} wait for a slot, as many as may "
                "(EngineConfig.max_waiting): try again later"
            )
        self._fleet.admit([Entry(request, stream, priority=priority, due=due)])
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
        return self._fleet.abort(request_id, None)

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
            version = self._fleet.weights.version + 1
            new = Weights(version=version, **self._content(weights))
            members = self._fleet.begin_change()
            try:
                if not members:
                    raise WeightsError("no replica is ready to load weights: try again later")
                calls = [(member, member.load_weights(new, timeout)) for member in members]
                refusals = [
                    f"replica {member.number}: {why}"
                    for member, answer in calls
                    if (why := answer())
                ]
                if refusals:
                    for member in members:
                        member.forget_weights()
                    self._fleet.check_open()  # its end is the reason, where it has ended
                    raise WeightsError("; ".join(refusals))
                self._fleet.weights = new
                answers = [(member, member.use_weights()) for member in members]
                for member, used in answers:
                    if used() != version:  # Ray starts it again, with the new ones
                        member.kill("it lost a worker while its weights changed")
                return version
            finally:
                self._fleet.end_change()

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

    def _end(self, stream: Stream[Part], reason: FinishReason) -> None:
        self._fleet.abort(stream.request.id, stream, reason)
