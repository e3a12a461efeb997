"""Reading of options that several commands share, with the standard library alone."""

import argparse
import difflib
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """A parser, and those of its commands, that takes options by their whole names only.

    An abbreviation would mean another option as soon as one with that name is added.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})
        self.example = ""  # a command that runs, the first line of the help
        self._given: list[str] = []

    def format_help(self) -> str:
        """As argparse's, behind the example."""
        text = super().format_help()
        return f"example: {self.example}\n\n{text}" if self.example else text

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse's; keeps the arguments for the errors."""
        self._given = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """End with an error; where something is missing, a misspelt option may be why."""
        if " required" in message:
            message += "".join(map(self._misspelt, self._given))
        super().error(message)

    def _misspelt(self, argument: str) -> str:
        """A hint at the option that an argument may mean; "" where it is like none."""
        name = argument.partition("=")[0]
        if not name.startswith("--") or name in self._option_string_actions:
            return ""
        near = closest(name, [*self._option_string_actions])
        return f"; {name} is not known{near}" if near else ""

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """End with an error that says which arguments are not known, and what is near the first."""
        first = unknown[0].partition("=")[0]
        near = closest(first, [name for name in self._option_string_actions if name != "-"])
        self.error(f"unrecognized arguments: {' '.join(unknown)}{near}")


def closest(name: str, names: Sequence[str]) -> str:
    """ "; did you mean X?" with the known name that is nearest to `name`; "" where none is near."""
    matches = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {matches[0]}?" if matches else ""


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


def seconds(text: str) -> float:
    """An argparse type: a number of seconds above 0, and not infinite."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value
