"""What a picture of a suite shows: times over K, rows, vocabulary or bytes, or bars side by side.

Each panel holds numbers alone; `bench.pictures` draws them.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from bench.comparison import PEERS, Comparison

AXES = {  # a parameter of comparisons, and how a panel names it
    "k": "K",
    "rows": "rows",
    "requests": "requests",
    "vocabulary": "vocabulary",
    "bytes": "bytes",
}
# Of several sets of comparisons as long as each other, the one nearest to these is shown.
USUAL = {
    "k": 20, "rows": 64, "vocabulary": 151936, "dtype": "float32", "kind": "top-p 0.9",
    "hidden": 1024, "requests": 256, "flat": False, "busy loops": 0, "gap_s": 0.0001,
}  # fmt: skip
PARAMETERS = (*AXES, "dtype", "kind", "hidden", "tokens", "flat", "busy loops", "gap_s")
MOST_BARS = 6  # panels of bars in a picture
ENOUGH = 0.6  # of the times of the longest set, where a set is nearer to the usual values
MOST_RATIOS = 24  # lines of ratios in a picture

Parameter = float | str | bool
Key = tuple[str, tuple[tuple[str, Parameter], ...]]  # a function and its parameters


class Point(NamedTuple):
    """A time at one place of an axis.

    Attributes:
      at: the parameter's value.
      median, low, high: seconds.
    """

    at: float
    median: float
    low: float
    high: float


class Curves(NamedTuple):
    """Times of contenders over one parameter, all others the same.

    Attributes:
      title: the others' values.
      axis: the parameter's name.
      lines: by contender, its points in order.
    """

    title: str
    axis: str
    lines: Mapping[str, tuple[Point, ...]]


class Bars(NamedTuple):
    """Times of the contenders of one comparison.

    Attributes:
      title: the comparison's.
      points: by contender, its time; `at` is its place.
    """

    title: str
    points: Mapping[str, Point]


class Ratios(NamedTuple):
    """Others' times over ours, a line for each function that was compared.

    Attributes:
      title: what is shown.
      lines: by function, the number of rows and the ratio of each comparison.
    """

    title: str
    lines: Mapping[str, tuple[tuple[float, float], ...]]


Panel = Curves | Bars | Ratios


def panels_of(comparisons: Sequence[Comparison]) -> list[Panel]:
    """The panels of a suite: curves where a parameter has two values, else bars or ratios."""
    timed = [comparison for comparison in comparisons if comparison.timings]
    functions = {function_of(comparison) for comparison in timed}
    pairs = all(len(comparison.timings) == 2 for comparison in timed)
    if pairs and len(functions) > 3 and all("rows" in parameters_of(each) for each in timed):
        return [_ratios(timed)]
    by_axis = [curves for axis in AXES if (curves := _curves(timed, axis))]
    shown = by_axis[0][:2] if len(by_axis) == 1 else [curves[0] for curves in by_axis]
    return [*shown] or [_bars(comparison) for comparison in timed[-MOST_BARS:]]


def parameters_of(comparison: Comparison) -> dict[str, Parameter]:
    """What was measured, by name: of its settings, or of the shape that they hold as text."""
    settings = dict(comparison.settings)
    for name, word, number in re.findall(r"(\w+)=(?:'(\w+)'|(\d+))", str(settings.get("shape"))):
        settings[name] = word or int(number)
    if "rows" in settings:
        settings.pop("bytes", None)  # they follow from the others
    return {name: settings[name] for name in PARAMETERS if name in settings}


def function_of(comparison: Comparison) -> str:
    """The part of a title that says no number of what was measured."""
    before, _, _ = re.split(r"( [RN]=|: )", comparison.title + " R=", maxsplit=1)
    return comparison.title.rpartition(", ")[2] if before == comparison.title else before


def _curves(comparisons: Sequence[Comparison], axis: str) -> list[Curves]:
    """The longest sets of comparisons that differ in one parameter alone, the usual one first."""
    sets: dict[Key, dict[float, Comparison]] = defaultdict(dict)
    for comparison in comparisons:
        parameters = parameters_of(comparison)
        if axis in parameters:
            others = tuple((name, parameters[name]) for name in parameters if name != axis)
            sets[function_of(comparison), others][float(parameters[axis])] = comparison
    times = {
        key: sum(len(comparison.timings) for comparison in by_place.values())
        for key, by_place in sets.items()
        if len(by_place) > 1
    }
    most = max(times.values(), default=0)
    keys = [key for key in times if times[key] >= ENOUGH * most]
    keys.sort(key=lambda key: (_usual(key), times[key]), reverse=True)
    return [_curve(key, axis, sets[key]) for key in keys]


def _curve(key: Key, axis: str, by_place: Mapping[float, Comparison]) -> Curves:
    lines: dict[str, list[Point]] = defaultdict(list)
    for at, comparison in sorted(by_place.items()):
        for timing in comparison.timings:
            lines[timing.name].append(Point(at, timing.median, timing.low, timing.high))
    title = ", ".join(text for name, value in key[1] if (text := _named(name, value)))
    return Curves(title, axis, {name: tuple(points) for name, points in lines.items()})


def _usual(key: Key) -> int:
    """How many of a set's parameters have their usual values."""
    return sum(pair in USUAL.items() for pair in key[1])


def _named(name: str, value: Parameter) -> str:
    letters = {"k": "K", "rows": "R", "vocabulary": "V", "hidden": "H"}
    if name in ("dtype", "kind"):
        return str(value)
    if name == "gap_s":
        return f"{float(value) * 1e3:g} ms between messages"
    if name == "busy loops" and not value:
        return ""
    if name == "flat":
        return "flat" if value else "real-like"
    return f"{letters[name]} = {value}" if name in letters else f"{value} {name}"


def _bars(comparison: Comparison) -> Bars:
    return Bars(comparison.title, {
        timing.name: Point(place, timing.median, timing.low, timing.high)
        for place, timing in enumerate(comparison.timings)
    })  # fmt: skip


def _ratios(comparisons: Sequence[Comparison]) -> Ratios:
    """At the largest vocabulary and, of several, the usual K of each function."""
    lines: dict[str, dict[float, tuple[Parameter, Parameter, float]]] = defaultdict(dict)
    for comparison in comparisons:
        others = [timing for timing in comparison.timings if timing.name in PEERS]
        ours = [timing for timing in comparison.timings if timing.name not in PEERS]
        parameters = parameters_of(comparison)
        if others and ours:
            place = (float(parameters["vocabulary"]), float(parameters["k"]))
            line = lines[function_of(comparison)]
            at = float(parameters["rows"])
            if place >= line.get(at, (0.0, 0.0, 0.0))[:2]:
                line[at] = (*place, others[0].median / ours[0].median)
    return Ratios("time over ours", {
        name: tuple((at, ratio) for at, (*_, ratio) in sorted(line.items()))
        for name, line in [*lines.items()][:MOST_RATIOS]
    })  # fmt: skip


def numbers_of(panels: Sequence[Panel]) -> Iterator[str]:
    """Every number that a picture shows, as text: two pictures with the same ones are the same."""
    for panel in panels:
        yield repr(panel)
