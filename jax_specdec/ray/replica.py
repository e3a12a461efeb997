"""One engine of a fleet, as an actor of Ray: requests in, batches of columns out.

The actor's process is the engine's: it starts workers, reads their rings, and ends with them.
Whoever began it last, with `begin`, has it for itself; who began it before hears nothing more.
"""

import contextlib
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ipc import doctor
from jax_specdec.engine import leftovers
from jax_specdec.engine.config import EngineConfig
from jax_specdec.engine.engine import Engine
from jax_specdec.engine.errors import EngineClosed, WeightsError, WorkerFailed
from jax_specdec.engine.streams import Sink
from jax_specdec.engine.weights import WeightsUpdate
from jax_specdec.export.step_rows import step_rows
from jax_specdec.ray.batch import arrow_bytes
from jax_specdec.ray.errors import CANNOT_BEGIN, NotBegun, ray
from jax_specdec.ray.group import Followers
from jax_specdec.ray.remove_leftovers import remove_host_leftovers
from jax_specdec.ray.replica_types import ReplicaAddress, ReplicaStatus, Submission, Weights
from jax_specdec.ray.send_queue import SendQueue
from jax_specdec.records.batch import FinishReason, RecordBatch

MakeEngine = Callable[..., Engine]
BEGIN_SECONDS = 60.0  # for the ends of what an earlier program had asked for
READY_SECONDS = 0.02  # between two looks whether a worker takes requests
# One thread reads the rings, others take requests. While both compute, Python lets one of them wait
# for 5 ms as it comes, ten steps of a quick worker; a shorter time costs nothing here.
SWITCH_SECONDS = 0.0002


