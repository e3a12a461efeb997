"""What got slower between two runs, by ratios only: `python -m bench compare OLD NEW`.

Two runs happen on machines of different speed, or on one whose speed drifts. What can be compared
is the ratio of this project's time to a peer's, measured in turn in one run. A contender is slower
when the median of its ratios over its peers has grown by more than the tolerance.

In the whole loop the only peer is the loop without logprobs. Its other rows replace one part each
and share all the rest with this project: a slower rest would slow them too and hide itself.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.report.comparison import PEERS, Comparison
from bench.report.files import Results, ResultsError, read_json

TOLERANCE = 0.25


@dataclass(frozen=True)
class Change:
    """One of this project's contenders in both runs."""

    title: str
    name: str
    peers: tuple[str, ...]
    factor: float  # new ratio over old, the median over the peers; above 1 is slower


def key(one: Comparison) -> tuple[str, str]:
    """What must be the same in both runs: the title, and the device where there is one.

    The same ratio of another device, a GPU's instead of a CPU's, is another thing.
    """
    return one.title, str(one.settings.get("device", ""))


def peers_of(one: Comparison) -> tuple[str, ...]:
    """The contenders that do not share what a slowdown would be in."""
    if one.suite == "end-to-end":
        return one.names[:1]
    return tuple(name for name in one.names if name in PEERS)


def changes(old: Sequence[Comparison], new: Sequence[Comparison]) -> list[Change]:
    """Every contender of this project that both runs measured beside at least one common peer."""
    before = {key(one): one for one in old}
    found = []
    for now in new:
        then = before.get(key(now))
        if then is None:
            continue
        common = [name for name in now.names if name in then.names]
        peers = tuple(name for name in peers_of(now) if name in peers_of(then))
        for name in common:
            if name in PEERS or not peers:
                continue
            factors = [now.speedup(p, name) / then.speedup(p, name) for p in peers]
            found.append(Change(now.title, name, peers, statistics.median(factors)))
    return found


def gone(old: Sequence[Comparison], new: Sequence[Comparison]) -> list[tuple[str, str]]:
    """This project's contenders that the new run left out of a comparison that it made."""
    after = {key(one): one.names for one in new}
    return [
        (one.title, name)
        for one in old
        for name in one.names
        if key(one) in after and name not in PEERS and name not in after[key(one)]
    ]


def main(arguments: list[str]) -> int:
    """Exit status 0: nothing slower; 1: something is; 2: the files cannot be compared."""
    parser = argparse.ArgumentParser(
        prog="python -m bench compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("old", type=Path, metavar="OLD", help="results of an earlier run")
    parser.add_argument("new", type=Path, metavar="NEW", help="results of a later one")
    parser.add_argument(
        "--tolerance", type=_tolerance, default=TOLERANCE, help=f"default {TOLERANCE}: 25 %% slower"
    )
    options = parser.parse_args(arguments)
    try:
        old, new = read_json(options.old), read_json(options.new)
    except ResultsError as error:
        print(error, file=sys.stderr)
        return 2
    found = changes(old.comparisons, new.comparisons)
    if not found:
        print(
            "nothing to compare: the files share no comparison of one device with a common peer",
            file=sys.stderr,
        )
        return 2
    slower = [one for one in found if one.factor > 1 + options.tolerance]
    _print(found, slower, old, new)
    return 1 if slower else 0


def _tolerance(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:  # of nan, nothing would be slower
        raise argparse.ArgumentTypeError(f"{text} is no share of a time: 0.25 is 25 % slower")
    return value


def _print(found: list[Change], slower: list[Change], old: Results, new: Results) -> None:
    console = Console()
    for label, results in (("old", old), ("new", new)):
        machine = results.environment
        console.print(
            f"{label}: {results.path}, {results.date}, {machine['cpus']} x "
            f"{machine.get('processor', 'unknown')}",
            highlight=False,
        )
    table = Table()
    for column in ("comparison", "contender", "peers", "time over peers', new / old", ""):
        table.add_column(column)
    for one in sorted(found, key=lambda change: -change.factor):
        verdict = "SLOWER" if one in slower else ""
        table.add_row(one.title, one.name, str(len(one.peers)), f"{one.factor:.2f}", verdict)
    console.print(table)
    single = {*map(key, old.comparisons)} ^ {*map(key, new.comparisons)}
    if single:
        console.print(f"{len(single)} comparisons are in one file only and were left out")
    for title, name in gone(old.comparisons, new.comparisons):
        console.print(f"no longer measured: {name} in {title!r}")
    console.print(f"{len(slower)} of {len(found)} got slower")
