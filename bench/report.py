"""One table of the kept results: `python -m bench report [--check]`.

Writes docs/measurements.md from the newest comparison of each title in bench/results; `--check`
writes nothing and fails where the page is another.
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from bench.comparison import HOST, MEMORY, PEERS, Comparison, Timing
from bench.files import Results, read_json
from bench.timing import number_of, readable

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/measurements.md"
HEAD = """# Measurements

Written by `python -m bench report` from the newest files in `bench/results`. How each suite
measures is in `bench/README.md`. Compare ratios within a line, never times across files: they are
of other machines and days.

The time is the median of the rounds, with the middle half of them and, for messages, the slowest
hundredth. A ratio is a contender's time over ours: 2x takes twice our time. Beside the trainers and
engines of `peers`, MB are the temporaries and results of the compiled program.
"""


def kept() -> Iterator[Results]:
    """The results that are kept."""
    return (read_json(path) for path in (ROOT / "bench/results").glob("*.json"))


def newest(results: Iterable[Results]) -> dict[str, tuple[Comparison, Results]]:
    """The newest comparison of each title on each device, by both."""
    found: dict[str, tuple[Comparison, Results]] = {}
    for one in sorted(results, key=lambda results: results.date):
        for comparison in one.comparisons:
            device = str(comparison.settings.get("device", "cpu"))
            of = "" if device == "cpu" else f" ({device})"
            found[comparison.title + of] = comparison, one
    return found


def page(results: Iterable[Results]) -> str:
    """The text of docs/measurements.md."""
    found = newest(results)
    sources = {source.path.name: source for _, source in found.values()}
    numbers = {name: index for index, name in enumerate(sorted(sources), 1)}
    targets = [target for comparison, _ in found.values() for target in comparison.targets]
    verdicts = [target.verdict for target in targets]
    lines = [HEAD, "| Comparison | Ours | Time | Others' time over it | File |", "| --- " * 5 + "|"]
    for title, (comparison, source) in found.items():
        lines += _rows(title, comparison, numbers[source.path.name])
    lines += ["", f"Limits: {verdicts.count('held')} held, {verdicts.count('MISSED')} missed, "
              f"{verdicts.count('not measured')} not measured.", ""]  # fmt: skip
    lines += [
        f"- {title}: {target}"
        for title, (comparison, _) in found.items()
        for target in comparison.targets
        if target.verdict != "held"
    ]
    lines += ["", "Files:", ""]
    lines += [f"{numbers[name]}. {_source(sources[name])}" for name in sorted(sources)]
    return "\n".join(lines) + "\n"


def _rows(title: str, comparison: Comparison, number: int) -> Iterator[str]:
    """A line for each of our contenders, or for the first if all are others'."""
    figures = comparison.figures
    if why := comparison.notes.get("NOT RUN"):
        megabytes = [f"{name}{_more(figures, name, MEMORY, 'MB')}" for name in figures]
        yield f"| {title} | NOT RUN | {why} | {'; '.join(megabytes)} | {number} |"
    ours = [one for one in comparison.timings if one.name not in PEERS]
    others = [one for one in comparison.timings if one.name in PEERS]
    for mine in ours or comparison.timings[:1]:
        ratios = [
            f"{one.name} {one.median / mine.median:.3g}x" + _more(figures, one.name, MEMORY, "MB")
            for one in others
            if one != mine
        ]
        time = _time(mine) + _more(figures, mine.name, MEMORY, "MB")
        time += _more(figures, mine.name, HOST, "KB to the host")
        yield f"| {title} | {mine.name} | {time} | {', '.join(ratios)} | {number} |"


def _more(figures: Mapping[str, Mapping[str, float]], name: str, figure: str, unit: str) -> str:
    """A contender's figure, if it has that one."""
    value = figures.get(name, {}).get(figure)
    return "" if value is None else f", {number_of(value)} {unit}"


def _time(one: Timing) -> str:
    slowest = f", p99 {readable(one.percentiles['p99'])}" if one.percentiles else ""
    return f"{readable(one.median)} ({readable(one.low)} to {readable(one.high)}{slowest})"


def _source(results: Results) -> str:
    machine = results.environment
    versions = machine.get("versions", {})
    # What ran in environments of its own, and by which clock.
    settings = [one.settings for one in results.comparisons if "with" in one.settings]
    own = dict.fromkeys(one[name] for name in ("clock", "with") for one in settings)
    return (
        f"`{results.path.name}`: {results.date[:10]}, {machine['cpus']} cores of "
        f"{machine.get('processor', 'an unknown processor')}, Python {machine.get('python')}, "
        f"jax {versions.get('jax')}, `{machine.get('command')}`"
        + (f" ({'; '.join(own)})" if own else "")
    )


def main(arguments: Sequence[str]) -> int:
    """Exit status 1 if the page is not up to date."""
    parser = argparse.ArgumentParser(
        prog="python -m bench report", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--check", action="store_true", help="write nothing, fail where it differs")
    options = parser.parse_args(arguments)
    text = page(kept())
    if not options.check:
        PAGE.write_text(text)
    same = PAGE.read_text() == text
    print(f"{PAGE.name} is {'up to date' if same else 'out of date: run python -m bench report'}")
    return 0 if same else 1
