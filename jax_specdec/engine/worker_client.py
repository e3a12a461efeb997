"""A model worker as the engine sees it: a process, its commands, and its ring. Never jax."""

import collections
import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

from ipc import EndOfStream, PeerDied, RingError, RingReader
from jax_specdec.control import GROUP_KILLED, Command, Shutdown, Start, to_line
from jax_specdec.engine.config import EngineConfig
from jax_specdec.wording import counted

PATIENCE_SECONDS = 5.0  # to wait for a worker that was told to stop

# -P: a file in the current directory must not shadow a module of the worker.
WORKER = (sys.executable, "-P", "-m", "jax_specdec.device.worker.worker_process")

ADVICE = (
    "Make a new Engine for the requests that are left. With "
    'EngineConfig(on_worker_loss="restart") a new worker takes the place of a lost one, and with '
    "resume_lost=True its requests go on there"
)
MEMORY = (
    "SIGKILL comes from another process, or from Linux where memory runs out (`dmesg` tells "
    "which): then fewer slots or shorter requests help"
)


class WorkerFailed(RuntimeError):
    """The worker ended before its requests did; says how, and what it printed last.

    Attributes:
      report: the message without the advice.
      advice: for the author of a program around the engine; empty where it would not help.
    """

    def __init__(self, report: str, advice: str = "") -> None:
        super().__init__(f"{report}\n{advice}" if advice else report)
        self.report = report
        self.advice = advice


class WorkerProcess:
    """A running worker process, and the ring that it sends on."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        process_rank: int = 0,
        prefill_only: bool = False,
        doorbell: bool = False,
        program: Sequence[str] = WORKER,
    ) -> None:
        """Create the ring, start the process, watch it, and tell it what to run.

        Args:
          config: what to run.
          process_rank: the worker's number among those that publish.
          prefill_only: it only runs prompts, and hands requests over after their first token.
          doorbell: make the ring one of several that a thread can wait for together.
          program: the command line of the worker, which reads `control` on its standard input.
        """
        self._process_rank = process_rank
        self._stops_all = config.on_worker_loss == "stop"
        self._last_lines: collections.deque[str] = collections.deque(maxlen=50)
        self._process: subprocess.Popen[str] | None = None
        self._listener: threading.Thread | None = None
        self.ring = RingReader.create(config.ring_slots, config.message_bytes, doorbell=doorbell)
        try:
            self._process = _started(program)
            self.ring.expect_peer(self._process.pid)
            self._listener = self._listening()
            self.tell(
                Start(
                    config=config.worker,
                    ring=self.ring.name,
                    process_rank=process_rank,
                    prefill_only=prefill_only,
                )
            )
        except BaseException:
            self.stop(drain=False)
            raise

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    @property
    def exit_status(self) -> int | None:
        """None while the process runs; negative for the signal that killed it."""
        return self._process.poll() if self._process is not None else None

    def tell(self, command: Command) -> None:
        """Send a command. A worker that is gone is noticed where its messages are read."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError, ValueError):  # ValueError: closed by `stop`
                self._process.stdin.write(to_line(command))
                self._process.stdin.flush()

    def failure(self, cause: Exception) -> WorkerFailed:
        """The report of a lost worker, with its last words; ends the process if it still runs."""
        ends = isinstance(cause, EndOfStream | PeerDied)  # otherwise it sent an invalid message
        if self._process is not None and ends:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(PATIENCE_SECONDS)  # its stream has ended: so will the process
        running = self.exit_status is None
        arrived = self.ring.counters().messages
        code = self.stop(drain=False)
        last = "".join(self._last_lines).strip()
        number = 0 if running else _signal(code)
        report = [
            f"the model worker of process rank {self._process_rank} (pid {self.pid}) "
            f"{'had to be ended' if running else _how_it_ended(code)} after "
            f"{counted(arrived, 'message')}, "
            # The cause tells how the ring ended; where the process ended, that is said already.
            f"before its requests were done{'' if ends and not running else f': {cause}'}",
            f"its last words:\n{last}" if last else "it printed nothing",
            *([MEMORY] if number == signal.SIGKILL else ()),
        ]
        return WorkerFailed("\n".join(report), ADVICE if number and self._stops_all else "")

    def stop(self, *, drain: bool) -> int:
        """End the worker and the ring; returns the exit status. Calling it again does nothing.

        Args:
          drain: let the worker publish what it has computed; otherwise it is ended at once.
        """
        try:
            if drain:
                self.tell(Shutdown())
                with contextlib.suppress(RingError):  # the end of the stream, or a timeout
                    while True:
                        self.ring.receive(PATIENCE_SECONDS)
                if self._process is not None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._process.wait(PATIENCE_SECONDS)
            return self._end()
        finally:
            self.ring.close()

    def _end(self) -> int:
        if self._process is None:
            return 0
        process = self._process
        if process.poll() is None:
            # A signal, not a command: a write to a worker that does not read could block.
            process.terminate()
            try:
                process.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._listener is not None:  # None where it could not be started
            self._listener.join(PATIENCE_SECONDS)
        for stream in (process.stdin, process.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        return process.returncode

    def _listening(self) -> threading.Thread:
        """The thread that reads what the worker prints: a full pipe would block the worker."""
        listener = threading.Thread(target=self._listen, daemon=True)
        listener.start()
        return listener

    def _listen(self) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        while line := self._process.stderr.readline(4096):  # a line need not end
            self._last_lines.append(line)


def _started(program: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        program,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="backslashreplace",  # a worker may print what is not UTF-8
        process_group=0,  # a terminal's Ctrl-C reaches only the engine, which decides
    )


def _signal(code: int) -> int:
    """The signal that ended the worker or another process of its group; 0 where no signal did."""
    if code < 0:
        return -code
    return code - GROUP_KILLED if GROUP_KILLED < code < GROUP_KILLED + signal.NSIG else 0


def _how_it_ended(code: int) -> str:
    if not (number := _signal(code)):
        return f"exited with status {code}"
    killed = f"was killed by signal {number} ({signal.strsignal(number)})"
    return killed if code < 0 else f"ended because another process of its group {killed}"
