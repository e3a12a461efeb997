"""jax's persistent compilation cache, for the processes of a worker."""

import collections
import functools
import os
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jax_specdec import compiled_programs
from jax_specdec.device.worker import background

LEAST_SECONDS = 0.01  # a program that compiles faster is not worth a file
MOST_WAITING = (
    32  # programs that wait to be written, each of which is in memory; older ones are not
)


class LaterWrites:
    """Programs that were compiled beside a worker's steps, and are written when it has a rest.

    jax writes a program once it is compiled. Making its bytes keeps the interpreter to itself:
    0.16 s for 4 MB, which every step would wait for. jax has no public way to put that off; where
    its function is not there, it writes at once.

    XLA can't make bytes of a program that sorts once it has run on a CPU. So what is compiled while
    nobody waits for steps is written at once: what a first request needs is there at the next
    start. A program that can't be written any more is compiled again then, beside the steps.

    Attributes:
      steps_are_made: asked in the job's thread, whether steps would have to wait.
    """

    def __init__(self) -> None:
        self.steps_are_made: Callable[[], bool] = lambda: False
        self._waiting: collections.deque[Callable[[], object]] = collections.deque(
            maxlen=MOST_WAITING
        )

    def begin(self) -> None:
        """Put off what jobs beside the steps compile."""
        from jax._src import compiler

        write = getattr(compiler, "_cache_write", None)
        if write is not None:
            compiler._cache_write = functools.partial(self._take, write)

    def write_one(self) -> bool:
        """Write one program; False where none waits."""
        if not self._waiting:
            return False
        with warnings.catch_warnings():  # jax warns of each that can't be written
            warnings.simplefilter("ignore")
            self._waiting.popleft()()
        return True

    def write_all(self) -> None:
        """Write all that wait, before the process ends."""
        while self.write_one():
            pass

    def _take(self, write: Callable[..., object], *arguments: Any) -> None:
        if threading.current_thread().name.startswith(background.NAME) and self.steps_are_made():
            self._waiting.append(functools.partial(write, *arguments))
        else:
            write(*arguments)


def begin(setting: str) -> None:
    """Keep compiled programs, and use those that are kept.

    Args:
      setting: `WorkerConfig.compilation_cache`: a folder, "off", or empty for the usual folder, or
        for jax's own settings where the environment has JAX_COMPILATION_CACHE_DIR.

    Raises:
      OSError: the folder that is named cannot be used.
    """
    if setting == compiled_programs.OFF:
        jax.config.update("jax_enable_compilation_cache", False)  # type: ignore[no-untyped-call]
        return
    if not setting and "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    folder = Path(setting) if setting else compiled_programs.default_folder()
    try:
        compiled_programs.prepare(folder)
    except OSError as error:
        if setting:
            raise
        print(f"compiled programs are not kept: {error}", file=sys.stderr, flush=True)
        return
    for name, value in (
        ("jax_compilation_cache_dir", str(folder)),
        ("jax_persistent_cache_min_compile_time_secs", LEAST_SECONDS),
        ("jax_persistent_cache_min_entry_size_bytes", -1),
    ):
        jax.config.update(name, value)  # type: ignore[no-untyped-call]
