"""A model worker as the engine sees it: a process, its commands, and its ring."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from ipc import EndOfStream, PeerDied, RingError, RingReader, RingTimeout, doctor
from jax_specdec import control
from jax_specdec.declaration import Serves
from jax_specdec.engine.child_process import ChildProcess
from jax_specdec.engine.config import EngineConfig
from jax_specdec.engine.devices import Share
from jax_specdec.engine.errors import WorkerFailed
from jax_specdec.engine.last_words import LOST, reason_line
from jax_specdec.engine.work_directory import WorkDirectory
from jax_specdec.wording import pluralize

Spawn = Callable[..., ChildProcess]  # as `ChildProcess` is called

WORKER_STOP_SECONDS = 5.0  # for a worker that was told to stop, or whose stream has ended
STOP_LOOK_SECONDS = 0.1  # of that, between two looks at the control socket

# -P: a file in the current directory must not shadow a module of the worker.
WORKER = (
    sys.executable, "-P", "-m", "jax_specdec.child", "jax_specdec.device.worker.worker_process"
)  # fmt: skip

ADVICE = (
    "Make a new Engine for the requests that are left. With "
    'EngineConfig(on_worker_loss="restart") a new worker takes the place of a lost one, and with '
    "resume_lost=True its requests go on there"
)
LAST_LINE_CHARS = 200  # of the line that says why, in a reason
LOOKED_AT = 1 << 18  # bytes of its output in which that line is looked for
_MEMORY = (
    "SIGKILL comes from another process, or from Linux where memory runs out (`dmesg` tells "
    "which): then fewer slots or shorter requests help"
)


def command_of(program: Sequence[str]) -> tuple[str, ...]:
    """The command line of a worker of this process."""
    return (*program, doctor.this_process())


class WorkerProcess:
    """A running worker process, and the ring that it sends on. No call waits but `stop`."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        process_rank: int = 0,
        prefill_only: bool = False,
        doorbell: bool = False,
        directory: WorkDirectory | None = None,
        share: Share | None = None,
        resumes: Serves | None = None,
        program: Sequence[str] = WORKER,
        spawn: Spawn = ChildProcess,
    ) -> None:
        """Start the process, create its ring, watch it, and tell it what to run.

        Args:
          config: what to run.
          process_rank: the worker's number among those that publish.
          prefill_only: it only runs prompts, and hands requests over after their first token.
          doorbell: make the ring one of several that a thread can wait for together.
          directory: what the engine's workers share; None: this one has its own.
          share: the devices that it computes on; None: those that it finds.
          resumes: what the requests ask for that a lost worker left; None: nobody waits.
          program: the command line of the worker, which reads its `Start` on its standard input.
            This process is added to it, in words of `ipc.doctor`.
          spawn: starts the program, or hands over a process of it that waits for its `Start`.
        """
        self._process_rank = process_rank
        self._stops_all = config.on_worker_loss == "stop"
        self._directory = directory or WorkDirectory(config.control_address, config.output_folder)
        self._had_to_be_ended = False
        self._deadline = 0.0
        self._stopped: int | None = None
        # Bytes that it had printed when it took requests: words of libraries, which say nothing of
        # a later end. None: it did not take any yet.
        self._started: int | None = None
        self.share = share or Share()
        environment = os.environ | self.share.environment
        with contextlib.ExitStack() as held:
            if directory is None:
                held.callback(self._directory.close)
            self._output = self._directory.output_file(process_rank)
            self._link = self._directory.server.link()
            held.callback(self._link.close)
            command = command_of(program)
            self._process = spawn(command, output=self._output, env=environment)
            held.callback(self._process.close)
            held.push(self._await_end)
            held.callback(self._kill)
            # As late as possible: the worker attaches at once, and then nothing stays behind.
            self.ring = RingReader.create(
                config.ring_slots, config.message_bytes, checksum=config.checksum, doorbell=doorbell
            )
            held.callback(self.ring.close)
            self.ring.expect_peer(self._process.pid)
            start = control.Start(
                config=config.worker,
                ring=self.ring.name,
                process_rank=process_rank,
                prefill_only=prefill_only,
                parent=os.getpid(),
                control=self._link.connection,
                folder=str(self._directory.folder),
                local_devices=self.share.local_devices,
                resumes=resumes,
            )
            self._process.write(control.to_line(start))
            self._held = held.pop_all()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """None while the process runs; negative for the signal that killed it."""
        return self._process.exit_status

    @property
    def heartbeat(self) -> control.Heartbeat:
        """Its last heartbeat that was heard."""
        heartbeat = self._link.heartbeat
        if heartbeat.ready and self._started is None:
            self._started = self._process.printed
        return heartbeat

    def tell(self, command: control.Command) -> int:
        """Send a command, which never waits; its number, which `heartbeat.taken` will reach."""
        return self._link.tell(control.to_bytes(command))

    def end(self, cause: Exception) -> None:
        """Begin to end a worker that is lost: at once, or where its stream has ended, by itself."""
        self._deadline = time.monotonic() + WORKER_STOP_SECONDS
        if not isinstance(cause, EndOfStream | PeerDied):
            self._kill()

    @property
    def ended(self) -> bool:
        """Whether `failure` knows what there is to know; false for a moment after `end`."""
        return self.exit_status is not None or time.monotonic() >= self._deadline

    def failure(self, cause: Exception, *, idle: bool = False) -> WorkerFailed:
        """The report of a lost worker, with its last words; ends the process if it still runs.

        Args:
          cause: by which it was found lost.
          idle: it took requests, and had none.
        """
        arrived = self.ring.counters().messages
        code = self.exit_status
        self._kill()
        since = self._started or 0
        last = self._process.last_words(since=since)
        self._directory.keep(self._output)
        self._held.close()
        code = None if self._had_to_be_ended else code
        number = 0 if code is None else _signal(code)
        how = "had to be ended" if code is None else _how_it_ended(code)
        # The cause tells how the ring ended; where the process ended, that is said already.
        told = isinstance(cause, EndOfStream | PeerDied) and not self._had_to_be_ended
        ended = (
            f"the model worker of process rank {self._process_rank} (pid {self.pid}) {how} after "
            f"{pluralize(arrived, 'message')}"
        )
        why = "" if told else f": {cause}"
        report = [
            f"{ended}, {'while it had no requests' if idle else 'before its requests were done'}"
            f"{why}",
            f"its last words (all of them: {self._output}):\n{last}"
            if last
            else f"it printed nothing{' once it took requests' if since else ''}",
            *([_MEMORY] if number == signal.SIGKILL else ()),
        ]
        reason = ended + why
        printed = self._process.last_words(lines=LOOKED_AT, most=LOOKED_AT, since=since)
        if line := reason_line(printed, crashed=bool(number)):
            reason += f"; it printed last: {line[:LAST_LINE_CHARS]}"
        self._keep_reason(reason)
        return WorkerFailed(
            "\n".join(report), ADVICE if number and self._stops_all else "", reason=reason
        )

    def stop(self, *, drain: bool) -> int:
        """End the worker and the ring; returns the exit status. Calling it again does nothing.

        Args:
          drain: let the worker publish what it has computed; otherwise it is ended at once.
        """
        if self._stopped is not None:
            return self._stopped
        try:
            # One that has not loaded its model yet has computed nothing.
            if drain and self.heartbeat.ready:
                self._drain()
            self._kill()
            self._process.wait(WORKER_STOP_SECONDS)
        finally:
            self._held.close()
        self._stopped = self.exit_status or 0
        return self._stopped

    def _drain(self) -> None:
        """Tell it to stop, take what it still sends, and wait for its end."""
        self.tell(control.Shutdown())
        deadline = time.monotonic() + WORKER_STOP_SECONDS
        with contextlib.suppress(RingError):  # the end of the stream
            while time.monotonic() < deadline:
                self._directory.server.pump()
                with contextlib.suppress(RingTimeout):
                    self.ring.receive(STOP_LOOK_SECONDS)
                    deadline = time.monotonic() + WORKER_STOP_SECONDS
        self._process.wait(WORKER_STOP_SECONDS)

    def _keep_reason(self, reason: str) -> None:
        """Add why it was lost to what it has printed, for who reads that later."""
        when = datetime.now(UTC).isoformat(timespec="seconds")
        with contextlib.suppress(OSError), self._output.open("a") as file:
            file.write(f"\n{when} {LOST}{' '.join(reason.splitlines())}\n")

    def _await_end(self, failure: object, *_: object) -> None:
        """Leave no process of a start that failed."""
        if failure is not None:
            self._process.wait(WORKER_STOP_SECONDS)

    def _kill(self) -> None:
        if self._process.exit_status is None:
            self._had_to_be_ended = True
            self._process.send_signal(signal.SIGKILL)


def _signal(code: int) -> int:
    """The signal that ended the worker or another process of its group; 0 where no signal did."""
    if code < 0:
        return -code
    return (
        code - control.GROUP_KILLED
        if control.GROUP_KILLED < code < control.GROUP_KILLED + signal.NSIG
        else 0
    )


def _how_it_ended(code: int) -> str:
    if not (number := _signal(code)):
        return f"exited with status {code}"
    killed = f"was killed by signal {number} ({signal.strsignal(number)})"
    return killed if code < 0 else f"ended because another process of its group {killed}"
