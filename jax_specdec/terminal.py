"""What a person sees: text that grows per request, colored by logprob, then a table."""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from jax_specdec import tokens
from jax_specdec.demo import Collector, Progress
from jax_specdec.records import FinishReason

# Upper end of each band of logprobs, natural logarithm, and its color.
_BANDS = ((-3.0, "red"), (-1.5, "dark_orange"), (-0.5, "yellow"), (-0.1, "chartreuse3"))
_SURE = "green"
_UNKNOWN = "white"  # no logprobs were asked for
REDRAW_SECONDS = 0.1
_SEED_BYTES = 530_456  # the fixed message of the seed system, whatever was asked for


class Screen(Protocol):
    def update(self, collector: Collector) -> None: ...


def color(logprob: float | None) -> str:
    """The color of a token by its logprob."""
    if logprob is None:
        return _UNKNOWN
    if math.isnan(logprob):
        return "magenta"
    for upper, name in _BANDS:
        if logprob < upper:
            return name
    return _SURE


def colored(progress: Progress, width: int) -> Text:
    """The end of the prompt and of the emitted text, on one line of at most `width` cells."""
    ids = progress.token_ids
    logprobs: Sequence[float | None] = progress.token_logprobs or [None] * len(ids)
    text = Text(_visible(progress.request.prompt_token_ids[1:]), style="dim", no_wrap=True)
    for token, logprob in zip(ids, logprobs, strict=True):
        text.append(_visible([token]), style=color(logprob))
    return text if text.cell_len <= width else Text("…").append_text(text[-(width - 1) :])


def _visible(ids: Iterable[int]) -> str:
    """One line of text whatever the bytes are."""
    shown = tokens.decode(ids).replace("\n", "⏎").replace("\t", "⇥")
    return "".join(character if character.isprintable() else "·" for character in shown)


def growing(collector: Collector, width: int) -> RenderableType:
    """A line for each request, and one about the whole."""
    table = Table.grid(padding=(0, 1))
    label = 12
    for progress in collector.requests.values():
        params = progress.request.params
        asked = "-" if params.logprobs is None else f"K={params.logprobs}"
        if progress.finish_reason is not None:
            state = Text("done", style="green")
        elif progress.records:
            state = Text(f"{progress.num_tokens:4d}")
        else:
            state = Text("wait", style="dim")
        table.add_row(asked, state, colored(progress, max(width - label, 20)))
    done = sum(p.finish_reason is not None for p in collector.requests.values())
    emitted = sum(p.num_tokens for p in collector.requests.values())
    if collector.messages:
        note = (
            f"{done} of {len(collector.requests)} done, {emitted} tokens, step {collector.messages}"
        )
    else:
        note = "starting the model worker (it imports jax and compiles the step) ..."
    return Group(table, Text(note, style="bold"))


@contextmanager
def screen(console: Console) -> Iterator[Screen]:
    """A live view on a terminal; a line now and then where the output is a file or a pipe."""
    if console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            yield _LiveScreen(live, console)
    else:
        yield _PlainScreen(console)


class _LiveScreen:
    def __init__(self, live: Live, console: Console) -> None:
        self._live, self._console = live, console
        self._drawn_at = -math.inf

    def update(self, collector: Collector) -> None:
        # Drawing takes longer than a step: drawn more often, messages would wait for the screen.
        if (now := time.monotonic()) - self._drawn_at > REDRAW_SECONDS:
            self._drawn_at = now
            self._live.update(growing(collector, self._console.width), refresh=True)


class _PlainScreen:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._done: set[str] = set()

    def update(self, collector: Collector) -> None:
        if not collector.messages and not self._done:
            self._console.print("starting the model worker (it imports jax and compiles) ...")
        for name, progress in collector.requests.items():
            if progress.finish_reason is not None and name not in self._done:
                self._done.add(name)
                reason = _readable(progress.finish_reason)
                self._console.print(f"request {name} done: {progress.num_tokens} tokens ({reason})")


def summary(collector: Collector, console: Console) -> None:
    """The texts whole, the table of requests, and what moving it all took."""
    table = Table(title="Requests", title_justify="left")
    for column in ("id", "K", "T", "end"):
        table.add_column(column, no_wrap=True)
    for column in ("tokens", "a step", "drafts accepted", "mean logprob"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, progress in collector.requests.items():
        params, found = progress.request.params, progress.statistics
        table.add_row(
            name,
            "-" if params.logprobs is None else str(params.logprobs),
            f"{params.temperature:g}",
            _readable(progress.finish_reason) if progress.finish_reason else "unfinished",
            str(progress.num_tokens),
            f"{found.average_accepted_length:.2f}" if found and found.steps else "-",
            _shares(found.acceptance_at) if found else "-",
            "-" if progress.mean_logprob is None else f"{progress.mean_logprob:.3f}",
        )
    total = collector.total
    table.add_section()
    table.add_row(
        "all", "", "", "", str(total.num_tokens),
        f"{total.average_accepted_length:.2f}" if total.average_accepted_length else "-",
        _shares(total.acceptance_at), "",
    )  # fmt: skip
    console.print(table)
    if not collector.messages:
        return
    seed = _SEED_BYTES * collector.messages / collector.message_bytes
    console.print(
        f"{collector.messages} messages, {collector.message_bytes:,} bytes; bare payload "
        f"{collector.payload_bytes:,} bytes "
        f"({collector.payload_bytes / collector.message_bytes:.0%}); "
        f"a fixed-size message would have sent {seed:,.0f} times as much"
    )
    console.print(
        f"transport latency, from the worker's send to the engine's own copy: median "
        f"{collector.latency_us(0.5):.0f} us, 99 % below {collector.latency_us(0.99):.0f} us"
    )


def _readable(reason: FinishReason) -> str:
    return reason.name.lower().replace("_", " ")


def _shares(acceptance: tuple[float, ...]) -> str:
    return " ".join(f"{share:.0%}" for share in acceptance) or "-"


def legend(console: Console) -> None:
    """What the colors mean."""
    text = Text("colors by logprob: ")
    names = [f"below {upper:g}" for upper, _ in _BANDS] + ["above"]
    for name, style in zip(names, [c for _, c in _BANDS] + [_SURE], strict=True):
        text.append(f" {name} ", style=style)
    text.append(" not asked ", style=_UNKNOWN)
    console.print(text)


def full_texts(collector: Collector, console: Console) -> None:
    """Each request's prompt and text as it stands, colored."""
    for name, progress in collector.requests.items():
        text = Text(progress.prompt_text, style="dim")
        ids = progress.token_ids
        logprobs: Sequence[float | None] = progress.token_logprobs or [None] * len(ids)
        for token, logprob in zip(ids, logprobs, strict=True):
            text.append(tokens.decode([token]), style=color(logprob))
        console.print(Text(f"{name}: ", style="bold").append_text(text), highlight=False)
