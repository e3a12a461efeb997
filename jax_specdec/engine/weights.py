"""Weights that change: what they are read from, and an update on its way to all workers.

First every worker loads and checks the weights beside those that it uses (`Prepare`). Once all of
them have, each uses them from its next step on (`Commit`). If one cannot, or is lost before that,
all forget them (`Discard`).
"""

import contextlib
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_specdec.checkpoint.model_config import CheckpointError
from jax_specdec.control import Commit, Discard, Prepare, WorkerConfig

if TYPE_CHECKING:
    from jax_specdec.engine.worker_client import WorkerProcess
    from jax_specdec.engine.worker_session import WorkerSession
    from jax_specdec.engine.workers import Workers

LAST_VERSION = 2**32 - 1  # the next one is 0


class WeightsError(RuntimeError):
    """The weights were not updated: says why. All workers use those that they had."""


class WeightsSource:
    """A checkpoint that workers read; one that was written for them is removed with it.

    Attributes:
      path: a file or a directory.
    """

    def __init__(self, path: Path, *, temporary: bool = False) -> None:
        """Note what there is at `path` now.

        Raises:
          OSError: nothing, or it cannot be read.
        """
        self.path = path.absolute()
        self._temporary = temporary
        self._state = self._look()

    @classmethod
    def of(
        cls, weights: str | Path | Mapping[str, Any], config: WorkerConfig, target: Path
    ) -> "WeightsSource":
        """The source for `Engine.update_weights`; arrays are written to `target`.

        Raises:
          WeightsError: there is nothing at the path, or the arrays cannot be written.
        """
        try:
            if not isinstance(weights, Mapping):
                return cls(Path(weights))
            # Milliseconds, which only those pay for who have arrays.
            from jax_specdec.checkpoint.written_arrays import write_arrays

            made = write_arrays(weights, config.weights, target, own=bool(config.own_model))
            return cls(made, temporary=True)
        except (OSError, CheckpointError, ValueError) as error:
            for left in target.parent.glob(f"{target.name}.*"):
                _remove(left)
            raise WeightsError(f"the weights cannot be read: {error}") from error

    def check_unchanged(self) -> None:
        """Refuse files that were written to since: workers would use different weights.

        Raises:
          OSError: they were, or they are gone.
        """
        if self._look() != self._state:
            raise OSError(f"{self.path} has changed since its weights were loaded")

    def remove(self) -> None:
        """Remove what was written for the workers; a user's files stay."""
        if self._temporary:
            _remove(self.path)

    def _look(self) -> list[tuple[str, int, int, int]]:
        files = sorted(self.path.iterdir()) if self.path.is_dir() else [self.path]
        found = [(file.name, file.stat()) for file in files]
        return [(name, seen.st_ino, seen.st_size, seen.st_mtime_ns) for name, seen in found]


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


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            import shutil

            shutil.rmtree(path)
        else:
            path.unlink()
