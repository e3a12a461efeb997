"""Compare contenders fairly: equal results first, then interleaved rounds in one run, then ratios.

A single time says little on a shared machine. A ratio of medians taken in turn, round by round,
holds while the machine's speed drifts, so no time is printed without its peers beside it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.comparison import Comparison, Target, Timing, from_samples
from bench.files import write_json
from bench.progress import rounds_of

__all__ = [
    "BenchError", "Call", "Comparison", "Target", "Timing", "compare", "from_samples",
    "number_of", "print_table", "readable", "rotated", "rounds_of", "write_json",
]  # fmt: skip

Call = Callable[[], Any]

LEAST_ROUNDS = 3  # of a contender that is too slow for more


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
    clock: Callable[[], float] = time.perf_counter,
) -> Comparison:
    """Time `contenders` (each call must finish its own work, device work included).

    Args:
      title: what is compared.
      contenders: name to call; the first is the baseline.
      check: `check(name, expected, actual)` raises unless the results are equal; it sees every
        contender's result before anything is timed. None only where calls return nothing.
      rounds: interleaved rounds; each starts with another contender.
      min_seconds: a contender's calls per round are repeated to fill this time.
      budget: seconds; a contender whose calls have taken so long sits out further rounds, except
        `LEAST_ROUNDS`. None: each takes part in all rounds.
      settings: what was measured, for the JSON.
      clock: seconds.

    Raises:
      BenchError: a contender's result differs from the baseline's.
    """
    names = list(contenders)
    expected = contenders[names[0]]()
    repeats: dict[str, int] = {}
    samples: dict[str, list[float]] = {}
    for name, call in contenders.items():
        actual = expected if name == names[0] else call()  # also the warm-up
        if check is not None:
            try:
                check(name, expected, actual)
            except AssertionError as error:
                raise BenchError(f"{title}: {name} differs from {names[0]}: {error}") from error
        begin = clock()
        call()
        once = max(clock() - begin, 1e-7)
        repeats[name] = max(1, round(min_seconds / once))
        # Where calls are dear, the one that told how often to repeat it counts as well.
        samples[name] = [once] if budget is not None and repeats[name] == 1 else []
    del expected, actual  # their memory is free while contenders are timed
    for index in rounds_of(title, rounds):
        for name in rotated(names, index):
            call, count, taken = contenders[name], repeats[name], samples[name]
            spent = budget is not None and count * sum(taken) >= budget
            if len(taken) < rounds and not (spent and len(taken) >= LEAST_ROUNDS):
                begin = clock()
                for _ in range(count):
                    call()
                taken.append((clock() - begin) / count)
    return from_samples(title, samples, settings=settings)


def rotated(names: Sequence[str], index: int) -> list[str]:
    """The names in turn: each round starts with another one."""
    start = index % len(names)
    return [*names[start:], *names[:start]]


def print_table(comparisons: Sequence[Comparison], console: Console | None = None) -> None:
    """Median, spread and ratio of every contender, what else was counted, notes and targets."""
    console = console or Console(width=200)  # a narrow terminal may wrap lines, but cuts no figure
    for one in comparisons:
        columns: dict[str, Sequence[str]] = {
            "contender": one.names,
            "median": [readable(t.median) for t in one.timings],
            "quartiles": [f"{readable(t.low)} .. {readable(t.high)}" for t in one.timings],
        }
        if len({len(t.rounds) for t in one.timings}) > 1:
            columns["rounds"] = [str(len(t.rounds)) for t in one.timings]
        for name in ("p50", "p99") if any(t.percentiles for t in one.timings) else ():
            columns[name] = [readable(t.percentiles[name]) if t.percentiles else ""
                             for t in one.timings]  # fmt: skip
        for name in one.names[:1]:
            columns[f"time over {name}"] = [f"{t.ratio:.2f}x" for t in one.timings]
        _print(console, one.title, columns)
        rows = one.figures.values()
        keys = dict.fromkeys(key for row in rows for key in row)
        counted = {key: [number_of(row[key]) if key in row else "" for row in rows] for key in keys}
        if counted:
            _print(console, None, {"contender": list(one.figures), **counted})
        for name, value in one.notes.items():
            console.print(f"  {name}: {value}")
        for target in one.targets:
            console.print(f"  target: {target}")


def _print(console: Console, title: str | None, columns: Mapping[str, Sequence[str]]) -> None:
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name == "contender" else "right", no_wrap=True)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    console.print(table)


def number_of(value: float) -> str:
    """A figure as people read it: 2,276 or 0.312."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def readable(seconds: float) -> str:
    """Seconds as people write them: 12.3 us, 4.56 ms."""
    units = {"s": 1.0, "ms": 1e3, "us": 1e6}
    unit = next((unit for unit, scale in units.items() if abs(seconds) * scale >= 1), "us")
    return f"{seconds * units[unit]:.3g} {unit}"
