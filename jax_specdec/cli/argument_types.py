"""Reading of options that several commands share, with the standard library alone."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any


def found(path: Path | None) -> str:
    """The absolute path of a file or a directory, for a worker; "" for None.

    Raises:
      OSError: the path leads nowhere.
    """
    if path is None:
        return ""
    path.stat()  # its error names the whole path; that of a strict `resolve` only a part of it
    return str(path.resolve())


def add_compilation_cache(group: Any) -> None:
    """Add the option for where compiled programs are kept."""
    group.add_argument(
        "--compilation-cache", default="", metavar="DIR",
        help="where compiled programs are kept for the next start, or off (default: the user's "
        "cache directory)",
    )  # fmt: skip


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """An argparse type: a whole number from `low` to `high`. Errors name the option."""

    def integer(text: str) -> int:  # argparse shows this name: "invalid integer value"
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"{value} is below {low}")
        if high is not None and value > high:
            raise argparse.ArgumentTypeError(f"{value} is above {high}")
        return value

    return integer
