"""The command line: it starts processes and draws. Nothing imports it."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

# Everything else is imported where it is used, inside `main`: an import takes long enough for
# somebody to press Ctrl-C in it.

MAX_DRAFTS = 64

DEMO_HELP = """\
Decode at least sixteen prompts over eight slots with a tiny byte-level model, and deliver every
token's logprob from the worker process to this one through shared memory.

The worker drafts several tokens a step, verifies them in one forward pass, computes logprobs and
token ranks of the accepted rows alone, packs them on the device and sends one message a step. This
process decodes the messages into records per request; it never imports jax.

The text grows per request, colored by logprob; then a table says what speculation did and what
moving the logprobs took.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 128 + the signal's number after a signal."""
    try:
        with _signals_interrupt():
            return _command(arguments)
    except KeyboardInterrupt as error:
        _complain(": ".join(["interrupted", *getattr(error, "__notes__", ())]))
        return 128 + (error.args[0] if error.args else signal.SIGINT)


def _command(arguments: Sequence[str] | None) -> int:
    options = _parser().parse_args(arguments)
    if options.command == "doctor":
        from ipc import doctor

        return doctor.main(["--remove"] if options.remove else [])

    from ipc.errors import RingError
    from jax_specdec.engine import WorkerFailed

    try:
        if options.command == "view":
            from jax_specdec import view_command

            return view_command.run(options)
        return _demo(options)
    except WorkerFailed as error:
        _complain(str(error))
        return 1
    except (RingError, OSError, ValueError) as error:
        _complain(f"jax-specdec: {error}")
        return 2


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does; one that is ignored (nohup) stays so."""

    def interrupt(number: int, _: FrameType | None) -> None:
        raise KeyboardInterrupt(number)

    before = {}
    if threading.current_thread() is threading.main_thread():  # no other may set handlers
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _complain(text: str) -> None:
    with contextlib.suppress(OSError):  # after SIGHUP, nobody may be there to read it
        print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jax-specdec", description="Exact token logprobs for speculative decoding in JAX."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_demo(commands.add_parser(
        "demo",
        help="decode prompts in a worker process and show their logprobs",
        description=DEMO_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ))  # fmt: skip
    from jax_specdec import view_command

    view_command.add(commands)
    leftovers = commands.add_parser(
        "doctor",
        help="list rings in shared memory, and remove those of dead processes",
        description="List every ring in /dev/shm and who made it. What a killed process left "
        "behind before both sides had attached stays there until it is removed.",
    )
    leftovers.add_argument("--remove", action="store_true", help="remove what the dead left")
    return parser


def _add_demo(parser: argparse.ArgumentParser) -> None:
    from ipc.wire import MAX_TOP_K
    from jax_specdec.demo import SAMPLED_TOP_P

    drafting = parser.add_argument_group("drafting")
    drafting.add_argument(
        "--drafter",
        choices=("mtp", "ngram", "none"),
        default="mtp",
        help="who drafts: the model's multi-token prediction head, the latest n-gram of the "
        "request's own text, or nobody (default: %(default)s)",
    )
    drafting.add_argument(
        "--drafts", type=_integer(0, MAX_DRAFTS), default=3, metavar="N",
        help=f"draft tokens a step at most, 0 to {MAX_DRAFTS} (default: %(default)s)",
    )  # fmt: skip
    asked = parser.add_argument_group("requests (defaults differ from prompt to prompt)")
    logprobs = asked.add_mutually_exclusive_group()
    logprobs.add_argument(
        "--k", type=_integer(0, MAX_TOP_K), metavar="K",
        help=f"every request asks for its K most likely tokens, 0 to {MAX_TOP_K}",
    )  # fmt: skip
    logprobs.add_argument("--no-logprobs", action="store_true", help="no request asks for logprobs")
    asked.add_argument(
        "--temperature", type=float, metavar="T",
        help="of every request; 0 is greedy. A request with a temperature above 0, built-in or "
        f"not, samples with top-p {SAMPLED_TOP_P}",
    )  # fmt: skip
    asked.add_argument(
        "--max-tokens", type=_integer(1), metavar="N", help="tokens to emit for every request"
    )
    asked.add_argument(
        "--prompts", type=Path, metavar="FILE",
        help=r"one prompt a line instead of the built-in ones; \n stands for a new line",
    )  # fmt: skip
    running = parser.add_argument_group("running")
    running.add_argument(
        "--slots", type=_integer(1), default=8, metavar="B",
        help="requests that decode together (default: %(default)s)",
    )  # fmt: skip
    running.add_argument(
        "--weights", type=Path, metavar="FILE",
        help="a safetensors file written by examples/train_tiny_model.py",
    )  # fmt: skip
    running.add_argument(
        "--json", type=Path, metavar="FILE",
        help="write one OpenAI-style completion a line, logprobs included",
    )  # fmt: skip


def _demo(options: argparse.Namespace) -> int:
    from rich.console import Console

    from jax_specdec import demo, summary, terminal, tokens
    from jax_specdec.engine import Engine, EngineConfig

    console = Console()
    requests = (
        demo.requests_from_file(options.prompts) if options.prompts else demo.default_requests()
    )
    requests = demo.with_options(
        requests,
        k=options.k,
        temperature=options.temperature,
        max_tokens=options.max_tokens,
        no_logprobs=options.no_logprobs,
    )
    longest = max(len(r.prompt_token_ids) + r.params.max_tokens for r in requests)
    config = EngineConfig(
        drafter=options.drafter if options.drafts else "none",
        num_drafts=options.drafts if options.drafter != "none" else 0,
        num_slots=options.slots,
        max_length=max(256, -(-longest // 128) * 128),
        vocab_size=tokens.VOCAB_SIZE,
        weights=str(options.weights.resolve()) if options.weights else "",
    )
    collector = demo.Collector.of(requests)
    with demo.open_json(options.json) if options.json else contextlib.nullcontext() as json_file:
        try:
            with Engine(config) as engine, terminal.screen(console) as screen:
                screen.update(collector)
                for update in engine.generate(requests):
                    collector.add(update)
                    screen.update(collector)
        except KeyboardInterrupt as interrupt:
            interrupt.add_note("the worker was stopped")
            raise
        terminal.full_texts(collector, console)
        terminal.legend(console)
        summary.show(collector, console)
        if json_file is not None:
            demo.write_json(json_file, collector)
            terminal.say(f"wrote {len(requests)} records to {options.json}", console)
    return 0


def _integer(low: int, high: int | None = None) -> Callable[[str], int]:
    def integer(text: str) -> int:  # argparse says its name: "invalid integer value"
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"{value} is below {low}")
        if high is not None and value > high:
            raise argparse.ArgumentTypeError(f"{value} is above {high}")
        return value

    return integer


if __name__ == "__main__":
    sys.exit(main())
