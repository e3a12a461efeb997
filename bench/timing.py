"""Compare contenders fairly: equal results first, then interleaved rounds in one run, then ratios.

A single time says little on a shared machine. A ratio of medians taken in turn, round by round,
holds while the machine's speed drifts, so no time is printed without its peers beside it.
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

LEAST_ROUNDS = 3  # of a contender that is too slow for more
BORDER = 3  # characters that a table's column takes beside its text
PART = "part: "  # the prefix of a figure that is part of another one


class BenchError(AssertionError):
    """Contenders compute different things, or one ended: there is nothing to compare."""


def compare(
    title: str,
    contenders: Mapping[str, Call],
    *,
    check: Callable[[str, Any, Any], None] | None,
    rounds: int = 7,
    min_seconds: float = 0.02,
    budget: float | None = None,
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
      budget: seconds; a contender whose calls have taken so long sits out further rounds, but for
        `LEAST_ROUNDS`. None: each takes part in all rounds.
      settings: what was measured, for the JSON.

    Raises:
      BenchError: a contender's result differs from the baseline's.
    """
    repeats, once = _checked(title, contenders, check, min_seconds)
    names = list(contenders)
    # Where calls are dear, the one that told how often to repeat it counts as well.
    kept = [name for name in names if budget is not None and repeats[name] == 1]
    samples = {name: [once[name]] if name in kept else [] for name in names}
    with progress.bar(title, rounds * len(names)) as advance:
        for index in range(rounds):
            for name in rotated(names, index):
                call, count = contenders[name], repeats[name]
                if len(samples[name]) < rounds and not _spent(samples[name], count, budget):
                    begin = time.perf_counter()
                    for _ in range(count):
                        call()
                    samples[name].append((time.perf_counter() - begin) / count)
                advance()
    return from_samples(title, samples, settings=settings)


def _spent(rounds: Sequence[float], repeats: int, budget: float | None) -> bool:
    """Whether a contender's budget is spent, after the fewest rounds that it gets in any case."""
    if budget is None or len(rounds) < LEAST_ROUNDS:
        return False
    return repeats * sum(rounds) >= budget


def _checked(
    title: str,
    contenders: Mapping[str, Call],
    check: Callable[[str, Any, Any], None] | None,
    min_seconds: float,
) -> tuple[dict[str, int], dict[str, float]]:
    """Compare all results; how often each contender is called in a round, and one call's time."""
    baseline = next(iter(contenders))
    expected = contenders[baseline]()
    repeats: dict[str, int] = {}
    times: dict[str, float] = {}
    for name, call in contenders.items():
        actual = call()  # also the warm-up
        if check is not None:
            try:
                check(name, expected, actual)
            except AssertionError as error:
                raise BenchError(f"{title}: {name} differs from {baseline}: {error}") from error
        begin = time.perf_counter()
        call()
        times[name] = max(time.perf_counter() - begin, 1e-7)
        repeats[name] = max(1, round(min_seconds / times[name]))
    return repeats, times


def rotated(names: Sequence[str], index: int) -> list[str]:
    """The names in turn: each round starts with another one."""
    start = index % len(names)
    return [*names[start:], *names[:start]]


def print_table(comparisons: Sequence[Comparison], console: Console | None = None) -> None:
    """Median, spread and ratio of every contender, what was counted beside, notes and targets."""
    if console is None:
        console = Console()
        if not console.is_terminal:  # a file or a pipe: lines need not be wrapped
            console = Console(width=max(console.width, 120))
    for comparison in comparisons:
        columns = {
            "median": [readable(t.median) for t in comparison.timings],
            "quartiles": [f"{readable(t.low)} .. {readable(t.high)}" for t in comparison.timings],
            **_rounds(comparison),
            **_of_single_events(comparison),
            f"time over {comparison.names[0]}": [f"{t.ratio:.2f}x" for t in comparison.timings],
        }
        for table in _tables(comparison.title, comparison.names, columns, console.width):
            console.print(table)
        counted = list(comparison.figures)
        for table in _tables("", counted, _counted(comparison), console.width):
            console.print(table)
        for name, value in comparison.notes.items():
            console.print(f"  {name}: {value}")
        for target in comparison.targets:
            console.print(f"  target: {target}")


def _rounds(comparison: Comparison) -> dict[str, list[str]]:
    """How many rounds each contender took part in, where not all took part in as many."""
    counts = [len(timing.rounds) for timing in comparison.timings]
    return {"rounds": [str(count) for count in counts]} if len(set(counts)) > 1 else {}


def _of_single_events(comparison: Comparison) -> dict[str, list[str]]:
    """The median and the slowest hundredth of single events, where these were measured."""
    found = [timing.percentiles for timing in comparison.timings]
    if not any(found):
        return {}
    return {
        name: [readable(each[name]) if each else "" for each in found] for name in ("p50", "p99")
    }


def _counted(comparison: Comparison) -> dict[str, list[str]]:
    """What was counted beside the time; parts of a figure go to the JSON and the plots only."""
    rows = list(comparison.figures.values())
    keys = dict.fromkeys(key for row in rows for key in row if not key.startswith(PART))
    return {key: [_number(row[key]) if key in row else "" for row in rows] for key in keys}


def _tables(
    title: str, names: Sequence[str], columns: Mapping[str, Sequence[str]], width: int
) -> list[Table]:
    """The columns, in as many tables as lines of `width` need to show every word and figure."""
    left = max(map(len, ("contender", *names))) + BORDER + 1
    parts: list[list[str]] = []
    rest = 0
    for header, cells in columns.items():
        needed = _width(header, cells) + BORDER
        if not parts or needed > rest:
            parts.append([])
            rest = width - left
        parts[-1].append(header)
        rest -= needed
    found: list[Table] = []
    for part in parts:
        table = Table(title=None if found else title or None, title_justify="left")
        table.add_column("contender", no_wrap=True)
        for header in part:
            table.add_column(header, justify="right", width=_width(header, columns[header]))
        for row in zip(names, *(columns[header] for header in part), strict=True):
            table.add_row(*row)
        found.append(table)
    return found


def _width(header: str, cells: Sequence[str]) -> int:
    """The least width of a column, in characters; its header may wrap between words."""
    return max(map(len, (*header.split(), *cells)))


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def readable(seconds: float) -> str:
    """Seconds as people write them: 12.3 us, 4.56 ms."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if abs(seconds) * scale >= 1 or unit == "us":
            return f"{seconds * scale:.3g} {unit}"
    raise AssertionError("unreachable")
