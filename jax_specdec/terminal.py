"""What a person sees: text that grows per request, colored by logprob, then a table."""

import codecs
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from rich.box import HEAVY_HEAD, SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from jax_specdec import tokens
from jax_specdec.demo import Collector, Output
from jax_specdec.records import FinishReason
from jax_specdec.statistics import Statistics

# Upper end of each band of logprobs, natural logarithm, and its color.
_BANDS = ((-3.0, "red"), (-1.5, "dark_orange"), (-0.5, "yellow"), (-0.1, "chartreuse3"))
_SURE = "green"
_UNKNOWN = "white"  # no logprobs were asked for
REDRAW_SECONDS = 0.1
_SEED_BYTES = 530_456  # the fixed message of the seed system, whatever was asked for


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


class ColoredText:
    """One output's text as runs of one color; only what is new is decoded and colored.

    A character takes the color of its last byte: until then nothing of it can be shown.

    Attributes:
      runs: (text, style), prompt first; text is what the model wrote, line ends included.
    """

    def __init__(self, output: Output) -> None:
        self.runs = [(output.prompt_text, "dim")]
        self._output = output
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._next = 0

    def update(self) -> None:
        """Append the tokens that came since the last call."""
        output, start = self._output, self._next
        self._next = output.num_tokens
        asked = output.token_logprobs
        for index in range(start, self._next):
            text = self._decoder.decode(tokens.token_bytes(output.token_ids[index]))
            self._append(text, color(None if asked is None else asked[index]))
        if output.finish_reason is not None:  # half a character may be left
            self._append(self._decoder.decode(b"", final=True), self.runs[-1][1])

    def _append(self, text: str, style: str) -> None:
        if self.runs[-1][1] == style:
            text = self.runs.pop()[0] + text
        if text:
            self.runs.append((text, style))

    def whole(self) -> Text:
        """All of it, over as many lines as it has."""
        return Text.assemble(*((_printable(text, keep="\n\t"), style) for text, style in self.runs))

    def tail(self, width: int) -> Text:
        """The end of it on one line of at most `width` cells."""
        parts: list[tuple[str, str]] = []
        room = width - 1  # for the ellipsis
        for text, style in reversed(self.runs):
            shown = _one_line(text[-width:])
            while cell_len(shown) > room:
                shown = shown[1:]
            parts.append((shown, style))
            room -= cell_len(shown)
            if len(shown) < len(text):
                parts.append(("…", "dim"))
                break
        return Text.assemble(*reversed(parts), no_wrap=True)


def _one_line(text: str) -> str:
    return _printable(text.replace("\n", "⏎").replace("\t", "⇥"))


def _printable(text: str, keep: str = "") -> str:
    """Text without control characters: a model may emit what would move the cursor."""
    return "".join(c if c.isprintable() or c in keep else "·" for c in text)


class Screen(Protocol):
    def update(self, collector: Collector) -> None: ...


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
        self._view = LiveView()
        self._drawn_at = -math.inf

    def update(self, collector: Collector) -> None:
        # A message that comes while this process draws waits in the ring.
        if time.monotonic() - self._drawn_at >= REDRAW_SECONDS:
            size = self._console.size
            self._live.update(self._view.draw(collector, size.width, size.height), refresh=True)
            self._drawn_at = time.monotonic()


class LiveView:
    """The growing texts; keeps what it has colored."""

    def __init__(self) -> None:
        self._texts: dict[str, ColoredText] = {}

    def draw(self, collector: Collector, width: int, height: int) -> RenderableType:
        """A line for each request that there is room for, and one about the whole.

        All requests keep their order while they fit. Where they do not, those that run come
        first, then those that wait; those that are done are only counted.
        """
        outputs = list(collector.outputs.values())
        running = [o for o in outputs if o.records and o.finish_reason is None]
        waiting = [o for o in outputs if not o.records]
        done = len(outputs) - len(running) - len(waiting)
        room = max(height - 1, 0)
        shown = outputs if len(outputs) <= room else (running + waiting)[:room]
        lines = [self._line(output, width) for output in shown]
        if collector.messages:
            emitted = sum(output.num_tokens for output in outputs)
            note = (
                f"{done} of {len(outputs)} done, {len(running)} running, {len(waiting)} waiting, "
                f"{emitted} tokens, step {collector.messages}"
            )
        else:
            note = "starting the model worker: it imports jax and compiles ..."
        return Group(*lines, Text(note, style="bold", no_wrap=True, overflow="ellipsis"))

    def _line(self, output: Output, width: int) -> Text:
        k = output.request.params.logprobs
        if output.finish_reason is not None:
            state, style = "done", "green"
        elif output.records:
            state, style = str(output.num_tokens), ""
        else:
            state, style = "wait", "dim"
        text = self._texts.get(output.request.id)
        if text is None:
            text = self._texts[output.request.id] = ColoredText(output)
        text.update()
        asked = "-" if k is None else f"K={k}"
        line = Text.assemble(f"{asked:<5} ", (f"{state:>4} ", style), no_wrap=True, overflow="crop")
        return line.append_text(text.tail(max(width - line.cell_len, 2)))


