"""jax's persistent compilation cache, for the processes of a worker."""

import os
import sys
from pathlib import Path

import jax

from jax_specdec import compiled_programs

LEAST_SECONDS = 0.01  # a program that compiles faster is not worth a file


def keep_programs(setting: str) -> None:
    """Keep compiled programs, and use those that are kept.

    Args:
      setting: `WorkerConfig.compilation_cache`: a folder, "off", or empty for the usual folder, or
        for jax's own settings where the environment has JAX_COMPILATION_CACHE_DIR.

    Raises:
      OSError: the folder that is named cannot be used.
    """
    if setting == compiled_programs.OFF:
        jax.config.update("jax_enable_compilation_cache", False)
        return
    if not setting and "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    path = Path(setting) if setting else compiled_programs.default_folder()
    try:
        compiled_programs.prepare(path)
    except OSError as error:
        if setting:
            raise
        print(f"compiled programs are not kept: {error}", file=sys.stderr, flush=True)
        return
    for name, value in (
        ("jax_compilation_cache_dir", str(path)),
        ("jax_persistent_cache_min_compile_time_secs", LEAST_SECONDS),
        ("jax_persistent_cache_min_entry_size_bytes", -1),
    ):
        jax.config.update(name, value)


def folder() -> Path | None:
    """The folder that `begin` chose; None: nothing is kept, or where the user told jax to."""
    settings = jax.config.values
    path = settings["jax_compilation_cache_dir"]
    if not path or not settings["jax_enable_compilation_cache"]:
        return None
    return None if path == os.environ.get("JAX_COMPILATION_CACHE_DIR") else Path(path)
