"""The README's figures, from the results that are kept: `python -m bench report`.

Writes the part of README.md between the markers and the plots in docs/plots, from the newest
comparison of each kind in bench/results, never by hand. `--check` writes nothing and fails where
the README is not what it would write.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.report import outputs
from bench.report.comparison import Comparison, middle_half
from bench.report.files import Results, ResultsError, read_json
from bench.timing import readable

ROOT = Path(__file__).parents[2]
RESULTS, README, PLOTS = ROOT / "bench/results", ROOT / "README.md", ROOT / "docs/plots"
BEGIN = "<!-- measured: begin, written by `python -m bench report` -->"
END = "<!-- measured: end -->"
NOT_MEASURED = "not measured"
BUSY = 0.5  # the load from which a result says so
SHOWN = {  # the plots in the README, and what is to be seen there
    "loop-64-greedy-requests-2-drafts-random-model-v-16384": "tokens a second left with logprobs",
    "loop-host-64-greedy-requests-2-drafts-tiny-model-v-264": "host time of a step, by part",
    "kernels-against-vocabulary": "time of the logprobs against the vocabulary",
    "host-against-requests": "bytes to records against the batch",
    "message-bytes": "bytes of a step against K",
    "ring-16-kb-5-ms-between-messages": "latency of a message, one every 5 ms",
}


@dataclass(frozen=True)
class Row:
    """One line of the table: what it is, what it is beside, and how to read it from results."""

    what: str
    beside: str
    title: str  # a pattern of the comparison's title
    value: Callable[[Comparison], str]
    device: bool = True  # whether a GPU would change it


def faster(peer: str, *ours: str) -> Callable[[Comparison], str]:
    """How many times the speed of `peer`, of the first of `ours` that is there."""

    def value(one: Comparison) -> str:
        name = next(name for name in ours if name in one.names)
        return f"{_two_digits(one.speedup(name, peer))}x the speed, {readable(one[name].median)}"

    return value


def share(name: str) -> Callable[[Comparison], str]:
    """The tokens a second that are left, in brackets the rounds' middle half; what a step adds."""

    def value(one: Comparison) -> str:
        figures = one.figures[name]
        low, high = (f"{100 * share:.0f}" for share in middle_half(one.kept(name)))
        return (
            f"{figures['% of tokens/s']:.0f} % ({low} to {high}), "
            f"{figures['adds us']:+,.0f} us a step"
        )

    return value


def figure(name: str, key: str, unit: str) -> Callable[[Comparison], str]:
    return lambda one: f"{one.figures[name][key]:,.0f} {unit}"


KERNEL = r"topk_logprobs R=64 V=131072 K={} float32$"
RECORDS = r"^bytes to records: 256 .* K = 20$"
LOOP = r"^decoding 64 greedy .*(tiny model|1B)"
WIDE = r"^decoding 64 greedy .*(random model|1B)"
SAMPLED = r"^decoding 64 sampled .*(random model|1B)"
PLAIN = "`log_softmax` + `top_k` + gather + count"
ROWS = (
    Row("logprobs of 64 x 131072 logits, K = 0", PLAIN, KERNEL.format(0),
        faster("log_softmax + top_k", "mosaic_gpu", "xla")),
    Row("the same, K = 20", PLAIN, KERNEL.format(20),
        faster("log_softmax + top_k", "mosaic_gpu", "xla")),
    Row("16 KB to another process, every 5 ms", "ZeroMQ and msgpack", r"^16 KB, 5 ms",
        faster("ZeroMQ msgpack", "ring"), device=False),
    Row("the same, one after the other", "`multiprocessing.Queue`", r"^16 KB, hot",
        faster("multiprocessing.Queue", "ring"), device=False),
    Row("530 KB, one after the other", "ZeroMQ, `copy=False`", r"^530 KB, hot",
        faster("ZeroMQ copy=False", "ring"), device=False),
    Row("bytes to records, 256 requests x 3 tokens, K = 20", "lists a token",
        RECORDS, faster("lists a token", "columns (ours)"), device=False),
    Row("the same", "objects in dictionaries", RECORDS,
        faster("objects in dicts", "columns (ours)"), device=False),
    *(Row(f"tokens/s of the whole loop, {name}", "the loop without logprobs", LOOP, share(name))
      for name in ("K = 0", "K = 5", "K = 20", "K = 20 and draft logprobs", "K = 20 for 1 of 64")),
    *(Row(f"tokens/s, large vocabulary, {name}", "the loop without logprobs", WIDE, share(name))
      for name in ("K = 20", "K = 20, naive kernel", "K = 20, objects in dicts",
                   "K = 20, the usual way")),
    Row("tokens/s, large vocabulary, sampled, K = 20 processed", "the loop without logprobs",
        SAMPLED, share("K = 20, processed")),
    Row("strings and bytes of a step's ids, 64 requests, K = 20", "`tokenizers`, `decode` each",
        r"^ids to strings and bytes: 64 .* K = 20$",
        faster("tokenizers, decode each", "table an id (ours)"), device=False),
    Row("importing the engine's side", "numpy and jax", r"^importing, in a fresh process$",
        faster("numpy and jax", "numpy and the engine side"), device=False),
    Row("device array to records, 64 requests, K = 20", "at most 500 us", LOOP,
        figure("K = 20", "host us", "us")),
    Row("bytes of a step, 64 requests, K = 20", "530,456 in a fixed struct", LOOP,
        figure("K = 20", "bytes", "bytes")),
)  # fmt: skip


