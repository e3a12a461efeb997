"""`jax-specdec demo`: prompts decoded by worker processes, with their logprobs, as they come."""

import argparse
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

import jax_specdec.beside.ipc  # noqa: F401
from ipc.wire import MAX_TOP_K
from jax_specdec.cli import standard_output
from jax_specdec.cli.argument_types import integer
from jax_specdec.cli.engine_options import add_engine, engine_fields, existing_path
from jax_specdec.cli.generate import FINISHED
from jax_specdec.cli.prompts import read_prompts
from jax_specdec.cli.standard_output import Starting, phases_of
from jax_specdec.declaration import Serves
from jax_specdec.engine.config import EngineConfig
from jax_specdec.engine.engine import Engine
from jax_specdec.engine.errors import WorkerFailed
from jax_specdec.engine.updates import Update, WorkerStatus
from jax_specdec.export import openai, response_files
from jax_specdec.records.record import Record
from jax_specdec.requests import Request, SamplingParams
from jax_specdec.serve.model import TINY, ServedModel, tiny_model
from jax_specdec.text import byte_tokens
from jax_specdec.text.detokenize import TextStream
from jax_specdec.wording import pluralize

MAX_WORKERS = 64
SAMPLED_TOP_P = 0.95
_PROMPTS = Path(__file__).parents[1] / "weights" / "demo.jsonl"
HELP = """\
Decode eighteen built-in prompts, or those of a file, with a tiny byte-level model. Each text grows
on the screen, colored by logprob; accepted drafts are underlined. Lines at the end say what
speculation did, and what it took to move the logprobs. This process never imports jax.
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_engine(parser)
    flag: dict[str, Any] = {"action": "store_true"}
    for name, settings in {
        "--draft-logprobs": flag | {"help": "ask for the draft model's logprobs of drafts too"},
        "--temperature": {"type": float, "metavar": "T", "help": "of every request; 0 is greedy, "
                          f"others sample with top-p {SAMPLED_TOP_P}"},
        "--max-tokens": {"type": integer(1), "metavar": "N", "help": "of every request"},
        "--prompts": {"type": Path, "metavar": "FILE", "help": "of prompts, as generate takes it"},
        "--chunked-prefill": {"type": integer(1, 2**16), "default": 64, "metavar": "N",
                              "help": "run prompts N tokens at a time (default: %(default)s)"},
        "--data-parallel": {"type": integer(1, MAX_WORKERS), "default": 1, "metavar": "M",
                            "help": "workers that decode (default: %(default)s)"},
        "--processes": flag | {"help": "give each device of a worker a process of its own"},
        "--disaggregated": flag | {"help": "add a worker that runs prompts and hands them over"},
        "--preempt-every": {"type": integer(1), "metavar": "N", "help": "after every N messages, "
                            "take its slot from a running request; it goes on later"},
        "--on-worker-loss": {"choices": ("stop", "continue", "restart"), "default": "stop",
                             "help": "stop, go on with the others, or start another worker; its "
                             "requests go on after their last token (default: %(default)s)"},
        "--weights": {"type": Path, "metavar": "FILE", "help": "written by train_tiny_model.py"},
        "--json": {"type": Path, "metavar": "FILE", "help": "write OpenAI-style completions"},
    }.items():  # fmt: skip
        parser.add_argument(name, **settings)
    either, k = parser.add_mutually_exclusive_group(), integer(0, MAX_TOP_K)
    either.add_argument("--k", type=k, metavar="K", help="every request asks for its top K")
    either.add_argument("--no-logprobs", **flag, help="no request asks for any")


def run(options: argparse.Namespace) -> int:
    """Decode, draw the texts meanwhile, and sum up; raises what `main` turns into messages."""
    console = Console()
    say = functools.partial(console.print, markup=False, soft_wrap=True)
    model = tiny_model(name=TINY, created=int(time.time()), max_length=2**31 - 1)
    requests = requests_of(options, model)
    shown = Demo(requests, model)
    # Opened before the work, so that an error comes before it; replaced only at the end.
    opened = options.json.open("a", encoding="utf-8") if options.json else contextlib.nullcontext()
    with opened as file:
        try:
            with _engine(options, requests) as engine, _drawn(shown, console, engine):
                for update in engine.generate(requests):
                    shown.add(update)
                    if update.lost and options.on_worker_loss != "stop":
                        say(update.lost.report)
                    ended = [item.request_id for item in update.records if item.finish_reason]
                    if ended and not console.is_terminal:
                        say(f"request {', '.join(ended)} done")
                    turn, rest = divmod(len(shown.messages), options.preempt_every or 2**31)
                    begun = [id for id in engine.running if shown.records[id]] if turn else []
                    if begun and not rest:
                        engine.preempt(begun[turn % len(begun)])
        except KeyboardInterrupt as interrupt:
            interrupt.add_note("the worker was stopped")
            raise
        except WorkerFailed as failure:
            if failure.advice:
                failure.add_note("run it again; with --on-worker-loss restart it would go on")
            raise
        for id, text in shown.texts.items():
            console.print(shown.heading(id), text, sep="\n", soft_wrap=True)
        standard_output.legend(console)
        for line in shown.summary(engine.status):
            say(line)
        if file is not None:
            responses = (
                openai.completion(item, records, model.table, model=TINY, created=model.created)
                for item, records in zip(requests, shown.records.values(), strict=True)
            )
            response_files.write_responses(file, responses)
            say(f"wrote {pluralize(len(requests), 'record')} to {options.json}")
    return int(shown.any_failed)


def requests_of(options: argparse.Namespace, model: ServedModel) -> list[Request]:
    """The built-in requests, or a file's (greedy, K = 5), with the options that hold for all."""
    plain = SamplingParams(max_tokens=64, logprobs=5, stop_token_ids=model.eos_token_ids)
    fields = {"max_tokens": options.max_tokens, "temperature": options.temperature}
    fields |= {"draft_logprobs": options.draft_logprobs or None, "logprobs": options.k}
    changes: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
    changes |= {"logprobs": None} if options.no_logprobs else {}
    requests = []
    for prompt in read_prompts(options.prompts or _PROMPTS, model.encoder, plain):
        params = replace(prompt.request.params, **changes)
        top_p = min(params.top_p, SAMPLED_TOP_P) if params.temperature > 0 else params.top_p
        requests.append(replace(prompt.request, params=replace(params, top_p=top_p)))
    return requests


