"""The command line: it runs a command, and turns every error into one message and an exit status.

A command is a module `<name>_command` with its HELP and two functions: `add(parser)` adds its
options, and `run(options)` does the work and returns the exit status. It is imported once it is
asked for: an import takes long enough for a person to press Ctrl-C meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import signal
import sys
import textwrap
import threading
from collections.abc import Iterator, Sequence
from types import FrameType, ModuleType

from jax_specdec.beside import HiddenPackage
from jax_specdec.cli import argument_types

COMMANDS = {
    "check-device": "check and time the kernels on this GPU or TPU, and write a report",
    "demo": "decode prompts in a worker process and show their logprobs",
    "doctor": "list the toolchain, and rings and directories of engines; remove those of the dead",
    "generate": "run prompts through a Hugging Face checkpoint",
    "serve": "serve a model over HTTP, as OpenAI's API has it",
    "view": "write a page that shows every token's logprob",
}
ALONE = ("check-device",)  # uses neither rings nor engines, and runs where their packages are not
EXAMPLES = {
    "check-device": "jax-specdec check-device --keep",
    "demo": "jax-specdec demo --temperature 0.8 --json out.jsonl",
    "doctor": "jax-specdec doctor --remove",
    "generate": 'jax-specdec generate --model DIR --prompt "Once upon" --logprobs 5',
    "serve": "jax-specdec serve --model DIR --port 8000",
    "view": "jax-specdec view out.jsonl --open",
}
EXTRAS = {"serve": "'.[serve]'"}  # what a command needs beside the plain install
_WIDTH = 80  # of the help's lines, and of what stands behind a redirection


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status, which after a signal is 128 plus its number."""
    try:
        with _signals_interrupt():
            return _run(arguments)
    except KeyboardInterrupt as error:
        _complain(": ".join(["interrupted", *getattr(error, "__notes__", ())]))
        return 128 + (error.args[0] if error.args else signal.SIGINT)
    except HiddenPackage as error:
        _complain(f"jax-specdec: {error}")
        return 2
    except ModuleNotFoundError as error:  # an extra, or all but what the kernels alone need
        name = _command_of(arguments)
        _complain(f"jax-specdec: {error}: {name} needs `pip install {EXTRAS.get(name, '.')}`")
        return 2


def program() -> int:
    """The whole process of a command: `main`, after which nothing is looked at once more.

    Python's last collection takes 0.15 s where a tokenizer's library was imported.
    """
    _reopen_closed_streams()
    status = main()
    gc.freeze()
    return status


def _reopen_closed_streams() -> None:
    """Let streams that are closed (`>&-`) be /dev/null: else a file would get their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode))


def _run(arguments: Sequence[str] | None) -> int:
    command, options = parsed_options(arguments)

    failures: tuple[type[Exception], ...] = ()
    refusals: tuple[type[Exception], ...] = (OSError, ValueError, ModuleNotFoundError)
    if options.command not in ALONE:
        import jax_specdec.beside.ipc  # noqa: F401
        from ipc import RingError
        from jax_specdec.engine.errors import WorkerFailed

        failures, refusals = (WorkerFailed,), (RingError, *refusals)
    try:
        status: int = command.run(options)
    except failures as error:
        _complain("\n".join([vars(error)["report"], *getattr(error, "__notes__", ())]))
        return 1
    except MemoryError as error:
        _complain(
            f"jax-specdec: out of memory: {error}; use fewer --slots or a smaller --max-tokens"
        )
        return 2
    except refusals as error:
        _complain("\n".join([f"jax-specdec: {error}", *getattr(error, "__notes__", ())]))
        return 2
    return status


def parsed_options(arguments: Sequence[str] | None) -> tuple[ModuleType, argparse.Namespace]:
    """The command that is asked for, and its options; what is not known is refused."""
    parser = argument_types.Parser(
        prog="jax-specdec", description="Exact token logprobs for speculative decoding in JAX."
    )
    parser.example = EXAMPLES["demo"]
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    form = argparse.RawDescriptionHelpFormatter
    parsers = {
        name: commands.add_parser(name, help=summary, formatter_class=form)
        for name, summary in COMMANDS.items()
    }
    arguments = sys.argv[1:] if arguments is None else arguments
    if name := _command_of(arguments):
        command = importlib.import_module(f"jax_specdec.cli.{name.replace('-', '_')}_command")
        parsers[name].description = _filled(command.HELP)
        parsers[name].example = EXAMPLES[name]
        command.add(parsers[name])
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        parsers[options.command].refuse(unknown)
    return command, options


def _command_of(arguments: Sequence[str] | None) -> str:
    arguments = sys.argv[1:] if arguments is None else arguments
    return next((argument for argument in arguments if argument in COMMANDS), "")


def _filled(text: str) -> str:
    """The text in lines of the help's width; paragraphs that are indented stay as they are."""
    paragraphs = text.strip("\n").split("\n\n")
    return "\n\n".join(
        paragraph
        if paragraph.startswith(" ")
        else textwrap.fill(" ".join(paragraph.split()), _WIDTH)
        for paragraph in paragraphs
    )


class _Version(argparse.Action):
    """Prints the version; imports what finds it only then, unlike argparse's own action."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print("jax-specdec", _version())
        parser.exit()


def _version() -> str:
    """The version of the installed package, or of the checkout that this file is in."""
    from importlib import metadata

    try:
        return metadata.version("jax-specdec")
    except metadata.PackageNotFoundError:
        import tomllib
        from pathlib import Path

        checkout = Path(__file__).resolve().parents[2]
        with (checkout / "pyproject.toml").open("rb") as file:
            return f"{tomllib.load(file)['project']['version']} (from {checkout}, not installed)"


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block as Ctrl-C does; one that is ignored (nohup) stays so."""

    def interrupt(number: int, _: FrameType | None) -> None:
        raise KeyboardInterrupt(number)

    before = {}
    if threading.current_thread() is threading.main_thread():  # only it may set handlers
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _complain(text: str) -> None:
    with contextlib.suppress(OSError):  # after SIGHUP, the terminal may be gone
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(program())
