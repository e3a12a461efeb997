"""An engine's workers: started, heard, waited for, ended and started again.

Nothing here waits for a worker, except `close`. A worker that is lost is ended first and reported
once it has ended; its successor is started when its time has come.
"""

import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ipc import EndOfStream, RingError, RingReader, wait_readable
from jax_specdec.control import ControlServer
from jax_specdec.declaration import Serves
from jax_specdec.engine.clock import Clock
from jax_specdec.engine.config import EngineConfig
from jax_specdec.engine.devices import shares
from jax_specdec.engine.errors import WorkerFailed
from jax_specdec.engine.wakeup import Wakeup
from jax_specdec.engine.weights_source import WeightsSource
from jax_specdec.engine.work_directory import WorkDirectory
from jax_specdec.engine.worker_client import WorkerProcess
from jax_specdec.engine.worker_session import WorkerSession
from jax_specdec.requests import SamplingParams

CONTROL_LOOK_SECONDS = 0.1  # between two looks at the control plane while messages come
WAIT_SECONDS = 0.25  # of one wait for a message
NAMED_IDS = 8  # requests in a line of the log
BRIEF_SECONDS = 0.02  # of one wait while only rings without a doorbell, or ends, can be waited for

StartWorker = Callable[..., WorkerProcess]  # as `WorkerProcess` is called, or a test's own

logger = logging.getLogger("jax_specdec.engine")
logger.addHandler(logging.NullHandler())  # a program that sets up no logging sees none


@dataclass(frozen=True)
class Health:
    """An engine's state at one moment, for a supervisor.

    Attributes:
      alive: it can serve requests, now or once workers have started; if not, start it again.
      ready: a decode worker takes requests now.
      problems: what is wrong, in sentences; an engine may be alive and ready with some.
    """

    alive: bool
    ready: bool
    problems: tuple[str, ...]


