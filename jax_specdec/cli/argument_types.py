"""Reading of options that several commands share, with the standard library alone."""

import argparse
import difflib
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """A parser, and those of its commands, that takes options by their whole names only.

    An abbreviation would mean another option as soon as one with that name is added.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})
        self._given: list[str] = []

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
        """What is near an argument that looks like an option and is none; "" where nothing is."""
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


def add_command(commands: Any, name: str, *, help: str, description: str) -> Any:
    """The parser of a command, whose description keeps its lines."""
    form = argparse.RawDescriptionHelpFormatter
    return commands.add_parser(name, help=help, description=description, formatter_class=form)


def closest(name: str, known: Sequence[str]) -> str:
    """ "; did you mean X?" with the known name that is nearest to `name`; "" where none is near."""
    found = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {found[0]}?" if found else ""


def found(path: Path | None) -> str:
    """The absolute path of a file or a directory, for a worker; "" for None.

    Raises:
      OSError: the path leads nowhere.
    """
    if path is None:
        return ""
    path.stat()  # its error names the whole path; that of a strict `resolve` only a part of it
    return str(path.resolve())


def add_checkpoint(group: Any) -> None:
    """Add the option for the directory or file of a checkpoint, which must be given."""
    group.add_argument("--model", type=Path, required=True, metavar="DIR",
        help="config.json, model.safetensors (or several files and their index), "
        "tokenizer.json; or a GGUF file")  # fmt: skip


def add_dtype(group: Any) -> None:
    """Add the option for the type to compute in."""
    group.add_argument("--dtype", choices=("bfloat16", "float32"), default="",
        help="the type to compute in (default: the checkpoint's; float32 for a float16 one)",
    )  # fmt: skip


def add_programs(group: Any) -> None:
    """Add the options for where compiled programs are kept, and whose kernels they take."""
    from jax_specdec.control import IMPLEMENTATIONS

    group.add_argument("--compilation-cache", default="", metavar="DIR",
        help="where compiled programs are kept for the next start, or off (default: the user's "
        "cache directory)")  # fmt: skip
    group.add_argument("--implementation", choices=IMPLEMENTATIONS, default="",
        help="what computes the logprobs and draws; xla uses no kernel of this package (default: "
        "the kernels wherever they can run)")  # fmt: skip


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
