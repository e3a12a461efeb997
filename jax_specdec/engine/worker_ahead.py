"""A worker's process that starts before it is known what it will run.

What a slot must hold is known once prompts are read, and a tokenizer takes its time to be imported.
The worker's own imports take as long, and need none of that.
"""

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from jax_specdec.engine.child_process import ChildProcess
from jax_specdec.engine.devices import shares
from jax_specdec.engine.work_directory import WorkDirectory
from jax_specdec.engine.worker_client import WORKER, WorkerProcess, command_of
from jax_specdec.engine.workers import StartWorker

UNNEEDED_STOP_SECONDS = 5.0  # for the end of a process that was not needed


@contextmanager
def worker_ahead(num_devices: int, program: Sequence[str] = WORKER) -> Iterator[StartWorker]:
    """Start the process of an engine's first worker, which imports its modules in the block.

    The engine takes it over where it fits, and otherwise starts one as usual: where the worker gets
    other devices or another environment, where its output lies on another file system, or where the
    process has ended. A process that nobody took over ends with the block, and leaves nothing.

    Args:
      num_devices: that the worker will compute on.
      program: the command line of the worker.

    Yields:
      The `start_worker` of the engine.
    """
    with ExitStack() as held:
        waiting = None
        # Too few devices, or no further process: the engine says so.
        with suppress(ValueError, OSError, RuntimeError):
            waiting = _Waiting(num_devices, program)
            held.callback(waiting.end)

        def start_worker(config: Any, **options: Any) -> WorkerProcess:
            spawn = ChildProcess if waiting is None else waiting.spawn
            return WorkerProcess(config, program=program, spawn=spawn, **options)

        yield start_worker


class _Waiting:
    """A process that waits for its `Start`, until somebody takes it over."""

    def __init__(self, num_devices: int, program: Sequence[str]) -> None:
        (share,) = shares(1, num_devices, os.environ)
        self._command, self._env = command_of(program), os.environ | share.environment
        self._directory = WorkDirectory()
        self._process: ChildProcess | None = None
        try:
            output = self._directory.output_file(0)
            self._process = ChildProcess(self._command, output=output, env=self._env)
        except BaseException:
            self._directory.close()
            raise

    def spawn(
        self, program: Sequence[str], *, output: Path, env: Mapping[str, str]
    ) -> ChildProcess:
        """The process, if it is what `ChildProcess` would start; or else what that starts."""
        process = self._process
        if process is not None and process.exit_status is None:
            same = (tuple(program), dict(env)) == (self._command, dict(self._env))
            with suppress(OSError):
                if same:
                    process.move_output(output)
                    self._process = None
                    self.end()
                    return process
        self.end()
        return ChildProcess(program, output=output, env=env)

    def end(self) -> None:
        """End the process, unless somebody has taken it over, and remove its directory."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGKILL)
            process.wait(UNNEEDED_STOP_SECONDS)
            process.close()
        self._directory.close()
