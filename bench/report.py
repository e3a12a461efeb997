"""The page and the pictures of the kept results: `python -m bench report [--check]`.

Writes docs/measurements.md, and a picture a suite beside it, from the newest comparison of each
title in bench/results; `--check` writes nothing and fails where one of them is another.
"""

import argparse
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench import pictures
from bench.comparison import HOST, MEMORY, PEERS, Comparison, Timing
from bench.files import Results, read_json
from bench.timing import number_of, readable

ROOT = Path(__file__).parents[1]
PAGE, PLOTS = ROOT / "docs/measurements.md", ROOT / "docs/plots"
HEAD = """# Measurements

Written by `python -m bench report` from the newest files in `bench/results`; how each suite
measures is in `bench/README.md`. A time is the median of the rounds. A ratio is a contender's time
over ours: 2x takes twice our time. Compare ratios of a suite, never times of two: machines and days
differ.

| Suite | What is timed | Others' time over ours: median (from, to) | Limits held |
| --- | --- | --- | --- |
"""
# In the order of the page: what is timed, by suite.
SUITES = {
    "kernels": "top K, logprobs and ranks of logits, by XLA on a CPU",
    "linear": "the same of hidden states and a head, in blocks, and of whole logits",
    "sampling": "verification, draws and raw logprobs of sampled rows",
    "peers": "functions of trainers and engines, and the adapters in their place",
    "host": "bytes of a message to records, to text, and the imports that it takes",
    "ring": "a message from process to process",
    "end-to-end": "a step of the whole loop with logprobs, without, and with other parts",
    "real": "SmolLM2-135M-Instruct: its start, and its loop with logprobs and with sampling",
    "drafts": "a token of that model with drafters, and without",
    "widths": "simulated steps, by the constants that choose how many drafts are verified",
    "block": "a token where drafts are accepted together, and one by one",
    "same-bits": "a step and a scoring whose rows have the same bits in any batch",
    "rungs": "a step of a batch alone, and beside a request that changes logits",
    "distill": "divergences from a teacher's support, and from its whole logits",
    "server": "requests over a connection that is kept, and over new ones",
    "load": "many streams and short requests to the server, and the engine alone",
}
# Files of before a suite had its name, and suites that are parts of another one's picture.
PART_OF = {"kernel-grid": "kernels", "detokenize": "host", "imports": "host"}


class Section(NamedTuple):
    """A suite's newest comparisons.

    Attributes:
      suite: its name.
      comparisons: by title, each with the results that it is of.
    """

    suite: str
    comparisons: Mapping[str, tuple[Comparison, Results]]


def kept() -> Iterator[Results]:
    """The results that are kept."""
    return (read_json(path) for path in (ROOT / "bench/results").glob("*.json"))


def newest(results: Iterable[Results]) -> dict[str, tuple[Comparison, Results]]:
    """The newest comparison of each title on each device, by both."""
    latest: dict[str, tuple[Comparison, Results]] = {}
    for run in sorted(results, key=lambda results: results.date):
        for comparison in run.comparisons:
            device = str(comparison.settings.get("device", "cpu"))
            of = "" if device == "cpu" else f" ({device})"
            latest[comparison.title + of] = comparison, run
    return latest


def sections(results: Iterable[Results]) -> list[Section]:
    """The newest comparisons, by suite, in the order of the page."""
    by_suite: dict[str, dict[str, tuple[Comparison, Results]]] = {suite: {} for suite in SUITES}
    for title, pair in newest(results).items():
        suite = PART_OF.get(pair[0].suite, pair[0].suite)
        by_suite.setdefault(suite, {})[title] = pair
    return [Section(suite, pairs) for suite, pairs in by_suite.items() if pairs]


def page(results: Iterable[Results]) -> str:
    """The text of docs/measurements.md."""
    parts = sections(results)
    lines = [HEAD + "\n".join(_summary(section) for section in parts)]
    for section in parts:
        lines += ["", *_section(section)]
    return "\n".join(lines) + "\n"


def _summary(section: Section) -> str:
    """A suite's line at the top of the page."""
    comparisons = [comparison for comparison, _ in section.comparisons.values()]
    ratios = sorted(ratio for comparison in comparisons for ratio in _ratios(comparison))
    shown = "our own ways alone"
    if ratios:
        middle = statistics.median(ratios)
        shown = f"{middle:.3g}x ({ratios[0]:.3g}x, {ratios[-1]:.3g}x)"
    verdicts = [target.verdict for comparison in comparisons for target in comparison.targets]
    judged = len(verdicts) - verdicts.count("not measured")
    limits = f"{verdicts.count('held')} of {judged}" if judged else "none set"
    what = SUITES.get(section.suite, "")
    return f"| [{section.suite}](#{section.suite}) | {what} | {shown} | {limits} |"


def _ratios(comparison: Comparison) -> list[float]:
    """Each other contender's time over the quickest of ours."""
    ours = [timing.median for timing in comparison.timings if timing.name not in PEERS]
    others = [timing.median for timing in comparison.timings if timing.name in PEERS]
    return [other / min(ours) for other in others] if ours else []