def _engine(options: argparse.Namespace, requests: list[Request]) -> Engine:
    longest = max(len(request.prompt_token_ids) + request.params.max_tokens for request in requests)
    length = max(256, -(-longest // 128) * 128)
    config = EngineConfig(
        **engine_fields(options, None, length),
        max_length=length, vocab_size=byte_tokens.VOCAB_SIZE,
        weights=existing_path(options.weights),
        prefill_chunk=options.chunked_prefill, processes=options.processes,
        num_ranks=options.data_parallel, num_prefill_ranks=int(options.disaggregated),
        on_worker_loss=options.on_worker_loss, resume_lost=True,
        serves=Serves.of(request.params for request in requests), starts_soon=True,
    )  # fmt: skip
    return Engine(config)


@contextlib.contextmanager
def _drawn(shown: "Demo", console: Console, engine: Engine) -> Iterator[None]:
    """Draw the texts on a terminal while the block runs; elsewhere, say that it begins."""
    if not console.is_terminal:
        console.print("starting the model worker: it imports jax and compiles ...")
        yield
        return
    view = functools.partial(shown.view, console, Starting(phases_of(engine)).line)
    with Live(console=console, get_renderable=view, refresh_per_second=10, transient=True):
        yield


class Demo:
    """The requests, their records and colored texts so far, and the messages that brought them."""

    def __init__(self, requests: list[Request], model: ServedModel) -> None:
        self.requests = {request.id: request for request in requests}
        self.records: dict[str, list[Record]] = {request.id: [] for request in requests}
        self.messages: list[tuple[int, int, float]] = []  # process rank, bytes, latency in us
        self._streams = {request.id: TextStream(model.table) for request in requests}
        prompts = {
            request.id: model.table.decode(request.prompt_token_ids[1:]) for request in requests
        }
        self.texts = {id: Text(prompt, "dim") for id, prompt in prompts.items()}
        self._lock = threading.Lock()  # a thread of its own draws the screen

    def add(self, update: Update) -> None:
        """Append what a message brought."""
        with self._lock:
            for record in update.records:
                id = record.request_id
                self.records[id].append(record)
                standard_output.append_record(self.texts[id], self._streams[id], record)
        if (sent := update.message) is not None and (waited := update.latency_ns) is not None:
            self.messages.append((sent.process_rank, sent.num_bytes, waited / 1e3))

    @property
    def any_failed(self) -> bool:
        """Whether a request ended otherwise than by its stop rules or its length."""
        ends = (records[-1].finish_reason for records in self.records.values() if records)
        return any(reason is not None and reason not in FINISHED for reason in ends)

    def view(self, console: Console, starting: Callable[[], str]) -> Text:
        """A line for each request, those that run first where not all fit, and one about all."""
        width, height = console.size
        with self._lock:
            waiting = {id for id, records in self.records.items() if not records}
            begun = self.records.keys() - waiting
            done = {id for id in begun if self.records[id][-1].finish_reason}
            ids = [*self.requests]
            if len(ids) > height - 1:
                ids.sort(key=lambda id: (id in done, id in waiting))
            lines = Text(no_wrap=True, overflow="crop")
            for id in ids[: max(height - 1, 0)]:
                k, tail = self.requests[id].params.logprobs, self.texts[id][-width:]
                tail.plain = tail.plain.replace("\n", "⏎").replace("\t", "⇥")
                while tail.cell_len > max(width - 12, 0):
                    tail = tail[1:]
                tokens = sum(record.num_tokens for record in self.records[id])
                state = "done" if id in done else "wait" if id in waiting else tokens
                lines.append(f"{'-' if k is None else f'K={k}':<5} {state:>4} ")
                lines.append_text(tail).append("\n")
        running = len(ids) - len(done) - len(waiting)
        title = f"{len(done)} of {len(ids)} done, {running} running, step {len(self.messages)}"
        return lines.append(title if self.messages else starting(), "bold")

    def heading(self, id: str) -> Text:
        """A request's parameters, and what speculation did for it."""
        params, last = self.requests[id].params, self.records[id][-1] if self.records[id] else None
        text = f"{id}: K = {params.logprobs}, T = {params.temperature:g}"
        if last is not None and (statistics := last.statistics) is not None:
            reason = getattr(last.finish_reason, "name", "unfinished").lower().replace("_", " ")
            text += f", {pluralize(statistics.num_tokens, 'token')} ({reason})"
            if last.cumulative_logprob is not None:
                text += (
                    f", mean logprob {last.cumulative_logprob / max(statistics.num_tokens, 1):.3f}"
                )
            shares = " ".join(f"{share:.0%}" for share in statistics.acceptance_at)
            text += f", drafts accepted: {shares}" if shares else ""
        return Text(text, "bold")

    def summary(self, workers: Sequence[WorkerStatus]) -> Iterator[str]:
        """The work of each worker, and what the messages took."""
        for worker in workers:
            sizes = [size for rank, size, _ in self.messages if rank == worker.process_rank]
            role, statistics = "prefill" if worker.prefill_only else "decode", worker.statistics
            text = f"worker {worker.process_rank} ({role}): {pluralize(len(sizes), 'message')}, "
            text += f"{sum(sizes):,} bytes, {pluralize(statistics.num_tokens, 'token')}, "
            text += f"{statistics.average_accepted_length or 0:.2f} a step, "
            yield text + f"{worker.processor.preempted} preempted"
        if self.messages:
            _, sizes, waits = (sorted(worker) for worker in zip(*self.messages, strict=True))
            yield (
                f"{sum(sizes) / len(sizes):,.0f} bytes a message, read {waits[len(waits) // 2]:.0f}"
                f" us after it was sent (median; 99 % below {waits[-1 - len(waits) // 100]:.0f} us)"
            )
