"""Checks before a run: can its results be written, and are its packages installed?

A run takes minutes, so whatever would fail at its end fails at its beginning.
"""

import importlib.util
import tempfile
from pathlib import Path


class OutputError(ValueError):
    """A place cannot be written to, or a package is missing; the text says the way out."""


def check_file(path: Path) -> None:
    """Make the file's folder, and check that the file can be written; it is not changed.

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
    """Make the folder, and check that files can be written in it.

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
    """Check that a package is installed, without importing it into the measuring process.

    Raises:
      OutputError: the package is not installed.
    """
    if importlib.util.find_spec(name) is None:
        raise OutputError(
            f"{purpose} needs {name}, which is not installed: pip install -e '.[{extra}]'"
        )


def check_plots(folder: Path) -> None:
    """Check that plots can be drawn, and written to `folder`.

    Raises:
      OutputError: matplotlib is missing, or files cannot be written there.
    """
    check_package("matplotlib", "drawing plots", "bench")
    check_folder(folder)
