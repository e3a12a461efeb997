"""The texts on a terminal or in a pipe: they grow, colored by logprob."""

import codecs
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from jax_specdec.cli import token_colors
from jax_specdec.cli.demo_requests import Collector, Output
from jax_specdec.cli.starting import Phases, Starting, repeated
from jax_specdec.records.batch import FinishReason
from jax_specdec.text import byte_tokens
from jax_specdec.wording import counted

REDRAW_SECONDS = 0.1
RATE_SECONDS = 3.0  # that the shown tokens a second are of
STARTING = "starting the model worker: it imports jax and compiles ..."
LEGEND_HEIGHT = 6  # lines that a terminal has at least, for one of them to be the legend


class ColoredText:
    """One output's text as runs of one style; only new tokens are decoded and styled.

    A character takes the style of its last byte, which makes it visible.

    Attributes:
      runs: (text, style), the prompt first; the text is what the model wrote, line ends included.
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
            text = self._decoder.decode(byte_tokens.token_bytes(output.token_ids[index]))
            logprob = None if asked is None else asked[index]
            self._append(text, token_colors.style(logprob, output.token_accepted[index]))
        if output.finish_reason is not None:  # the text may end in half a character
            self._append(self._decoder.decode(b"", final=True), self.runs[-1][1])

    def _append(self, text: str, style: str) -> None:
        if self.runs[-1][1] == style:
            text = self.runs.pop()[0] + text
        if text:
            self.runs.append((text, style))

    def whole(self) -> Text:
        """The whole text, with its line ends."""
        return Text.assemble(*((_printable(text, keep="\n\t"), style) for text, style in self.runs))

    def tail(self, width: int) -> list[Segment]:
        """The end of the text on one line of at most `width` cells."""
        segments: list[Segment] = []
        room = width - 1  # for the ellipsis
        for text, style in reversed(self.runs):
            shown = _one_line(text[-width:])
            while cell_len(shown) > room:
                shown = shown[1:]
            room -= cell_len(shown)
            segments.append(Segment(shown, Style.parse(style)))
            if len(shown) < len(text):
                segments.append(Segment("…", Style.parse("dim")))
                break
        return segments[::-1]


def _one_line(text: str) -> str:
    return _printable(text.replace("\n", "⏎").replace("\t", "⇥"))


def _printable(text: str, keep: str = "") -> str:
    """The text without control characters: a model may emit some that move the cursor."""
    return "".join(c if c.isprintable() or c in keep else "·" for c in text)


class Screen(Protocol):
    """Where a run is shown while it goes on."""

    def update(self, collector: Collector) -> None:
        """Show what has been collected."""

    def starting(
        self, collector: Collector, phases: Phases
    ) -> AbstractContextManager[Callable[[], None]]:
        """Show what workers do, until the block ends or the function that it yields is called."""

    def note(self, text: str) -> None:
        """Print a sentence that stays, above what is drawn."""


@contextmanager
def screen(console: Console) -> Iterator[Screen]:
    """A live view on a terminal; in a file or a pipe a line now and then."""
    if console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            yield _LiveScreen(live, console)
    else:
        yield _PlainScreen(console)


class _LiveScreen:
    def __init__(self, live: Live, console: Console) -> None:
        self._live, self._console = live, console
        self._view = LiveView(explain=console.color_system is not None)
        self._drawn_at = -math.inf

    def update(self, collector: Collector) -> None:
        # Drawing takes time, and messages wait in the ring meanwhile.
        if time.monotonic() - self._drawn_at >= REDRAW_SECONDS:
            size = self._console.size
            self._live.update(self._view.draw(collector, size.width, size.height), refresh=True)
            self._drawn_at = time.monotonic()

    @contextmanager
    def starting(self, collector: Collector, phases: Phases) -> Iterator[Callable[[], None]]:
        line = Starting(phases).line

        def draw() -> None:
            size = self._console.size
            view = self._view.draw(collector, size.width, size.height, line())
            self._live.update(view, refresh=True)

        with repeated(draw) as end:
            yield end

    def note(self, text: str) -> None:
        say(text, self._console)


class Rate:
    """How many of something came a second, over the last seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Count by `clock`, which returns seconds."""
        self._clock = clock
        self._counts: deque[tuple[float, int]] = deque()

    def update(self, count: int) -> float | None:
        """The rate now that `count` came in all; None until some time has passed."""
        now = self._clock()
        self._counts.append((now, count))
        while now - self._counts[0][0] > RATE_SECONDS and len(self._counts) > 2:
            self._counts.popleft()
        began, before = self._counts[0]
        return (count - before) / (now - began) if now > began else None


class LiveView:
    """The growing texts; a line is made again only for new records or another width.

    Lines are segments and not `Text`, which would take several times as long to draw.
    """

    def __init__(self, rate: Rate | None = None, explain: bool = True) -> None:
        """Draw with a line for the legend where `explain` is set, and there is room."""
        self._rate, self._explain = rate or Rate(), explain
        self._texts: dict[str, ColoredText] = {}
        self._lines: dict[str, tuple[object, list[Segment]]] = {}

    def draw(
        self, collector: Collector, width: int, height: int, starting: str = STARTING
    ) -> RenderableType:
        """A line for each request that there is room for, the legend, and a line about all of them.

        The last one is `starting` before the first message.
        Requests keep their order while all of them fit. Otherwise the running ones come first, then
        the waiting ones; those that are done are only counted.
        """
        outputs = list(collector.outputs.values())
        running = [o for o in outputs if o.records and o.finish_reason is None]
        waiting = [o for o in outputs if not o.records]
        explained = self._explain and collector.messages > 0 and height >= LEGEND_HEIGHT
        room = max(height - 1 - explained, 0)
        shown = outputs if len(outputs) <= room else (running + waiting)[:room]
        segments = [segment for output in shown for segment in self._line(output, width)]
        note = starting
        if collector.messages:
            done = len(outputs) - len(running) - len(waiting)
            emitted = sum(output.num_tokens for output in outputs)
            note = (
                f"{done} of {len(outputs)} done, {len(running)} running, {len(waiting)} waiting"
                f"{self._pace(outputs, emitted)}, {counted(emitted, 'token')}, "
                f"step {collector.messages}"
            )
        status = Text(note, style="bold", no_wrap=True, overflow="ellipsis")
        below = [token_colors.legend_text(), status] if explained else [status]
        return Group(Segments(segments), *below) if segments else Group(*below)

    def _pace(self, outputs: list[Output], emitted: int) -> str:
        """Tokens a second, and the share of drafts accepted so far, as far as they are known."""
        rate, drafts = self._rate.update(emitted), sum(output.num_drafts for output in outputs)
        said = "" if rate is None else f", {rate:.0f} tokens/s"
        if drafts:
            accepted = sum(output.num_accepted for output in outputs)
            said += f", {accepted / drafts:.0%} of drafts accepted"
        return said

    def _line(self, output: Output, width: int) -> list[Segment]:
        """The request's K, its state and the end of its text; kept until something changes."""
        name, key = output.request.id, (len(output.records), width)
        if name in self._lines and self._lines[name][0] == key:
            return self._lines[name][1]
        k = output.request.params.logprobs
        asked = f"{'-' if k is None else f'K={k}':<5} "
        state, style = _state(output)
        state = f"{state:>4} "
        text = self._texts.setdefault(name, ColoredText(output))
        text.update()
        line = [
            Segment(asked),
            Segment(state, Style.parse(style)),
            *text.tail(max(width - len(asked) - len(state), 2)),
        ]
        line = [*Segment.adjust_line_length(line, width, pad=False), Segment.line()]
        self._lines[name] = key, line
        return line


