"""Compare contenders fairly: equal results first, then interleaved rounds in one run, then ratios.

A single time says little on a shared machine; a ratio of medians taken in turn, round by round,
holds when the machine's speed drifts. So nothing here prints a time without its peers beside it.
"""

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

Call = Callable[[], Any]


class BenchError(AssertionError):
    """Contenders that do not compute the same thing must not be compared."""


@dataclass(frozen=True)
class Timing:
    """One contender's seconds a call: the median of the rounds, and their quartiles."""

    name: str
    median: float
    low: float
    high: float
    ratio: float  # this median over the baseline's; above 1 is slower
    rounds: tuple[float, ...]


@dataclass(frozen=True)
class Comparison:
    """What one run of contenders found; the first one is the baseline of the ratios."""

    title: str
    settings: Mapping[str, Any]
    timings: tuple[Timing, ...]
    notes: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Timing:
        return next(timing for timing in self.timings if timing.name == name)

    def speedup(self, name: str, over: str) -> float:
        """How many times faster `name` is than `over`, by medians."""
        return self[over].median / self[name].median


def compare(
    title: str,
    contenders: Mapping[str, Call],
    *,
    check: Callable[[str, Any, Any], None] | None,
    rounds: int = 7,
    min_seconds: float = 0.02,
    settings: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
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
    task = progress.add_task(title, total=rounds * len(names)) if progress else None
    for index in range(rounds):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            call, count = contenders[name], repeats[name]
            begin = time.perf_counter()
            for _ in range(count):
                call()
            samples[name].append((time.perf_counter() - begin) / count)
            if progress is not None and task is not None:
                progress.advance(task)
    return from_samples(title, samples, settings=settings)


def from_samples(
    title: str,
    samples: Mapping[str, list[float]],
    *,
    settings: Mapping[str, Any] | None = None,
    notes: Mapping[str, Any] | None = None,
) -> Comparison:
    """A comparison of seconds that were measured elsewhere (between processes, on a device)."""
    base = statistics.median(next(iter(samples.values())))
    timings = []
    for name, values in samples.items():
        ordered = sorted(values)
        median = statistics.median(ordered)
        low, high = ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]
        timings.append(Timing(name, median, low, high, median / base, tuple(values)))
    return Comparison(title, dict(settings or {}), tuple(timings), dict(notes or {}))


def print_table(comparisons: list[Comparison], console: Console | None = None) -> None:
    """Median, spread and ratio of every contender, a table a comparison."""
    console = console or Console()
    for comparison in comparisons:
        table = Table(title=comparison.title, title_justify="left")
        table.add_column("contender")
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
        for name, value in comparison.notes.items():
            console.print(f"  {name}: {value}")


def readable(seconds: float) -> str:
    """Seconds for a person: 12.3 us, 4.56 ms."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1 or unit == "us":
            return f"{seconds * scale:.3g} {unit}"
    raise AssertionError("unreachable")


def environment() -> dict[str, Any]:
    """The machine and the versions that a result belongs to."""
    versions = {}
    for name in ("jax", "jaxlib", "numpy", "posix_ipc", "jax-specdec"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.machine(),
        "processor": _processor(),
        "cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "versions": versions,
        "command": " ".join(["python -m", *_program(), *sys.argv[1:]]),
    }


def _program() -> list[str]:
    """The module that was run, without the folders of the machine that it ran on."""
    path = Path(sys.argv[0])
    return [path.parent.name if path.name == "__main__.py" else path.stem]


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def write_json(path: Path, comparisons: list[Comparison]) -> None:
    """All comparisons with the machine they were made on, for `compare` and the plots."""
    content = {"environment": environment(), "comparisons": [asdict(c) for c in comparisons]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