class Replica:
    """An engine behind an actor; each method is called by Ray."""

    def __init__(
        self,
        number: int,
        config: EngineConfig,
        make_engine: MakeEngine = Engine,
        followers: Sequence[Any] = (),
    ) -> None:
        """Note what to run; `begin` makes the engine.

        Args:
          number: of the replica.
          make_engine: called with the configuration and `sink`.
          followers: actors on the other nodes of the model, in order.
        """
        self._number, self._config, self._make_engine = number, config, make_engine
        self._followers = Followers(followers) if followers else None
        self._engine: Engine | None = None
        self.send_queue = SendQueue(self._packed)
        self._emitted: dict[str, int] = {}
        self._open: dict[str, Any] = {}  # streams by request id
        self._version = config.weights_version
        self._loaded: tuple[contextlib.ExitStack, WeightsUpdate] | None = None
        self._folder: Path | None = None
        self._held = threading.Lock()
        self._closing = False
        sys.setswitchinterval(SWITCH_SECONDS)

    def address(self) -> ReplicaAddress:
        """Where it is, and which process."""
        return ReplicaAddress(ray().get_runtime_context().get_node_id(), doctor.this_process())

    def begin(self, weights: Weights) -> ReplicaStatus:
        """Make the engine, or end all that it does; returns once a worker takes requests.

        First it removes what killed replicas left on this host.

        Raises:
          CANNOT_BEGIN: there is no engine; says why.
        """
        with self._held:
            self._forget_loaded()
            engine = self._engine
            if engine is not None and engine.health().alive:
                streams = list(self._open.values())
                for stream in streams:
                    stream.abort()
                _wait(lambda: self._over(streams))
                self._open.clear()
                self._emitted.clear()
                self.send_queue.clear()
                if weights.version != self._version:
                    self._version = engine.update_weights(_content(weights))
            else:
                self._end()
                remove_host_leftovers()
                engine = self._make(weights)
            while not (health := engine.health()).ready:
                if self._closing:
                    self._end()
                    raise EngineClosed("it was closed before a worker took requests")
                if not health.alive:
                    raise WorkerFailed("; ".join(health.problems))
                time.sleep(READY_SECONDS)
            return self.status()

    def records(self, pause: float) -> Iterator[Any]:
        """Yield batches as arrays of bytes; a text says why the engine has ended.

        Args:
          pause: seconds between two batches, at least.

        Raises:
          Exception: what ended the engine, where that is a mistake in a program.
        """
        for data in self.send_queue.read(pause):
            if isinstance(data, CANNOT_BEGIN):
                yield str(data)
                return
            if isinstance(data, BaseException):
                raise data
            if data is not None:
                yield data

    def _packed(self, taken: Sequence[RecordBatch]) -> NDArray[np.uint8] | None:
        """A batch of the records of some steps; None where it would have no row."""
        rows = step_rows(taken, self._emitted)
        for row in rows.column("finish_reason").to_numpy().nonzero()[0].tolist():
            self._open.pop(rows.column("request_id")[row].as_py(), None)
        if self._config.resume_lost:
            rows = without_lost(rows)
        return arrow_bytes(rows) if rows.num_rows else None

    def submit(self, submissions: Sequence[Submission]) -> None:
        """Take requests; an engine that has ended ends the replica's batches with its error.

        Raises:
          NotBegun: there is no engine.
          RequestError, EngineFull: the engine refuses a request that the fleet has checked.
        """
        engine = self._engine
        if engine is None:
            raise NotBegun(f"replica {self._number} was started again, and has no engine yet")
        self.send_queue.expect(len(submissions))
        with engine.together():
            for submission in submissions:
                self.submit_one(engine, submission)

    def abort(self, names: Sequence[str]) -> None:
        """End requests; their last rows come with the others."""
        if self._engine is not None:
            for name in names:
                self._engine.abort(name)

    def status(self) -> ReplicaStatus:
        """The replica's numbers."""
        context = ray().get_runtime_context()
        return ReplicaStatus(
            replica=self._number,
            node=context.get_node_id(),
            host=ray("ray.util").get_node_ip_address(),
            pid=os.getpid(),
            open_requests=len(self._open),
            steps=self.send_queue.steps,
            events=tuple(self.send_queue.events),
            workers=self._engine.status if self._engine is not None else (),
        )

    def load_weights(self, weights: Weights, timeout: float | None) -> str:
        """Load other weights beside those in use; why it cannot, or ""."""
        engine = self._engine
        if engine is None:
            return "it has no engine"
        with self._held:
            self._forget_loaded()
            stack = contextlib.ExitStack()
            try:
                block = engine.load_weights(_content(weights), timeout=timeout)
                self._loaded = stack, stack.enter_context(block)
            except (WeightsError, WorkerFailed, EngineClosed) as error:
                stack.close()
                return str(error)
        return ""

    def use_weights(self) -> int:
        """Use what was loaded; returns its version.

        Raises:
          WeightsError: a worker was lost meanwhile.
        """
        with self._held:
            assert self._loaded is not None
            stack, loaded = self._loaded
            self._loaded = None
            with stack:
                self._version = loaded.use()
            return self._version

    def forget_weights(self) -> None:
        """Forget what was loaded and not used."""
        with self._held:
            self._forget_loaded()

    def close(self) -> None:
        """End the engine and its workers; remove what killed replicas left on this host."""
        self._closing = True
        with self._held:
            self._end()
        remove_host_leftovers()

    def submit_one(self, engine: Engine, submission: Submission) -> None:
        name = submission.request.id
        if submission.progress is not None:
            self._emitted[name] = len(submission.progress.token_ids)
        try:
            stream = self._open[name] = engine.submit(
                submission.request,
                priority=submission.priority,
                deadline=submission.deadline,
                progress=submission.progress,
            )
        except (EngineClosed, WorkerFailed) as error:
            self.send_queue.fail(error)
            return
        if stream.finish_reason is not None:  # its last row may have left before
            self._open.pop(name, None)

    def _over(self, streams: Sequence[Any]) -> bool:
        """Whether streams have ended; what they brought is dropped, so that no engine waits."""
        self.send_queue.clear()
        return all(stream.finish_reason is not None for stream in streams)

    def _make(self, weights: Weights) -> Engine:
        config = self._config
        if weights.version != config.weights_version or weights.path or weights.arrays is not None:
            config = self._with(weights)
        self.send_queue, self._version = SendQueue(self._packed), weights.version
        if self._followers is not None:
            config = self._followers.placed(config)
        sink: Sink = self.send_queue
        self._engine = engine = self._make_engine(config, sink=sink)
        # An engine begins to hear its workers with its first request; this one shall before.
        engine.serve()
        return engine

    def _with(self, weights: Weights) -> EngineConfig:
        """The configuration with other weights than it names; arrays go into a file."""
        path = weights.path
        if weights.arrays is not None:
            from jax_specdec.checkpoint.written_arrays import write_arrays

            self._folder = Path(tempfile.mkdtemp(prefix=f"{leftovers.DIRECTORY_PREFIX}weights-"))
            leftovers.mark_owner(self._folder)
            arrays: Mapping[str, Any] = ray().get(weights.arrays[0])
            made = write_arrays(
                arrays,
                self._config.weights,
                self._folder / "weights",
                is_own_model=bool(self._config.own_model),
            )
            path = str(made)
        return replace(
            self._config,
            weights=path,
            weights_version=weights.version,
            tokenizer=self._config.texts,
        )

    def _forget_loaded(self) -> None:
        if self._loaded is not None:
            stack, _ = self._loaded
            self._loaded = None
            with contextlib.suppress(WeightsError, WorkerFailed, EngineClosed):
                stack.close()

    def _end(self) -> None:
        self._forget_loaded()
        self.send_queue.close()
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        self.send_queue.clear()  # a reader that Ray still holds makes nothing more of it
        if self._followers is not None:
            self._followers.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        self._open.clear()
        self._emitted.clear()


def without_lost(rows: Any) -> Any:
    """The rows except for those of requests that ended because no worker is left.

    An engine that resumes requests ends some so at its own end alone. Then they are the fleet's to
    resume, from the tokens that reached it: what the rows have is computed again.
    """
    lost = rows.column("finish_reason").to_numpy() == FinishReason.WORKER_LOST
    return rows.filter(~lost) if lost.any() else rows


def _content(weights: Weights) -> Any:
    """Weights as `Engine.update_weights` takes them."""
    return weights.path if weights.arrays is None else ray().get(weights.arrays[0])


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + BEGIN_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"requests of an earlier program run on after {BEGIN_SECONDS:g} s")
        time.sleep(READY_SECONDS)
