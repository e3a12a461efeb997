"""The measured pages, from the results that are kept: `python -m bench report`.

Writes the part of README.md between the markers, docs/measurements.md and the plots in docs/plots,
from the newest comparison of each kind in bench/results. `--check` writes nothing and fails where a
page is not what it would write.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.report import outputs, rows
from bench.report.comparison import Comparison, Target
from bench.report.files import Results, ResultsError, read_json
from bench.report.rows import ROWS, Platforms

ROOT = Path(__file__).parents[2]
RESULTS, PLOTS = ROOT / "bench/results", ROOT / "docs/plots"
README, PAGE = ROOT / "README.md", ROOT / "docs/measurements.md"
BEGIN = "<!-- measured: begin, written by `python -m bench report` -->"
END = "<!-- measured: end -->"
BUSY = 0.5  # the load from which a result says so
SHOWN = {  # README's plots, and what they show
    "loop-64-greedy-requests-2-drafts-random-model-v-16384": "tokens a second left with logprobs",
    "message-bytes": "bytes of a step against K",
}
NOISE = (
    "Brackets hold the middle half of the rounds. Within noise: 100 % lies in them, so this run "
    "could not tell a cost."
)


def load(directory: Path) -> list[Results]:
    """All results in a folder, the oldest first.

    Raises:
      ResultsError: a JSON file there holds no results.
    """
    found = [read_json(path) for path in sorted(directory.glob("*.json"))]
    return sorted(found, key=lambda results: results.date)


def platform(one: Comparison) -> str:
    """Where a comparison was measured: "cpu", "gpu" or "tpu"; a GPU's only by its own clock."""
    device = str(one.settings.get("device", "cpu")).lower()
    if "tpu" in device:
        return "tpu"
    on_gpu = device != "cpu" and one.settings.get("clock", "device") == "device"
    return "gpu" if on_gpu else "cpu"


def newest(results: Iterable[Results]) -> Platforms:
    """The newest comparison of each title on each platform."""
    found = Platforms({}, {}, {})
    for one in results:
        for comparison in one.comparisons:
            getattr(found, platform(comparison))[comparison.title] = (comparison, one)
    return found


def readme_part(results: Sequence[Results], images: Sequence[str]) -> str:
    """README's part, without its markers: ten rows at most, two plots, and how many limits hold.

    Args:
      results: the oldest first.
      images: the file names of the plots that exist.
    """
    found = newest(results)
    lines, _ = rows.table([row for row in ROWS if row.in_readme], found)
    more = "[All figures, limits and plots, with machine and command](docs/measurements.md)."
    lines = ["", *lines, "", NOISE, *_verdicts(_targets(found))[:1], more, ""]
    lines += [
        f"![{text}](docs/plots/{name}.svg)"
        for name, text in SHOWN.items()
        if f"{name}.svg" in images
    ]
    return "\n".join(lines) + "\n\n"


def page(results: Sequence[Results], images: Sequence[str]) -> str:
    """docs/measurements.md: all rows, all limits, where the figures come from, all plots."""
    found = newest(results)
    table, used = rows.table(ROWS, found)
    targets = _targets(found)
    limits = [f"| {title} | {target} |" for (title, _), target in targets.items()]
    sources = [_source(source) for _, source in sorted(used.items())]
    plots = [f"![{name.removesuffix('.svg')}](plots/{name})\n" for name in images]
    lines = [
        "# Measurements", "",
        "Written by `python -m bench report` from the newest files in `bench/results`.",
        "How each suite measures, and beside what, is in `bench/README.md`. Times of a shared",
        "machine mean little; ratios of one run say more.", "",
        "## Figures", "", *table, "", NOISE, "",
        "## Limits", "", *_verdicts(targets), "",
        "| Comparison | Limit |", "| --- | --- |", *limits, "",
        "## Where the figures come from", "", *sources, "",
        "## Plots", "", *plots,
    ]  # fmt: skip
    return "\n".join(lines).rstrip() + "\n"