def _state(output: Output) -> tuple[str, str]:
    """A request's state on its line, and the style of it."""
    if output.finish_reason is not None:
        return "done", "green"
    return (str(output.num_tokens), "none") if output.records else ("wait", "dim")


class _PlainScreen:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._said: set[str] = set()

    def update(self, collector: Collector) -> None:
        if not collector.messages and not self._said:
            say(STARTING, self._console)
            self._said.add("")
        for name, output in collector.outputs.items():
            reason = output.finish_reason
            # The error says once, with the cause, that a worker was lost.
            if reason in (None, FinishReason.WORKER_LOST) or name in self._said:
                continue
            self._said.add(name)
            emitted = counted(output.num_tokens, "token")
            say(f"request {name} done: {emitted} ({readable(reason)})", self._console)

    @contextmanager
    def starting(self, collector: Collector, phases: Phases) -> Iterator[Callable[[], None]]:
        yield lambda: None

    def note(self, text: str) -> None:
        say(text, self._console)


def say(text: str, console: Console) -> None:
    """Print a sentence: wrapped on a terminal, on one line in a file or a pipe."""
    console.print(Text(text), soft_wrap=not console.is_terminal)


def readable(reason: FinishReason) -> str:
    """A finish reason in words, such as "stop token"."""
    return reason.name.lower().replace("_", " ")


def full_texts(collector: Collector, console: Console) -> None:
    """Print each request's prompt and text, colored and never wrapped."""
    for name, output in collector.outputs.items():
        text = ColoredText(output)
        text.update()
        console.print(Text.assemble((f"{name}: ", "bold"), text.whole()), soft_wrap=True)
