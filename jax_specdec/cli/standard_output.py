"""A run on standard output: texts, in styles on a terminal, and before them what workers do."""

import contextlib
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from jax_specdec.cli.resumable import record_line
from jax_specdec.engine.engine import Engine
from jax_specdec.records.record import Record
from jax_specdec.text.detokenize import TextStream

# The upper end of each band of logprobs (natural logarithm), and the color of the band.
BANDS = ((-3.0, "red"), (-1.5, "dark_orange"), (-0.5, "yellow"), (-0.1, "chartreuse3"))
SURE = "green"
_UNKNOWN = "white"  # no logprobs were asked for
INVALID = "magenta"


def color(logprob: float | None) -> str:
    """The color of a token by its logprob."""
    if logprob is None:
        return _UNKNOWN
    if math.isnan(logprob):
        return INVALID
    for upper, name in BANDS:
        if logprob < upper:
            return name
    return SURE


def style(logprob: float | None, accepted: bool) -> str:
    """The style of a token; `accepted` says that it was a draft."""
    return f"{color(logprob)} underline" if accepted else color(logprob)


def legend_text(unknown: bool = True) -> Text:
    """The meaning of colors, on one line; `unknown` adds that of tokens without logprobs."""
    text = Text("colors by logprob: ", no_wrap=True, overflow="ellipsis")
    names = [f"below {upper:g}" for upper, _ in BANDS] + ["above"]
    for name, shown in zip(names, [shown for _, shown in BANDS] + [SURE], strict=True):
        text.append(f" {name} ", style=shown)
    if unknown:
        text.append(" not asked ", style=_UNKNOWN)
    text.append("  ")
    return text.append("accepted drafts", style="underline")


def legend(console: Console, unknown: bool = True) -> None:
    """Print what the colors mean, if the console has colors."""
    if console.color_system is not None:
        console.print(legend_text(unknown))


def append_record(text: Text, stream: TextStream, record: Record) -> None:
    """Append a record's tokens to the text, in their styles.

    Control characters are shown as dots: a model may emit some that move the cursor.
    """
    for at, token in enumerate(record.token_ids.tolist()):
        logprob = None if record.logprobs is None else float(record.logprobs[at, 0])
        text.append(harmless(stream.push([token])), style(logprob, at < record.num_accepted))
    if record.finish_reason is not None:
        text.append(harmless(stream.finish()))


def harmless(text: str) -> str:
    """The text with dots for control characters, except for line ends and tabs."""
    return "".join(c if c.isprintable() or c in "\n\t" else "·" for c in text)


Show = Callable[[str, str], None]
Style = Callable[[float | None, bool], str]
Phases = Callable[[], Sequence[str]]
REDRAW_SECONDS = 0.25
BAR = 20  # characters


def shower(*, quiet: bool) -> tuple[Show, Style | None]:
    """The function by which `generate.TextsInOrder` shows texts, or shows none.

    On a terminal, texts are in styles, and without control codes.
    """
    if quiet:
        return _discard, None
    if not sys.stdout.isatty():
        return _write, None
    console = Console()
    styles = {"title": "bold", "prompt": "dim", "text": "", "error": "red"}

    def show(kind: str, text: str) -> None:
        shown = Text(harmless(text), styles.get(kind, kind))
        console.print(shown, end="", soft_wrap=True)

    return show, style


class RecordLines:
    """Standard output as one that takes records, for who reads it without a terminal."""

    def write(self, id: str, digest: str, record: Mapping[str, Any]) -> None:
        """Write one record as a line."""
        _write("", record_line(id, digest, record))


@contextlib.contextmanager
def waiting(phases: Phases, kept_in: str | None = None) -> Iterator[Callable[[], None]]:
    """Show what workers do: on a terminal as it goes on, elsewhere a line on compiling.

    Args:
      phases: see `Starting`.
      kept_in: where compiled programs are kept, to be told; None: nothing is said elsewhere.

    Yields a function that ends it, and may be called several times.
    """
    line = Starting(phases, kept_in=kept_in or "").line
    if not sys.stderr.isatty():
        if kept_in is None:
            yield lambda: None
            return
        lines: list[str] = []

        def say() -> None:
            now = line()
            if not lines and now.startswith("compiling") and " of " in now:
                lines.append(now)
                print(now, file=sys.stderr)

        with repeated(say, REDRAW_SECONDS) as end:
            yield end
        return
    with (
        Console(stderr=True).status("") as status,
        repeated(lambda: status.update(Text(with_bar(line())))) as end,
    ):

        def begun() -> None:
            end()
            status.stop()

        yield begun


def _discard(kind: str, text: str) -> None:
    """Show nothing."""


def _write(kind: str, text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from error


def phases_of(engine: Engine) -> Phases:
    """The phase of each process of the engine's workers."""
    return lambda: [text for worker in engine.status for text in worker.phase]


class Starting:
    """A line such as "compiling 7 of 9 (step), 12 s"."""

    def __init__(
        self, phases: Phases, clock: Callable[[], float] = time.monotonic, kept_in: str = ""
    ) -> None:
        """Begin to count.

        Args:
          phases: what each process does now, in the words of `WorkerStatus.phase`.
          clock: returns seconds.
          kept_in: where compiled programs are kept; empty for nowhere.
        """
        self._phases, self._clock, self._kept_in = phases, clock, kept_in
        self._since: dict[str, float] = {}

    def line(self) -> str:
        """The phases now, each once, and for how many seconds already."""
        now, doing = self._clock(), dict.fromkeys(self._phases())
        self._since = {what: self._since.get(what, now) for what in doing}
        line = "; ".join(f"{what}, {now - since:.0f} s" for what, since in self._since.items())
        if self._kept_in and line.startswith("compiling"):
            line += f"; on the first start only: kept in {self._kept_in}"
        return line


def with_bar(line: str) -> str:
    """The line, behind how far the first thing in it is that says so."""
    match = re.search(r"(\d+) of (\d+)", line)
    if match is None or not int(match[2]):
        return line
    full = BAR * int(match[1]) // int(match[2])
    return f"{'━' * full}{'╌' * (BAR - full)} {line}"


@contextlib.contextmanager
def repeated(
    show: Callable[[], object], seconds: float = REDRAW_SECONDS
) -> Iterator[Callable[[], None]]:
    """Call `show` every so many seconds in another thread, until the block ends.

    Yields a function that ends it earlier: afterwards `show` is not called again. It may be called
    several times.
    """
    over = threading.Event()

    def run() -> None:
        while not over.wait(seconds):
            show()

    def end() -> None:
        if not over.is_set():
            over.set()
            thread.join()

    thread = threading.Thread(target=run, name="what workers do", daemon=True)
    thread.start()
    try:
        yield end
    finally:
        end()