def _targets(platforms: Platforms) -> dict[tuple[str, str], Target]:
    """The limits of the benchmarks, by comparison and subject; the verdict of a device counts."""
    found: dict[tuple[str, str], Target] = {}
    for comparison, _ in (one for there in platforms for one in there.values()):
        for target in comparison.targets:
            key = comparison.title, target.what
            if key not in found or target.measured is not None:
                found[key] = target
    return found


def _verdicts(targets: dict[tuple[str, str], Target]) -> list[str]:
    """How many limits were held, in one line; then those that were missed."""
    if not targets:
        return []
    counts = [
        sum(target.verdict == verdict for target in targets.values())
        for verdict in ("held", "MISSED", "not measured")
    ]
    lines = [
        f"Of the {len(targets)} limits that the benchmarks state, {counts[0]} were held, "
        f"{counts[1]} missed and {counts[2]} not measured."
    ]
    missed = [
        f"- {title}: {target}"
        for (title, _), target in targets.items()
        if target.verdict == "MISSED"
    ]
    return [*lines, *(["Missed:", "", *missed, ""] if missed else [])]


def _source(results: Results) -> str:
    """One results file: when, on which machine, with which versions, by which command."""
    machine = results.environment
    versions = machine.get("versions", {})
    load = machine.get("load before", 0.0)
    busy = f", on a machine that was busy (load {load})" if load > BUSY else ""
    if priority := machine.get("priority", ""):
        busy += f", before its other programs ({priority})"
    return (
        f"- `bench/results/{results.path.name}`: {results.date[:10]}, "
        f"{machine['cpus']} cores of {machine.get('processor', 'an unknown processor')}, "
        f"Python {machine.get('python', '?')}, jax {versions.get('jax', '?')}, "
        f"`{machine.get('command', '?')}`{busy}."
    )


def insert(readme: str, part: str) -> str:
    """The README with `part` between its markers.

    Raises:
      ResultsError: the markers are not there, once each and in order.
    """
    begin, end = readme.find(BEGIN), readme.find(END)
    if readme.count(BEGIN) != 1 or readme.count(END) != 1 or end < begin:
        raise ResultsError(f"README.md needs the lines {BEGIN!r} and {END!r}, once and in order")
    return f"{readme[:begin]}{BEGIN}\n{part}{readme[end:]}"


def images_in(directory: Path) -> list[str]:
    """The file names of the plots in a folder."""
    return sorted(path.name for path in directory.glob("*.svg"))


def rendered(results: Sequence[Results]) -> dict[Path, str]:
    """The whole text of each page, with the plots that exist."""
    images = images_in(PLOTS)
    return {
        README: insert(README.read_text(), readme_part(results, images)),
        PAGE: page(results, images),
    }


def main(arguments: list[str]) -> int:
    """Exit status 0; 1 with `--check` where a page is out of date."""
    parser = argparse.ArgumentParser(
        prog="python -m bench report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if it differs")
    options = parser.parse_args(arguments)
    results = load(RESULTS)
    if options.check:
        return _check(rendered(results))
    outputs.check_plots(PLOTS)
    draw(results, PLOTS)
    for path, text in rendered(results).items():
        path.write_text(text)
        print(f"wrote {path}")
    print(f"wrote {len(images_in(PLOTS))} plots in {PLOTS}")
    return 0


def _check(pages: dict[Path, str]) -> int:
    current = {path: path.exists() and path.read_text() == text for path, text in pages.items()}
    for path, same in current.items():
        state = "up to date" if same else "out of date: run python -m bench report"
        print(f"{path.relative_to(ROOT)} is {state}")
    return 0 if all(current.values()) else 1


def draw(results: Sequence[Results], directory: Path) -> list[Path]:
    """Replace the plots by those of the newest results; those of a GPU or a TPU in its folder."""
    from bench.report import plots  # needs matplotlib, and `--check` does not

    for path in directory.rglob("*.svg"):
        path.unlink()
    drawn: list[Path] = []
    for name, there in newest(results)._asdict().items():
        folder = directory if name == "cpu" else directory / name
        drawn += plots.draw([one for one, _ in there.values()], folder)
    return drawn


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