def _section(section: Section) -> Iterator[str]:
    """A heading, the picture, and folded: every comparison, limits that were not held, files."""
    suite, pairs = section
    yield f"## {suite}"
    yield ""
    yield f"![Times of the suite {suite}](plots/{suite}.svg)"
    yield ""
    count = len(pairs)
    yield from _folded(
        f"All {count} comparisons" if count > 1 else "The comparison",
        ["| Comparison | Ours | Time | Others' time over it |", "| --- " * 4 + "|"]
        + [line for title, (comparison, _) in pairs.items() for line in _rows(title, comparison)],
    )
    open_limits = [
        f"- {title}: {target}"
        for title, (comparison, _) in pairs.items()
        for target in comparison.targets
        if target.verdict != "held"
    ]
    if open_limits:
        missed = sum("MISSED" in line for line in open_limits)
        summary = f"Limits: {missed} missed, {len(open_limits) - missed} not measured"
        yield from _folded(summary, open_limits)
    sources = {results.path.name: results for _, results in pairs.values()}
    yield from _folded(
        "Machines and commands", [f"- {_source(sources[name])}" for name in sorted(sources)]
    )


def _folded(summary: str, lines: Sequence[str]) -> Iterator[str]:
    yield f"<details><summary>{summary}</summary>"
    yield ""
    yield from lines
    yield ""
    yield "</details>"
    yield ""


def _rows(title: str, comparison: Comparison) -> Iterator[str]:
    """A line for each of our contenders; where all are ours, or none, one for the first."""
    figures = comparison.figures
    if why := comparison.notes.get("NOT RUN"):
        megabytes = [f"{name}{_more(figures, name, MEMORY, 'MB')}" for name in figures]
        yield f"| {title} | NOT RUN | {why} | {'; '.join(megabytes)} |"
    ours = [timing for timing in comparison.timings if timing.name not in PEERS]
    others = [timing for timing in comparison.timings if timing.name in PEERS]
    if not ours or not others:
        ours, others = [*comparison.timings[:1]], [*comparison.timings[1:]]
    for timing in ours:
        ratios = [
            f"{other.name} {other.median / timing.median:.3g}x"
            + _more(figures, other.name, MEMORY, "MB")
            for other in others
        ]
        time = _time(timing) + _more(figures, timing.name, MEMORY, "MB")
        time += _more(figures, timing.name, HOST, "KB to the host")
        yield f"| {title} | {timing.name} | {time} | {', '.join(ratios)} |"


def _more(figures: Mapping[str, Mapping[str, float]], name: str, figure: str, unit: str) -> str:
    """A contender's figure, if it has that one."""
    value = figures.get(name, {}).get(figure)
    return "" if value is None else f", {number_of(value)} {unit}"


def _time(timing: Timing) -> str:
    """The median, the middle half of the rounds and, for messages, the slowest hundredth."""
    slowest = f", p99 {readable(timing.percentiles['p99'])}" if timing.percentiles else ""
    return f"{readable(timing.median)} ({readable(timing.low)} to {readable(timing.high)}{slowest})"


def _source(results: Results) -> str:
    machine = results.environment
    versions = machine.get("versions", {})
    # What ran in environments of its own, and by which clock.
    settings = [
        comparison.settings for comparison in results.comparisons if "with" in comparison.settings
    ]
    peers = dict.fromkeys(values[name] for name in ("clock", "with") for values in settings)
    return (
        f"`{results.path.name}`: {results.date[:10]}, {machine['cpus']} cores of "
        f"{machine.get('processor', 'an unknown processor')}, Python {machine.get('python')}, "
        f"jax {versions.get('jax')}, `{machine.get('command')}`"
        + (f" ({'; '.join(peers)})" if peers else "")
    )


def out_of_date() -> list[str]:
    """The files that are not what the kept results say."""
    results = [*kept()]
    names = [] if PAGE.read_text("utf-8") == page(results) else [PAGE.name]
    return names + [
        picture.name
        for section in sections(results)
        if not pictures.is_drawn(picture := PLOTS / f"{section.suite}.svg", _comparisons(section))
    ]


def write() -> None:
    """The page, and the pictures that are of other results.

    Raises:
      ImportError: a picture must be drawn, and matplotlib is not installed.
    """
    results = [*kept()]
    for section in sections(results):
        picture, comparisons = PLOTS / f"{section.suite}.svg", _comparisons(section)
        if not pictures.is_drawn(picture, comparisons):
            pictures.draw(picture, section.suite, comparisons)
    PAGE.write_text(page(results), "utf-8")


def _comparisons(section: Section) -> list[Comparison]:
    return [comparison for comparison, _ in section.comparisons.values()]


def main(arguments: Sequence[str]) -> int:
    """Exit status 1 if a file is not up to date, or cannot be drawn."""
    parser = argparse.ArgumentParser(
        prog="python -m bench report", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--check", action="store_true", help="write nothing, fail where it differs")
    options = parser.parse_args(arguments)
    if not options.check:
        try:
            write()
        except ImportError:
            print(pictures.MISSING)
            return 1
    names = out_of_date()
    for name in names:
        print(f"{name} is out of date: run python -m bench report")
    if not names:
        print(f"{PAGE.name} and its pictures are up to date")
    return 1 if names else 0
