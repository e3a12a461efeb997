"""`jax-specdec demo`: prompts decoded by worker processes, with their logprobs, as they come."""

import argparse
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_specdec.cli.argument_types import add_compilation_cache, found, integer
from jax_specdec.wording import counted

if TYPE_CHECKING:
    from rich.console import Console

    from jax_specdec.cli.demo_requests import Collector
    from jax_specdec.cli.demo_screen import Screen
    from jax_specdec.engine.config import EngineConfig
    from jax_specdec.engine.engine import Engine
    from jax_specdec.requests import Request

MAX_WORKERS = 64

HELP = """\
Decode eighteen built-in prompts, or the prompts of a file, with a tiny byte-level model. Every
token's logprob comes from the worker process to this one through shared memory.

The worker drafts several tokens a step, verifies them in one forward pass, computes logprobs and
token ranks of the accepted rows alone, packs them on the device and sends one message a step. This
process decodes the messages into records of each request; it never imports jax.

Each request's text grows on the screen, colored by logprob; accepted drafts are underlined. At the
end, a table shows what
speculation did and what it took to move the logprobs.
"""


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "demo",
        help="decode prompts in a worker process and show their logprobs",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_drafting(parser.add_argument_group("drafting"))
    _add_requests(parser.add_argument_group("requests (defaults differ from prompt to prompt)"))
    _add_workers(parser.add_argument_group("workers"))
    _add_files(parser.add_argument_group("files"))


def _add_drafting(group: Any) -> None:
    from ipc.wire import MAX_DRAFTS
    from jax_specdec.control import DRAFTERS

    group.add_argument(
        "--drafter",
        choices=[name for name in DRAFTERS if name != "model"],  # the demo has no smaller model
        default="mtp",
        help="where drafts come from: the model's multi-token prediction head (mtp), the latest "
        "n-gram of the request's own text, the longest suffix of that text that occurred before, "
        "or none at all (default: %(default)s)",
    )
    group.add_argument(
        "--drafts", type=integer(0, MAX_DRAFTS), default=3, metavar="N",
        help=f"the most draft tokens a step, 0 to {MAX_DRAFTS} (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--adaptive-drafts", action="store_true",
        help="draft less for a request whose drafts are rarely accepted",
    )  # fmt: skip
    group.add_argument(
        "--corpus", type=Path, metavar="FILE",
        help="a UTF-8 text that the suffix drafter searches too",
    )  # fmt: skip


def _add_requests(group: Any) -> None:
    from ipc.wire import MAX_TOP_K
    from jax_specdec.cli.demo_requests import SAMPLED_TOP_P

    logprobs = group.add_mutually_exclusive_group()
    logprobs.add_argument(
        "--k", type=integer(0, MAX_TOP_K), metavar="K",
        help=f"let every request ask for its K most likely tokens, 0 to {MAX_TOP_K}",
    )  # fmt: skip
    logprobs.add_argument(
        "--no-logprobs", action="store_true", help="let no request ask for logprobs"
    )
    group.add_argument(
        "--draft-logprobs", action="store_true",
        help="let every request also ask for the draft model's logprobs of its drafts, accepted or "
        "not (mtp alone has a draft model); the table shows their mean, the JSON all of them",
    )  # fmt: skip
    group.add_argument(
        "--temperature", type=float, metavar="T",
        help="temperature of every request; 0 is greedy. A request with a temperature above 0, "
        f"built-in or not, samples with top-p {SAMPLED_TOP_P}",
    )  # fmt: skip
    group.add_argument(
        "--max-tokens", type=integer(1), metavar="N", help="tokens to emit for every request"
    )
    group.add_argument(
        "--prompts", type=Path, metavar="FILE",
        help=r"one prompt a line instead of the built-in ones; \n stands for a new line, and "
        "the name - for standard input",
    )  # fmt: skip


def _add_workers(group: Any) -> None:
    group.add_argument(
        "--slots", type=integer(1), default=8, metavar="B",
        help="requests that a worker decodes together (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--chunked-prefill", type=integer(1, 2**16), default=64, metavar="N",
        help="run prompts N tokens at a time, so that a long prompt does not hold up other "
        "requests (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--data-parallel", type=integer(1, MAX_WORKERS), default=1, metavar="M",
        help="worker processes that decode, each with its own slots and its own ring "
        "(default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--tensor-parallel", type=integer(1, 2**10), default=1, metavar="N",
        help="devices among which each worker splits the model; logits stay where they are made. "
        "Without accelerators, the worker makes N CPU devices (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--processes", action="store_true",
        help="give each of those devices a process of its own, connected by jax.distributed; one "
        "of a worker's processes sends its messages",
    )  # fmt: skip
    group.add_argument(
        "--disaggregated", action="store_true",
        help="add a worker process that runs the prompts: a request's first token and the drafts "
        "after it come from there, all other tokens from a worker that decodes (and runs the "
        "prompt again: no cache is moved)",
    )  # fmt: skip
    group.add_argument(
        "--preempt-every", type=integer(1), metavar="N",
        help="after every N messages, take its slot from one of the running requests in turn; it "
        "goes on later from there",
    )  # fmt: skip
    group.add_argument(
        "--on-worker-loss", choices=("stop", "continue", "restart"), default="stop",
        help="what to do when a worker process ends early: stop everything, continue with the "
        "other workers, or start another worker in its place. Unless everything stops, the "
        "requests of the lost worker go on after their last token (default: %(default)s)",
    )  # fmt: skip
    add_compilation_cache(group)


