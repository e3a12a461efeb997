"""What a run needs beside the time: places to write to, and packages; asked for before measuring.

A run takes minutes. What would fail at its end is said at its beginning.
"""

import importlib.util
import tempfile
from pathlib import Path


class OutputError(ValueError):
    """A place that cannot be written to, or a package that is not there; says the way out."""


def check_file(path: Path) -> None:
    """Make the file's folder; the file itself is neither made nor changed.

    Raises:
      OutputError: a file cannot be written there.
    """
    if path.is_dir():
        raise OutputError(f"{path} is a folder: name a file in it")
    check_folder(path.parent)
    if path.exists():
        try:
            path.open("ab").close()
        except OSError as error:
            raise OutputError(f"cannot write {path}: {error.strerror}") from error


def check_folder(path: Path) -> None:
    """Make the folder.

    Raises:
      OutputError: files cannot be written there.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise OutputError(
            f"cannot write files to the folder {path}: {error.strerror}; name another one"
        ) from error


def check_package(name: str, purpose: str, extra: str) -> None:
    """Nothing is imported: what is measured next would run in a larger process.

    Raises:
      OutputError: the package is not installed.
    """
    if importlib.util.find_spec(name) is None:
        raise OutputError(
            f"{purpose} needs {name}, which is not installed: pip install 'jax-specdec[{extra}]'"
        )


def check_plots(folder: Path) -> None:
    """Raises OutputError where plots cannot be drawn or written."""
    check_package("matplotlib", "drawing plots", "bench")
    check_folder(folder)
