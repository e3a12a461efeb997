"""`python -m bench`: measure, and make one table of the kept results.

python -m bench [kernels|ring|host|end-to-end ...] [--quick] [--json FILE]
python -m bench readme              the suites of README's rows: many minutes
python -m bench report [--check]    docs/measurements.md and its pictures, from bench/results

Beside FILE each suite gets a picture, FILE-SUITE.svg.
A run ends with README's rows: its ratios, this run's, and whether they hold. The exit status is 1
where a limit is missed.
"""

import argparse
import importlib
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from bench import files, pictures, readme, report
from bench.files import ResultsError
from bench.timing import BenchError, Comparison, print_table

SUITES = {
    "kernels": "top-K logprobs of logits on a CPU, against two other ways (100 shapes: minutes)",
    "ring": "one message from process to process, against other transports",
    "host": "message bytes to records, against per-token lists and objects",
    "end-to-end": "the whole decoding loop, with and without logprobs",
}
MORE = {
    "sampling": "verification and drawing of sampled rows, against their logprobs alone",
    "real": "SmolLM2-135M-Instruct: its start, the cost of logprobs and of sampling (minutes)",
    "drafts": "tokens/s with drafters over those without; --model DIR",
    "widths": "the constants by which a step's drafts are chosen, halved and doubled: simulated",
    "block": "tokens a step where drafts are accepted together, over one by one (minutes)",
    "distill": "divergences from a teacher's support, beside whole logits (minutes)",
    "rungs": "what a batch pays for what others may ask of an engine (minutes)",
    "same-bits": "what rows in tiles cost a step of SmolLM2-135M-Instruct, and scoring (minutes)",
    "server": "requests to the server over kept and new connections",
    "load": "64 streams and 512 short requests to the server, beside the engine alone",
    "peers": "functions of trainers and engines that run on JAX, against the adapters' (minutes)",
}
MODULES = {
    "end-to-end": "loop.suite", "peers": "peers.suite", "ring": "ring.suite",
    "same-bits": "same_bits",
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0, or 1: not measured, or a limit missed; 2: cannot be done; 130: interrupted."""
    given = sys.argv[1:] if arguments is None else arguments
    # As Ctrl-C does, so that processes and rings are removed.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if given[:1] == ["report"]:
            return report.main(given[1:])
        return run(given)
    except BenchError as error:
        print(f"NOT MEASURED: {error}", file=sys.stderr)
        return 1
    except ResultsError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


def run(given: list[str]) -> int:
    """Measure the suites named in `given`, print their tables, write what was asked for."""
    options = _parsed(given)
    asked = options.suites or [*SUITES]
    suites = list(dict.fromkeys(readme.suites() if asked == ["readme"] else asked))
    if options.json:
        _check(options.json.parent)
    machine = files.environment()  # before the benchmarks load the machine
    comparisons: list[Comparison] = []
    for place, name in enumerate(suites, 1):
        print(f"suite {place} of {len(suites)}: {name}", file=sys.stderr, flush=True)
        module = importlib.import_module(f"bench.{MODULES.get(name, name)}")
        more = {"model": options.model} if name == "drafts" else {}
        for comparison in module.run(quick=options.quick, **more):
            comparisons.append(replace(comparison, suite=name))
            print_table(comparisons[-1:])
    if options.json:
        files.write_json(options.json, comparisons, machine)
        print(f"wrote {options.json}")
        print("\n".join(_drawn(options.json, comparisons)))
    kept = {title: comparison for title, (comparison, _) in report.newest(report.kept()).items()}
    print("\n".join(readme.closing_lines(comparisons, kept, machine)))
    verdicts = [target.verdict for comparison in comparisons for target in comparison.targets]
    return 1 if "MISSED" in verdicts else 0


def _parsed(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "suites",
        nargs="*",
        metavar="SUITE",
        help="; ".join(f"{name}: {what}" for name, what in SUITES.items())
        + " (default: these). By name only: "
        + "; ".join(f"{name}: {what}" for name, what in MORE.items()),
    )
    parser.add_argument("--quick", action="store_true", help="few sizes, a minute in all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE")
    parser.add_argument("--model", type=Path, metavar="DIR", help="of drafts: a checkpoint")
    options = parser.parse_args(given)
    if options.model and options.suites != ["drafts"]:
        parser.error("--model is an option of the suite drafts: name it alone")
    unknown = [name for name in options.suites if name not in SUITES | MORE]
    if unknown and options.suites != ["readme"]:
        names = ", ".join((*SUITES, *MORE, "readme", "report"))
        parser.error(f"unknown suite or command {unknown[0]!r}: choose from {names}")
    return options


def _drawn(results: Path, comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Draw the picture of each suite beside the results; what to say of each."""
    for suite in dict.fromkeys(comparison.suite for comparison in comparisons):
        picture = results.with_name(f"{results.stem}-{suite}.svg")
        parts = [comparison for comparison in comparisons if comparison.suite == suite]
        try:
            if pictures.draw(picture, suite, parts):
                yield f"wrote {picture}"
            else:
                yield f"NOT DRAWN: {suite} has no time"
        except ImportError:
            yield f"NOT DRAWN: {pictures.MISSING}"


def _check(folder: Path) -> None:
    """Raises ResultsError where the results could not be written, before minutes of measuring."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ResultsError(f"cannot write to {folder}: {error.strerror}; name another") from error


if __name__ == "__main__":
    sys.exit(main())
