"""What became slower between two runs, by ratios only: `python -m bench compare OLD NEW`.

Two runs use machines of different speed, or one whose speed drifts. Comparable are ratios of this
project's time to a peer's, measured in turn in one run. A contender is slower if the median of its
ratios over its peers has grown by more than the tolerance.

In the whole loop the only peer is the loop without logprobs. Each other row replaces one part and
shares all the rest with this project: a slower rest would slow it too, and so hide itself.
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
    """What must agree in both runs: the title, and the device if there is one.

    A GPU's ratio is not comparable with a CPU's.
    """
    return one.title, str(one.settings.get("device", ""))


def peers_of(one: Comparison) -> tuple[str, ...]:
    """The contenders that a slowdown of this project would not slow."""
    if one.suite == "end-to-end":
        return one.names[:1]
    return tuple(name for name in one.names if name in PEERS)


def changes(old: Sequence[Comparison], new: Sequence[Comparison]) -> list[Change]:
    """The change of every contender that both runs measured beside a common peer."""
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
    """This project's contenders that the new run omits from a comparison of both runs."""
    after = {key(one): one.names for one in new}
    return [
        (one.title, name)
        for one in old
        for name in one.names
        if key(one) in after and name not in PEERS and name not in after[key(one)]
    ]


def main(arguments: list[str]) -> int:
    """Exit status 0: nothing is slower; 1: something is; 2: the files cannot be compared."""
    parser = argparse.ArgumentParser(
        prog="python -m bench compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("old", type=Path, metavar="OLD", help="results of an earlier run")
    parser.add_argument("new", type=Path, metavar="NEW", help="results of a later one")
    parser.add_argument(
        "--tolerance", type=_tolerance, default=TOLERANCE, metavar="SHARE",
        help=f"how much slower is still equal; default {TOLERANCE}, which is 25 %%",
    )  # fmt: skip
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
    if not 0 <= value < math.inf:  # nan would find nothing slower
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
