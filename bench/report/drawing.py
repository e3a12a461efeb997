"""The look of every plot: few colors, units, and labels beside the lines.

The colors are those of Okabe and Ito (https://jfly.uni-koeln.de/color/), which color-blind readers
can tell apart. This project is blue; the others differ by marker as well. The same figures and the
same matplotlib make the same files, byte for byte.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator

from bench.report.comparison import PEERS

OURS = "#0072B2"
OTHERS = ("#D55E00", "#666666", "#CC79A7", "#E69F00", "#009E73", "#56B4E9", "#000000")
MARKERS = ("s", "^", "D", "v", "P", "X", "*")
NARROW = 100  # a range below this factor gets ticks between whole decades
GRID = "#DDDDDD"
STYLE: Any = {
    "font.size": 9,
    "font.family": "sans-serif",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.axisbelow": True,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: small files, and it can be searched
    "svg.hashsalt": "jax-specdec",
    "figure.facecolor": "white",
}
Points = Sequence[tuple[float, float]]


def style() -> AbstractContextManager[None]:
    """The context in which plots are drawn and saved."""
    return mpl.rc_context(STYLE)


def new(title: str, size: tuple[float, float] = (6.4, 3.4)) -> tuple[Figure, Any]:
    """A figure with one pair of axes and a title above them."""
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left", wrap=True)
    axes.grid(color=GRID, linewidth=0.6)
    axes.tick_params(length=0, which="both")
    return figure, axes


def save(figure: Figure, path: Path) -> Path:
    """Write the figure; the suffix chooses the format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None} if path.suffix == ".svg" else {}
    figure.savefig(path, metadata=metadata, dpi=110)
    if path.suffix == ".svg":  # blanks at the ends of lines would be noise in a diff
        lines = path.read_text().splitlines()
        path.write_text("\n".join(line.rstrip() for line in lines) + "\n")
    return path


def looks(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Color, marker and width of each contender; this project's stand out."""
    found: dict[str, dict[str, Any]] = {}
    peers = [name for name in names if name in PEERS]
    mine = [name for name in names if name not in PEERS]
    for index, name in enumerate(mine):
        dash = ("-", "--", ":", "-.")[index % 4]
        found[name] = {"color": OURS, "marker": "o", "linewidth": 2.4, "linestyle": dash}
    for index, name in enumerate(peers):
        color, marker = OTHERS[index % len(OTHERS)], MARKERS[index % len(MARKERS)]
        found[name] = {"color": color, "marker": marker, "linewidth": 1.4, "linestyle": "-"}
    return found


def lines(axes: Any, series: Mapping[str, Points], shown: Mapping[str, str] | None = None) -> None:
    """Draw a line for each contender, with its name at the right end; names do not overlap."""
    styles = looks(list(series))
    ends = []
    for name, points in series.items():
        x, y = zip(*sorted(points), strict=True)
        axes.plot(x, y, markersize=4.5, **styles[name])
        ends.append((y[-1], x[-1], (shown or {}).get(name, name), styles[name]["color"]))
    least, most = axes.get_ylim()
    if axes.get_yscale() == "log" and most / least < NARROW:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.figure.draw_without_rendering()  # the axes must know their limits
    _labels(axes, ends)


def _labels(axes: Any, ends: list[tuple[float, float, str, str]]) -> None:
    """Write names at the right edge, each as near to its line's height as there is room."""
    transform, inverse = axes.transData.transform, axes.transAxes.inverted().transform
    heights = [inverse(transform((x, y)))[1] for y, x, _, _ in ends]
    order = sorted(range(len(ends)), key=lambda i: heights[i])
    gap = 12 / 72 / (axes.get_position().height * axes.figure.get_figheight())  # 12 points a line
    placed: dict[int, float] = {}
    for i in order:  # from below: at its own height, or above the name before
        placed[i] = max([heights[i], *(place + gap for place in placed.values())])
    room = 1.0
    for i in reversed(order):  # from above: not beyond the top
        placed[i] = min(placed[i], room)
        room = placed[i] - gap
    for i in order:
        axes.annotate(
            ends[i][2],
            xy=(1.0, heights[i]),
            xytext=(1.03, placed[i]),
            xycoords="axes fraction",
            textcoords="axes fraction",
            va="center",
            color=ends[i][3],
            fontweight="bold" if ends[i][3] == OURS else "normal",
        )


def names_at_left(axes: Any, names: Sequence[str]) -> None:
    """Name the rows of a horizontal plot, the first on top, this project's in blue."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    for label, name in zip(axes.get_yticklabels(), names, strict=True):
        if name not in PEERS:
            label.set_color(OURS)
            label.set_fontweight("bold")


def stacked(title: str, size: tuple[float, float]) -> tuple[Figure, Any]:
    """A figure with two pairs of axes, one above the other."""
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")
    both = figure.subplots(2, 1)
    for axes in both:
        axes.grid(axis="x", color=GRID, linewidth=0.6)
        axes.tick_params(length=0, which="both")
    return figure, both


def patch(color: str, name: str) -> Patch:
    """An entry of a legend."""
    return Patch(color=color, label=name)
