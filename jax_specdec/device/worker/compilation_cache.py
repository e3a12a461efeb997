"""jax's persistent compilation cache, for the processes of a worker."""

import collections
import functools
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jax_specdec import compiled_programs
from jax_specdec.device.worker import beside

LEAST_SECONDS = 0.01  # a program that compiles faster is not worth a file
MOST_WAITING = (
    32  # programs that wait to be written, each of which is in memory; older ones are not
)


class LaterWrites:
    """Programs that were compiled beside a worker's steps, and are written when it has a rest.

    jax writes a program once it is compiled. Making its bytes keeps the interpreter to itself:
    0.16 s for 4 MB, which every step would wait for. jax has no public way to put that off; where
    its function is not there, it writes at once.
    """

    def __init__(self) -> None:
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
        self._waiting.popleft()()
        return True

    def write_all(self) -> None:
        """Write all that wait, before the process ends."""
        while self.write_one():
            pass

    def _take(self, write: Callable[..., object], *arguments: Any) -> None:
        if threading.current_thread().name == beside.NAME:
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