def _add_files(group: Any) -> None:
    group.add_argument(
        "--weights", type=Path, metavar="FILE",
        help="a safetensors file written by examples/train_tiny_model.py",
    )  # fmt: skip
    group.add_argument(
        "--json", type=Path, metavar="FILE",
        help="write one OpenAI-style completion a line, logprobs included",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Decode, draw the texts meanwhile, and sum up at the end.

    Raises:
      WorkerFailed: a worker ended early.
      RingError, OSError, ValueError: an option cannot be met.
    """
    from rich.console import Console

    from jax_specdec.cli import demo_requests, demo_screen
    from jax_specdec.engine.engine import Engine
    from jax_specdec.engine.worker_client import WorkerFailed

    console, requests = Console(), _requests(options)
    collector = demo_requests.Collector.of(requests)
    opened = demo_requests.open_json(options.json) if options.json else contextlib.nullcontext()
    with opened as json_file:
        try:
            with (
                Engine(_config(options, requests)) as engine,
                demo_screen.screen(console) as screen,
            ):
                _decode(engine, collector, screen, options)
        except KeyboardInterrupt as interrupt:
            interrupt.add_note("the worker was stopped")
            raise
        except WorkerFailed as failure:
            if failure.advice:
                failure.add_note(
                    "run the demo again; with --on-worker-loss restart another worker takes its "
                    "place, and the demo goes on"
                )
            raise
        _sum_up(engine, collector, console, options)
        if json_file is not None:
            demo_requests.write_json(json_file, collector)
            written = counted(len(requests), "record")
            demo_screen.say(f"wrote {written} to {options.json}", console)
    return 0


def _requests(options: argparse.Namespace) -> "list[Request]":
    from jax_specdec.cli import demo_requests

    return demo_requests.with_options(
        demo_requests.requests_from_file(options.prompts)
        if options.prompts
        else demo_requests.default_requests(),
        k=options.k,
        temperature=options.temperature,
        max_tokens=options.max_tokens,
        no_logprobs=options.no_logprobs,
        draft_logprobs=options.draft_logprobs,
    )


def _decode(
    engine: "Engine", collector: "Collector", screen: "Screen", options: argparse.Namespace
) -> None:
    """Collect and draw what each message brings, and preempt where that is wanted."""
    from jax_specdec.cli.starting import phases_of

    screen.update(collector)
    with screen.starting(collector, phases_of(engine)) as begun:
        for update in engine.generate([output.request for output in collector.outputs.values()]):
            begun()
            collector.add(update)
            if update.lost and options.on_worker_loss != "stop":
                screen.note(update.lost.report)
            if options.preempt_every:
                _preempt(engine, collector, options.preempt_every)
            screen.update(collector)


def _sum_up(
    engine: "Engine", collector: "Collector", console: "Console", options: argparse.Namespace
) -> None:
    from jax_specdec.cli import demo_screen, demo_tables, token_colors

    demo_screen.full_texts(collector, console)
    token_colors.legend(console)
    demo_tables.show(collector, console)
    if options.data_parallel > 1 or options.disaggregated or options.preempt_every:
        demo_tables.show_workers(engine.status, collector, console)


def _config(options: argparse.Namespace, requests: "list[Request]") -> "EngineConfig":
    from jax_specdec.engine.config import EngineConfig
    from jax_specdec.text import byte_tokens

    longest = max(len(r.prompt_token_ids) + r.params.max_tokens for r in requests)
    if options.corpus and options.drafter != "suffix":
        raise ValueError(f"--corpus is for --drafter suffix; {options.drafter} searches no text")
    return EngineConfig(
        drafter=options.drafter if options.drafts else "none",
        num_drafts=options.drafts if options.drafter != "none" else 0,
        num_slots=options.slots,
        max_length=max(256, -(-longest // 128) * 128),
        vocab_size=byte_tokens.VOCAB_SIZE,
        weights=found(options.weights),
        prefill_chunk=options.chunked_prefill,
        adaptive=options.adaptive_drafts,
        corpus=found(options.corpus),
        compilation_cache=options.compilation_cache,
        num_ranks=options.data_parallel,
        tensor_parallel=options.tensor_parallel,
        processes=options.processes,
        num_prefill_ranks=int(options.disaggregated),
        on_worker_loss=options.on_worker_loss,
        resume_lost=True,
    )


def _preempt(engine: "Engine", collector: "Collector", every: int) -> None:
    """After every `every` messages, take its slot from one of the running requests in turn."""
    turn, rest = divmod(collector.messages, every)
    running = [name for name in engine.running if collector.outputs[name].num_tokens]
    if turn and not rest and running:
        engine.preempt(running[turn % len(running)])