class _PlainScreen:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._said: set[str] = set()

    def update(self, collector: Collector) -> None:
        if not collector.messages and not self._said:
            say("starting the model worker: it imports jax and compiles ...", self._console)
            self._said.add("")
        for name, output in collector.outputs.items():
            reason = output.finish_reason
            # That a worker was lost is said once, with its cause, by whoever catches the error.
            if reason in (None, FinishReason.WORKER_LOST) or name in self._said:
                continue
            self._said.add(name)
            say(f"request {name} done: {output.num_tokens} tokens ({_readable(reason)})",
                self._console)  # fmt: skip


def say(text: str, console: Console) -> None:
    """A sentence; wrapped on a terminal, on one line in a file or a pipe."""
    console.print(Text(text), soft_wrap=not console.is_terminal)


def full_texts(collector: Collector, console: Console) -> None:
    """Each request's prompt and text as it stands, colored and never wrapped."""
    for name, output in collector.outputs.items():
        text = ColoredText(output)
        text.update()
        console.print(Text.assemble((f"{name}: ", "bold"), text.whole()), soft_wrap=True)


def legend(console: Console) -> None:
    """What the colors mean."""
    text = Text("colors by logprob: ")
    names = [f"below {upper:g}" for upper, _ in _BANDS] + ["above"]
    for name, style in zip(names, [c for _, c in _BANDS] + [_SURE], strict=True):
        text.append(f" {name} ", style=style)
    text.append(" not asked ", style=_UNKNOWN)
    console.print(text)


@dataclass(frozen=True)
class _Layout:
    """What the table of requests shows; there is one for wide terminals and some for narrower."""

    shares: str  # of drafts accepted: "by position", "compact" or "overall"
    sampling: bool = True  # the columns T and end
    plain: bool = False  # no lines between the columns


_LAYOUTS = (
    _Layout("by position"),
    _Layout("compact"),
    _Layout("compact", plain=True),
    _Layout("overall"),
    _Layout("overall", plain=True),
    _Layout("overall", sampling=False, plain=True),
)


def summary(collector: Collector, console: Console) -> None:
    """The table of requests in the widest layout that fits, and what moving it all took."""
    for layout in _LAYOUTS:
        table = _table(collector, layout)
        width = console.measure(table, options=console.options.update(width=10_000)).maximum
        if width <= console.width:
            break
    table.width = width  # in a still narrower terminal lines wrap, but no number is cut
    console.print(table, soft_wrap=width > console.width)
    if not collector.messages:
        return
    seed = _SEED_BYTES * collector.messages / collector.message_bytes
    say(
        f"{collector.messages} messages, {collector.message_bytes:,} bytes; bare payload "
        f"{collector.payload_bytes:,} bytes "
        f"({collector.payload_bytes / collector.message_bytes:.0%}); "
        f"a fixed-size message would have sent {seed:,.0f} times as much",
        console,
    )
    say(
        "transport latency, from the worker's send to the engine's own copy (waiting for this "
        f"process to read included): median {collector.latency_us(0.5):.0f} us, "
        f"99 % below {collector.latency_us(0.99):.0f} us",
        console,
    )


def _table(collector: Collector, layout: _Layout) -> Table:
    table = Table(
        title="Requests", title_justify="left", box=SIMPLE_HEAD if layout.plain else HEAVY_HEAD
    )
    table.pad_edge = not layout.plain
    accepted = {"by position": "drafts accepted", "compact": "% accepted", "overall": "accepted"}
    for column in ("id", "K", "T", "end") if layout.sampling else ("id", "K"):
        table.add_column(column, no_wrap=True)
    for column in ("tokens", "a step", accepted[layout.shares], "logprob"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, output in collector.outputs.items():
        params, found = output.request.params, output.statistics
        reason = output.finish_reason
        sampling = (f"{params.temperature:g}", _readable(reason) if reason else "unfinished")
        table.add_row(
            name,
            "-" if params.logprobs is None else str(params.logprobs),
            *(sampling if layout.sampling else ()),
            *_speculation(found or Statistics(), layout),
            "-" if output.mean_logprob is None else f"{output.mean_logprob:.3f}",
        )
    table.add_section()
    blank = ("", "", "") if layout.sampling else ("",)
    table.add_row("all", *blank, *_speculation(collector.total, layout), "")
    return table


def _speculation(found: Statistics, layout: _Layout) -> tuple[str, str, str]:
    """Tokens, tokens a step, and shares of drafts accepted."""
    if layout.shares == "overall":
        shares = [] if found.acceptance_rate is None else [f"{found.acceptance_rate:.0%}"]
    elif layout.shares == "compact":
        shares = [f"{100 * share:.0f}" for share in found.acceptance_at]
    else:
        shares = [f"{share:.0%}" for share in found.acceptance_at]
    length = found.average_accepted_length
    return (
        str(found.num_tokens),
        "-" if length is None else f"{length:.2f}",
        " ".join(shares) or "-",
    )


def _readable(reason: FinishReason) -> str:
    return reason.name.lower().replace("_", " ")