def load(directory: Path) -> list[Results]:
    """All results there, the oldest first.

    Raises:
      ResultsError: a JSON file there holds none.
    """
    found = [read_json(path) for path in sorted(directory.glob("*.json"))]
    return sorted(found, key=lambda results: results.date)


def on_gpu(one: Comparison) -> bool:
    device = str(one.settings.get("device", "cpu")).lower()
    return device != "cpu" and one.settings.get("clock", "device") == "device"


def newest(results: Iterable[Results], gpu: bool) -> dict[str, tuple[Comparison, Results]]:
    """The newest comparison of each title on a CPU or a GPU."""
    found = {}
    for one in results:
        for comparison in one.comparisons:
            if on_gpu(comparison) == gpu:
                found[comparison.title] = (comparison, one)
    return found


def render(results: Sequence[Results], images: Sequence[str]) -> str:
    """The README's part, without its markers.

    Args:
      results: the oldest first.
      images: the plots that there are, by name.
    """
    cpu, gpu = newest(results, gpu=False), newest(results, gpu=True)
    lines = [
        "",
        "| What | Beside | Two CPU cores | GPU |",
        "| --- | --- | --- | --- |",
    ]
    used: dict[str, Results] = {}
    for row in ROWS:
        cells = []
        for there in (cpu, gpu):
            text = NOT_MEASURED if row.device or there is cpu else "-"
            for title, (comparison, source) in there.items():
                if re.search(row.title, title) and (value := _value(row, comparison)):
                    text = value
                    used[source.path.name] = source
            cells.append(text)
        lines.append(f"| {row.what} | {row.beside} | {' | '.join(cells)} |")
    lines += ["", *_targets({**cpu, **{f"gpu {title}": one for title, one in gpu.items()}}), ""]
    lines += [_source(source) for _, source in sorted(used.items())]
    shown = [(name, text) for name, text in SHOWN.items() if f"{name}.svg" in images]
    if shown:
        lines += ["All plots are in [docs/plots](docs/plots).", ""]
    lines += [f"![{text}](docs/plots/{name}.svg)" for name, text in shown]
    return "\n".join(lines) + "\n\n"


def _value(row: Row, comparison: Comparison) -> str | None:
    """What the row says of a comparison; None where that did not measure it."""
    try:
        return row.value(comparison)
    except (KeyError, StopIteration):
        return None


def _targets(found: dict[str, tuple[Comparison, Results]]) -> list[str]:
    """Which of the limits that the benchmarks state were held, by where they belong."""
    verdicts: dict[str, str] = {}
    for comparison, _ in found.values():
        for target in comparison.targets:
            name = f"{comparison.title}: {target.what}"
            verdicts[name] = target.verdict if target.measured is None else str(target)
    if not verdicts:
        return []
    held = [name for name, text in verdicts.items() if ", held" in text]
    missed = [name for name, text in verdicts.items() if "MISSED" in text]
    unknown = [name for name, text in verdicts.items() if text == NOT_MEASURED]
    lines = [
        f"Of the {len(verdicts)} limits that the benchmarks state, {len(held)} were held, "
        f"{len(missed)} missed and {len(unknown)} not measured."
    ]
    if missed:
        lines.append("Missed:")
        lines.append("")
        for comparison, _ in found.values():
            lines += [
                f"- {comparison.title}: {target}"
                for target in comparison.targets
                if target.verdict == "MISSED"
            ]
    return lines


def _source(results: Results) -> str:
    machine = results.environment
    versions = machine.get("versions", {})
    load = machine.get("load before", 0.0)
    busy = f", on a machine that was busy (load {load})" if load > BUSY else ""
    return (
        f"[{results.path.name}](bench/results/{results.path.name}): {results.date[:10]}, "
        f"{machine['cpus']} cores of {machine.get('processor', 'an unknown processor')}, "
        f"Python {machine.get('python', '?')}, jax {versions.get('jax', '?')}, "
        f"`{machine.get('command', '?')}`{busy}.  "
    )


def _two_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 20 else f"{value:.1f}"


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
    return sorted(path.name for path in directory.glob("*.svg"))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if it differs")
    options = parser.parse_args(arguments)
    results = load(RESULTS)
    if not options.check:
        outputs.check_plots(PLOTS)
        draw(results, PLOTS)
    before = README.read_text()
    after = insert(before, render(results, images_in(PLOTS)))
    if options.check:
        print("README.md is up to date" if after == before else "README.md is out of date")
        return 0 if after == before else 1
    README.write_text(after)
    print(f"wrote {README} and {len(images_in(PLOTS))} plots in {PLOTS}")
    return 0


def draw(results: Sequence[Results], directory: Path) -> list[Path]:
    """The plots of the newest results, those of a GPU in a folder of their own."""
    from bench.report import plots  # matplotlib: `--check` does not need it

    for path in directory.rglob("*.svg"):
        path.unlink()
    cpu = [one for one, _ in newest(results, gpu=False).values()]
    gpu = [one for one, _ in newest(results, gpu=True).values()]
    return plots.draw(cpu, directory) + plots.draw(gpu, directory / "gpu")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
