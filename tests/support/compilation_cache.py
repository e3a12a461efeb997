"""Compiled programs that are kept from run to run, so that the next run need not compile them.

jax writes an entry in place: a process that is killed meanwhile leaves half of it, for ever. So a
run has a folder of its own. It finds the kept entries there as hard links, and its processes write
theirs beside them. At its end, the whole ones among the new entries are added to those kept, which
never change.
"""

import atexit
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

MOST_BYTES = 1 << 30  # programs that changed leave their entries behind: beyond this, all go


def begin(kept: Path | None) -> None:
    """Lead jax, in this process and in those started from it, to the folder of this run.

    Call it before jax is imported. Where the environment names a folder already, as for a process
    of xdist, that one is used.

    Args:
      kept: the folder of the kept programs; None: nothing is kept, as in CI.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    run = Path(tempfile.mkdtemp(prefix="jax-specdec-tests-")) if kept is None else lend(kept)
    owner = os.getpid()

    def end() -> None:
        if os.getpid() == owner:  # not in a fork
            if kept is not None:
                keep(run, kept)
            shutil.rmtree(run, ignore_errors=True)

    atexit.register(end)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(run)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def lend(kept: Path) -> Path:
    """Make a run's folder beside `kept`, with its entries; folders of dead runs are deleted."""
    kept.mkdir(parents=True, exist_ok=True)
    for other in kept.parent.glob(f"{kept.name}-run-*"):
        if not Path("/proc", other.name.rpartition("-")[2]).exists():
            shutil.rmtree(other, ignore_errors=True)
    run = kept.with_name(f"{kept.name}-run-{os.getpid()}")
    shutil.rmtree(run, ignore_errors=True)  # of a dead run whose number this process has
    run.mkdir()
    for entry in kept.iterdir():
        with suppress(FileNotFoundError):  # another run that ends may delete it
            os.link(entry, run / entry.name)
    return run


def keep(run: Path, kept: Path) -> None:
    """Add the whole new entries of `run` to `kept`; other runs may do the same meanwhile."""
    known = {entry.name: entry.stat().st_size for entry in kept.iterdir()}
    new = [entry for entry in run.iterdir() if entry.name not in known]
    if sum(known.values()) + sum(entry.stat().st_size for entry in new) > MOST_BYTES:
        for name in known:
            kept.joinpath(name).unlink(missing_ok=True)
    for entry in filter(is_whole, new):
        with suppress(FileExistsError):  # another run has compiled it too
            os.link(entry, kept / entry.name)


def is_whole(entry: Path) -> bool:
    """Whether jax can read an entry: a process that was killed while it wrote leaves half of it."""
    from jax._src.compilation_cache import decompress_executable

    try:
        return bool(decompress_executable(entry.read_bytes()))
    except Exception:  # zlib and zstd have errors of their own
        return False