class Workers:
    """The sessions of an engine's workers.

    Attributes:
      sessions: by process rank.
      directory: what they share.
    """

    def __init__(self, config: EngineConfig, start_worker: StartWorker, clock: Clock) -> None:
        """Start all of them: decode ranks are numbered from 0, prefill ranks come after them.

        Raises:
          ValueError: there are fewer devices than they need.
        """
        self.sessions: list[WorkerSession] = []
        self._source: WeightsSource | None = None  # of the weights in use; None: the config's
        self._config, self._start_worker, self._clock = config, start_worker, clock
        self.directory = WorkDirectory(config.control_address, config.output_folder)
        self._next_look = 0.0
        self._looked: float | None = None  # the last time; None: requests were never asked for
        self.wakeup: Wakeup | None = None  # ends a wait, where another thread may ask for something
        self._due: dict[int, float] = {}  # when to start a successor, by process rank
        num_workers = config.num_ranks + config.num_prefill_ranks
        self.restarts = [config.restarts() for _ in range(num_workers)]
        self._failed_starts = itertools.count(-1, -1)  # numbers of losses that had no worker
        self._shares = shares(
            num_workers,
            config.devices_here,
            os.environ,
            named=config.devices,
            processes=config.processes,
        )
        try:
            for process_rank in range(num_workers):
                worker = self.start(process_rank)
                with contextlib.ExitStack() as stack:  # `close` stops only workers with a session
                    stack.callback(worker.stop, drain=False)
                    session = WorkerSession(
                        worker,
                        config,
                        process_rank=process_rank,
                        prefill_only=process_rank >= config.num_ranks,
                    )
                    self.sessions.append(session)
                    stack.pop_all()
        except BaseException:
            self.close(drain=False)
            raise

    def close(self, *, drain: bool) -> None:
        """Stop every worker and free the shared memory; see `Engine.close`."""
        with contextlib.ExitStack() as stack:  # an error at one worker must not spare the others
            stack.callback(self.directory.close)
            for session in self.sessions:
                stack.callback(session.worker.stop, drain=drain and session.alive)

    def alive(self, *, prefill_only: bool | None = None) -> list[WorkerSession]:
        """Sessions whose worker is not lost; of decode or prefill workers only, where asked."""
        return [
            session
            for session in self.sessions
            if session.alive and prefill_only in (None, session.prefill_only)
        ]

    def coming(self, *, prefill_only: bool) -> bool:
        """Whether such a worker lives or will: one that ended may get a successor."""
        return any(
            session.prefill_only == prefill_only
            and (session.alive or session.process_rank in self._due)
            for session in self.sessions
        )

    @property
    def ending(self) -> list[WorkerSession]:
        """Sessions whose worker is lost and has not been reported."""
        return [
            session
            for session in self.sessions
            if session.ending is not None and session.lost is None
        ]

    def fallen(self) -> list[WorkerSession]:
        """Sessions whose worker has ended without having been reported, found lost or not."""
        return [
            session
            for session in self.sessions
            if session.lost is None
            and (
                session.worker.exit_status is not None
                if session.ending is None
                else session.worker.ended
            )
        ]

    def look(self, waiting: Iterable[SamplingParams]) -> list[WorkerSession]:
        """Hear the workers and start those that are due, now and then.

        Args:
          waiting: what the requests ask for that wait for a worker.

        Returns:
          Sessions whose worker is lost and has ended: call `lose` for each.
        """
        now = self._clock.now()
        if now < self._next_look:
            return []
        self._looked, self._next_look = now, now + CONTROL_LOOK_SECONDS
        if self.directory.listens:
            self.directory.server.pump()
        for rank in [rank for rank, due in self._due.items() if due <= now]:
            self._restart(self.sessions[rank], tuple(waiting))
        timeout, silence = self._config.heartbeat_timeout, self._config.max_silence
        for session in self.alive():
            silent = session.look(now, heartbeat_timeout=timeout, max_silence=silence)
            if silent is not None:
                self.end(session, silent)
        return [session for session in self.ending if session.worker.ended]

    def wait(self, alive: Sequence[WorkerSession], *, idle: bool) -> Sequence[WorkerSession]:
        """Sessions that may have a message: those whose ring became readable.

        A ring that is the only one has no doorbell; `receive` waits for it, while it has requests.

        Args:
          idle: no request waits or runs.
        """
        if len(alive) == 1 and alive[0].request_ids:
            return alive
        control: list[ControlServer | Wakeup] = []
        if self.directory.listens:
            control.append(self.directory.server)
        if self.wakeup is not None:
            control.append(self.wakeup)
        if not any(session.request_ids for session in self.sessions):
            # Workers load, or are waited for: only a heartbeat or an end can come, or a request.
            self._next_look = 0.0
            if control:
                wait_readable(control, WAIT_SECONDS if idle else BRIEF_SECONDS)
            else:
                self._clock.sleep(BRIEF_SECONDS)
            return alive
        by_name = {session.worker.ring.name: session for session in alive}
        sources: list[RingReader | ControlServer | Wakeup] = [
            waiting.worker.ring for waiting in alive
        ]
        ready = wait_readable([*sources, *control], WAIT_SECONDS)
        if not ready or ready[-1] in control:
            self._next_look = 0.0
        return [
            by_name[ring.name] for ring in ready if not isinstance(ring, ControlServer | Wakeup)
        ]

    def end(self, session: WorkerSession, cause: Exception) -> None:
        """Note that a worker is lost; it is reported once it has ended."""
        session.ending = cause
        session.worker.end(cause)
        self._next_look = 0.0

    def lose(self, session: WorkerSession) -> WorkerFailed:
        """The report of a worker that is lost and has ended; `replace` plans its successor."""
        cause = session.ending or EndOfStream("its process has ended")
        names = list(session.request_ids)
        # Where it was not ready yet, requests may have waited for it.
        idle = not names and session.worker.heartbeat.ready
        failure = session.lost = session.worker.failure(cause, idle=idle)
        failure.__cause__ = cause
        more = f" and {len(names) - NAMED_IDS} more" if len(names) > NAMED_IDS else ""
        logger.warning(
            "a worker is lost, with %s: %s",
            f"the requests {names[:NAMED_IDS]}{more}" if names else "no request",
            failure.reason,
        )
        return failure

    def replace(self, session: WorkerSession, charged: int | None) -> None:
        """Plan the successor of a lost worker, if it may have one.

        Args:
          charged: the number of the loss, where it counts against its place.
        """
        restarts, now = self.restarts[session.process_rank], self._clock.now()
        if session.worker.heartbeat.ready:
            restarts.forget(now)
        if charged is not None:
            restarts.charge(charged, now)
        self._plan(session)

    def forgive(self, losses: Sequence[int]) -> None:
        """Count losses no more: a request is to blame for them."""
        for session in self.sessions:
            self.restarts[session.process_rank].forgive(losses)
            if session.lost is not None and session.process_rank not in self._due:
                self._plan(session)

    @property
    def weights_version(self) -> int:
        """Of the weights that every worker uses, or was told to use."""
        return self._config.weights_version

    def use_weights(self, source: WeightsSource, version: int) -> None:
        """Note which weights the workers were told to use: successors start with them."""
        before, self._source = self._source, source
        self._config = replace(
            self._config,
            weights=str(source.path),
            weights_version=version,
            tokenizer=self._config.texts,
        )
        if before is not None:
            before.remove()

    def drop_weights(self) -> None:
        """Remove what was written for the workers, where no successor will read it."""
        if self._source is not None and self._config.on_worker_loss != "restart":
            self._source.remove()

    def restart_none(self) -> None:
        """Start no successor that is planned."""
        self._due.clear()

    def health(self, *, patience: float, failure: BaseException | None = None) -> Health:
        """See `Engine.health`; any thread may ask.

        Args:
          failure: what ended the engine's thread.
        """
        if self.directory.listens:
            self.directory.server.pump()
        problems = [] if failure is None else [f"the engine has stopped: {failure}"]
        away = 0.0 if self._looked is None else self._clock.now() - self._looked
        if away > patience:
            problems.append(
                f"the engine has not looked at its workers for {away:.0f} seconds: nobody reads "
                "the updates of `generate`, or a sink takes none, or its thread does not run"
            )
        for session in self.sessions:
            what = f"process rank {session.process_rank}"
            if session.process_rank in self._due:
                problems.append(f"{what}: a new worker will be started")
            elif not session.alive:
                problems.append(f"{what}: its worker is lost ({session.ending})")
            elif session.worker.exit_status is not None:
                problems.append(f"{what}: its process has ended; the next request will report it")
        return Health(
            alive=failure is None
            and away <= patience
            and any(self._serves(session) for session in self.sessions),
            ready=any(
                session.ready and session.worker.exit_status is None and not session.prefill_only
                for session in self.sessions
            ),
            problems=tuple(problems),
        )

    def _serves(self, session: WorkerSession) -> bool:
        """Whether requests decode there, now or once a worker has started."""
        if session.prefill_only:
            return False
        # Where the engine looks, it will say of an ended process how it ended.
        looks = self._looked is not None
        if session.alive and (looks or session.worker.exit_status is None):
            return True
        return session.process_rank in self._due or (
            session.lost is None and self.restarts[session.process_rank].allows(more=1)
        )

    def start(self, process_rank: int, resumes: Serves | None = None) -> WorkerProcess:
        config = self._config
        if self._source is not None:
            self._source.check_unchanged()
        return self._start_worker(
            config,
            process_rank=process_rank,
            prefill_only=process_rank >= config.num_ranks,
            doorbell=config.num_ranks + config.num_prefill_ranks > 1,
            directory=self.directory,
            share=self._shares[process_rank],
            resumes=resumes,
        )

    def _plan(self, session: WorkerSession) -> None:
        """Note when the successor of a lost worker is due, if it may have one."""
        rank = session.process_rank
        restarts = self.restarts[rank]
        if restarts.allows():
            self._due[rank] = self._clock.now() + restarts.delay
            logger.info(
                "process rank %d: a new worker starts in %g s; losses that count: %s",
                rank,
                restarts.delay,
                restarts,
            )

    def _restart(self, session: WorkerSession, waiting: Sequence[SamplingParams]) -> None:
        """Start the successor of a lost worker; one that cannot be started counts as lost too.

        Args:
          session: of the lost worker.
          waiting: what the requests ask for that it takes first.
        """
        rank = session.process_rank
        del self._due[rank]
        try:
            worker = self.start(rank, Serves.of(waiting) if waiting else None)
        except (OSError, RingError, RuntimeError) as error:
            logger.warning("process rank %d: no new worker could be started: %s", rank, error)
            session.restarts += 1
            self.restarts[rank].charge(next(self._failed_starts), self._clock.now())
            self._plan(session)
        else:
            session.restart(worker)
            logger.info("process rank %d: a new worker was started", rank)
