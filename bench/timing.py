"""Compare contenders fairly: equal results first, then interleaved rounds in one run, then ratios.

A single time says little on a shared machine; a ratio of medians taken in turn, round by round,
holds when the machine's speed drifts. So nothing here prints a time without its peers beside it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import progress
from bench.comparison import Comparison, Target, Timing, from_samples
from bench.files import write_json

__all__ = [
    "BenchError", "Call", "Comparison", "Target", "Timing", "compare", "from_samples",
    "print_table", "readable", "rotated", "write_json",
]  # fmt: skip

Call = Callable[[], Any]

PART = "part: "  # how the name of a figure starts that is part of another one


class BenchError(AssertionError):
    """Contenders that do not compute the same thing must not be compared."""


def compare(
    title: str,
    contenders: Mapping[str, Call],
    *,
    check: Callable[[str, Any, Any], None] | None,
    rounds: int = 7,
    min_seconds: float = 0.02,
    settings: Mapping[str, Any] | None = None,
) -> Comparison:
    """Time `contenders` (each call must finish its own work, device work included).

    Args:
      title: what is compared.
      contenders: name to call; the first is the baseline.
      check: `check(name, expected, actual)` raises unless the results are equal; it sees every
        contender's result before anything is timed. None only where calls return nothing.
      rounds: interleaved rounds; each starts with another contender.
      min_seconds: a contender's calls per round are repeated to fill this time.
      settings: what was measured, for the JSON.

    Raises:
      BenchError: a contender's result differs from the baseline's.
    """
    names = list(contenders)
    expected = contenders[names[0]]()
    repeats: dict[str, int] = {}
    for name in names:
        actual = contenders[name]()  # also the warm-up
        if check is not None:
            try:
                check(name, expected, actual)
            except AssertionError as error:
                raise BenchError(f"{title}: {name} differs from {names[0]}: {error}") from error
        begin = time.perf_counter()
        contenders[name]()
        once = max(time.perf_counter() - begin, 1e-7)
        repeats[name] = max(1, round(min_seconds / once))
    samples: dict[str, list[float]] = {name: [] for name in names}
    with progress.bar(title, rounds * len(names)) as advance:
        for index in range(rounds):
            for name in rotated(names, index):
                call, count = contenders[name], repeats[name]
                begin = time.perf_counter()
                for _ in range(count):
                    call()
                samples[name].append((time.perf_counter() - begin) / count)
                advance()
    return from_samples(title, samples, settings=settings)


def rotated(names: Sequence[str], index: int) -> list[str]:
    """The names, starting with another one each round."""
    start = index % len(names)
    return [*names[start:], *names[:start]]


def print_table(comparisons: Sequence[Comparison], console: Console | None = None) -> None:
    """Median, spread and ratio of every contender, what was counted beside, notes and targets."""
    if console is None:
        console = Console()
        if not console.is_terminal:  # nothing there to wrap lines for
            console = Console(width=max(console.width, 120))
    for comparison in comparisons:
        table = _table(comparison.title)
        for column in ("median", "quartiles", f"against {comparison.timings[0].name}"):
            table.add_column(column, justify="right")
        for timing in comparison.timings:
            table.add_row(
                timing.name,
                readable(timing.median),
                f"{readable(timing.low)} .. {readable(timing.high)}",
                f"{timing.ratio:.2f}x the time",
            )
        console.print(table)
        if comparison.figures:
            console.print(_counted(comparison))
        for name, value in comparison.notes.items():
            console.print(f"  {name}: {value}")
        for target in comparison.targets:
            console.print(f"  target: {target}")


def _counted(comparison: Comparison) -> Table:
    """What was counted beside the time; the parts of a figure are for the JSON and the plots."""
    keys = dict.fromkeys(key for row in comparison.figures.values() for key in row)
    shown = [key for key in keys if not key.startswith(PART)]
    table = _table("")
    for key in shown:
        table.add_column(key, justify="right")
    for name, row in comparison.figures.items():
        table.add_row(name, *(_number(row[key]) if key in row else "" for key in shown))
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _table(title: str) -> Table:
    table = Table(title=title or None, title_justify="left")
    table.add_column("contender", no_wrap=True)
    return table


def readable(seconds: float) -> str:
    """Seconds for a person: 12.3 us, 4.56 ms."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if abs(seconds) * scale >= 1 or unit == "us":
            return f"{seconds * scale:.3g} {unit}"
    raise AssertionError("unreachable")
