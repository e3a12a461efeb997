"""What several commands need to read their options; the standard library alone."""

import argparse
from collections.abc import Callable
from pathlib import Path


def found(path: Path | None) -> str:
    """The absolute path of what is there, for a worker; "" for None.

    Raises:
      OSError: nothing is there.
    """
    if path is None:
        return ""
    path.stat()  # its error names the whole path, that of a strict `resolve` the part that is wrong
    return str(path.resolve())


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """An argparse type: a whole number in a range, refused by the name of its option."""

    def integer(text: str) -> int:  # argparse says its name: "invalid integer value"
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"{value} is below {low}")
        if high is not None and value > high:
            raise argparse.ArgumentTypeError(f"{value} is above {high}")
        return value

    return integer
