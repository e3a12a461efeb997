"""Weights that change: what they are read from, and an update on its way to all workers.

First every worker loads and checks the weights beside those that it uses (`Prepare`). Once all of
them have, each uses them from its next step on (`Commit`). If one cannot, or is lost before that,
all forget them (`Discard`).
"""

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jax_specdec.control import Commit, Discard, Prepare
from jax_specdec.engine.errors import WeightsError
from jax_specdec.engine.weights_source import WeightsSource

if TYPE_CHECKING:
    from jax_specdec.engine.worker_client import WorkerProcess
    from jax_specdec.engine.worker_session import WorkerSession
    from jax_specdec.engine.workers import Workers

LAST_VERSION = 2**32 - 1  # the next one is 0


class WeightsUpdate:
    """One update: `look` at it now and then, until `over`.

    Attributes:
      committed: the workers were told to use the weights.
    """

    def __init__(
        self,
        workers: "Workers",
        source: WeightsSource,
        number: int,
        deadline: float | None,
        *,
        held: bool = False,
    ) -> None:
        """Begin with nothing told.

        Args:
          workers: those of the engine.
          source: the weights.
          number: of the update, above those of all before it.
          deadline: in seconds of the engine's clock, until which all must have loaded them.
          held: once all have, wait for `use`.
        """
        self.committed = False
        self._held = held
        self._loaded = threading.Event()  # by all, or it is over
        self._over = threading.Event()
        self._error: WeightsError | None = None
        self._workers, self._source = workers, source
        self._number, self._deadline = number, deadline
        self._told: dict[int, WorkerProcess] = {}  # by process rank
        self._version = 0

    @property
    def over(self) -> bool:
        """Whether all workers use the weights, or none does."""
        return self._over.is_set()

    def wait_loaded(self) -> None:
        """Wait until all workers have loaded the weights; any thread may ask.

        Raises:
          WeightsError: they will not: all use the weights that they had.
        """
        self._loaded.wait()
        if self._error is not None:
            raise self._error

    def use(self) -> int:
        """Let all workers use them from their next steps on; returns their version.

        Raises:
          WeightsError: a worker was lost meanwhile; all use the weights that they had.
        """
        self._held = False
        if self._workers.wakeup is not None:
            self._workers.wakeup.set()
        return self.result()

    def result(self) -> int:
        """Wait for the outcome: the new version; any thread may ask.

        Raises:
          WeightsError: the workers use the weights that they had.
        """
        self._over.wait()
        if self._error is not None:
            raise self._error
        return self._version

    def look(self, now: float) -> None:
        """Do what can be done now; waits for nothing."""
        if self.over:
            return
        if not self.committed:
            self._prepare(now)
        elif all(
            session.worker.heartbeat.weights_version == self._version
            for session in self._workers.sessions
            if session.alive and self._told.get(session.process_rank) is session.worker
        ):
            self._over.set()

    def fail(self, why: str) -> None:
        """End the update: who was told to load the weights forgets them, unless all use them."""
        if self.over:
            return
        if not self.committed:
            for session in self._workers.sessions:
                if session.alive and self._told.get(session.process_rank) is session.worker:
                    session.worker.tell(Discard(number=self._number))
            self._error = WeightsError(why)
        self._over.set()
        self._loaded.set()

    def _prepare(self, now: float) -> None:
        for session in self._workers.sessions:
            rank = session.process_rank
            if rank in self._told and (not session.alive or self._told[rank] is not session.worker):
                self.fail(
                    f"process rank {rank}: its worker was lost before all had loaded "
                    f"{self._source.path}: {session.ending or 'it has ended'}"
                )
                return
            if session.alive and rank not in self._told:
                self._told[rank] = session.worker
                session.worker.tell(Prepare(number=self._number, path=str(self._source.path)))
        alive = [session for session in self._workers.sessions if session.alive]
        heartbeats = [(session.process_rank, session.worker.heartbeat) for session in alive]
        for rank, heartbeat in heartbeats:
            if heartbeat.answered == self._number and heartbeat.refusal:
                self.fail(f"process rank {rank}: {heartbeat.refusal}")
                return
        decoding = any(not session.prefill_only for session in alive)
        if decoding and all(heartbeat.answered == self._number for _, heartbeat in heartbeats):
            self._loaded.set()
            if not self._held:
                self._commit(alive)
        elif self._deadline is not None and now >= self._deadline:
            slow = [
                str(rank) for rank, heartbeat in heartbeats if heartbeat.answered != self._number
            ]
            self.fail(
                f"process ranks {', '.join(slow) or 'that decode'} had not loaded "
                f"{self._source.path} in time"
            )

    def _commit(self, alive: "Sequence[WorkerSession]") -> None:
        try:
            self._source.check_unchanged()
        except OSError as error:
            self.fail(str(error))
            return
        version = self._workers.weights_version
        self._version = 0 if version == LAST_VERSION else version + 1
        self.committed = True
        for session in alive:
            session.worker.tell(Commit(number=self._number, version=self._version))
        self._workers.use_weights(self._source, self._version)
