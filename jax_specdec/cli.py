"""The command line: it starts processes and draws. Nothing imports it."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from ipc import doctor
from ipc.errors import RingError
from jax_specdec import demo, terminal, tokens
from jax_specdec.engine import Engine, EngineConfig, WorkerFailed
from jax_specdec.requests import RequestError

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
    leftovers = commands.add_parser(
        "doctor",
        help="list rings in shared memory, and remove those of dead processes",
        description="List every ring in /dev/shm and who made it. What a killed process left "
        "behind before both sides had attached stays there until it is removed.",
    )
    leftovers.add_argument("--remove", action="store_true", help="remove what the dead left")
    options = parser.parse_args(arguments)
    if options.command == "doctor":
        return doctor.main(["--remove"] if options.remove else [])
    console = Console()
    errors = Console(stderr=True, style="red", highlight=False)
    try:
        return _demo(options, console)
    except KeyboardInterrupt:
        errors.print("interrupted: the worker was stopped, nothing is left in shared memory")
        return 130
    except WorkerFailed as error:
        errors.print(str(error), markup=False)
        return 1
    except (RequestError, RingError, OSError, ValueError) as error:
        errors.print(f"jax-specdec: {error}", markup=False)
        return 2


def _add_demo(parser: argparse.ArgumentParser) -> None:
    drafting = parser.add_argument_group("drafting")
    drafting.add_argument(
        "--drafter",
        choices=("mtp", "ngram", "none"),
        default="mtp",
        help="who drafts: the model's multi-token prediction head, the latest n-gram of the "
        "request's own text, or nobody (default: %(default)s)",
    )
    drafting.add_argument(
        "--drafts", type=_at_least(0), default=3, metavar="N",
        help="draft tokens a step at most (default: %(default)s)",
    )  # fmt: skip
    asked = parser.add_argument_group("requests (defaults differ from prompt to prompt)")
    asked.add_argument(
        "--k", type=_at_least(0), metavar="K",
        help="every request asks for its K most likely tokens, 0 to 128",
    )  # fmt: skip
    asked.add_argument("--no-logprobs", action="store_true", help="no request asks for logprobs")
    asked.add_argument(
        "--temperature", type=float, metavar="T", help="of every request; 0 is greedy"
    )
    asked.add_argument(
        "--max-tokens", type=_at_least(1), metavar="N", help="tokens to emit for every request"
    )
    asked.add_argument(
        "--prompts", type=Path, metavar="FILE",
        help=r"one prompt a line instead of the built-in ones; \n stands for a new line",
    )  # fmt: skip
    running = parser.add_argument_group("running")
    running.add_argument(
        "--slots", type=_at_least(1), default=8, metavar="B",
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


def _demo(options: argparse.Namespace, console: Console) -> int:
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
    if options.json:
        options.json.touch()  # a path that cannot be written is better known before the work
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
    with Engine(config) as engine, terminal.screen(console) as screen:
        screen.update(collector)
        for update in engine.generate(requests):
            collector.add(update)
            screen.update(collector)
    terminal.full_texts(collector, console)
    terminal.legend(console)
    terminal.summary(collector, console)
    if options.json:
        demo.write_json(options.json, collector)
        console.print(f"wrote {len(requests)} records to {options.json}")
    return 0


def _at_least(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"{value} is below {low}")
        return value

    parse.__name__ = "integer"
    return parse


if __name__ == "__main__":
    sys.exit(main())
