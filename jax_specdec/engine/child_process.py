"""A child process that ends with this one.

The kernel kills a child with the *thread* that started it (PR_SET_PDEATHSIG, which `child.py` asks
for). So each child is started by a thread of its own, which then waits for it: the thread lives as
long as the child, whichever thread the engine was made in.
"""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path


class ChildProcess:
    """A running program; what it prints goes to a file."""

    _process: subprocess.Popen[bytes]  # once it has begun

    def __init__(self, program: Sequence[str], *, output: Path, env: Mapping[str, str]) -> None:
        """Start the program.

        Args:
          program: its command line.
          output: a file for its standard output and error; replaced if it exists.
          env: its environment.

        Raises:
          OSError: it cannot be started.
          RuntimeError: the system gives no further thread.
        """
        self._program, self._output, self._env = program, output, env
        self._error: BaseException | None = None
        self._pidfd = -1
        self._begun, self._ended = threading.Event(), threading.Event()
        threading.Thread(target=self._keep, name="parent of a worker", daemon=True).start()
        self._begun.wait()
        if self._error is not None:
            raise self._error

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """None while the process runs; negative for the signal that killed it."""
        return self._process.returncode if self._ended.is_set() else None

    def write(self, line: str) -> None:
        """Write to the pipe that is its standard input, which stays open; never blocks.

        Raises:
          OSError: more than the pipe holds.
        """
        assert self._process.stdin is not None
        data = line.encode()
        os.set_blocking(self._process.stdin.fileno(), False)
        with contextlib.suppress(BrokenPipeError):  # that it has ended is noticed elsewhere
            written = os.write(self._process.stdin.fileno(), data)
            if written != len(data):
                raise OSError(
                    f"a worker's start has {len(data)} bytes, and a pipe takes {written}: shorten "
                    "the paths in the configuration"
                )

    def move_output(self, path: Path) -> None:
        """Let the file of what it prints, and has printed, be another one of the same file system.

        Raises:
          OSError: it cannot be; nothing has changed.
        """
        self._output.rename(path)
        self._output = path

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, if the process has not ended."""
        if not self._ended.is_set() and self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def wait(self, timeout: float) -> bool:
        """Wait for its end; whether it has come in so many seconds."""
        return self._ended.wait(timeout)

    def close(self) -> None:
        """Close the pipe, which ends the process if it still runs; it gets no further signals."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)

    @property
    def printed(self) -> int:
        """How many bytes it has printed."""
        with contextlib.suppress(OSError):
            return self._output.stat().st_size
        return 0

    def last_words(self, lines: int = 50, most: int = 1 << 14, since: int = 0) -> str:
        """The end of what it has printed after its first `since` bytes, whatever they are."""
        try:
            with self._output.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(size - most, since))
                text = file.read().decode(errors="backslashreplace")
        except OSError:
            return ""
        return "\n".join(text.strip().splitlines()[-lines:])

    def _keep(self) -> None:
        process: subprocess.Popen[bytes] | None = None
        try:
            with self._output.open("wb") as file:
                process = self._process = subprocess.Popen(
                    self._program,
                    stdin=subprocess.PIPE,
                    stdout=file,
                    stderr=file,
                    env=dict(self._env),
                    process_group=0,  # a terminal's Ctrl-C reaches only the engine, which decides
                )
            self._pidfd = os.pidfd_open(process.pid)
        except BaseException as error:  # the thread that waits shall have it
            self._error = error
            if process is not None:
                process.kill()
                process.wait()
            return
        finally:
            self._begun.set()
        process.wait()
        self._ended.set()
