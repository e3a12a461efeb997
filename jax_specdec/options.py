"""What several commands need to read their options; the standard library alone."""

import argparse
from collections.abc import Callable


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
