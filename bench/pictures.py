"""Pictures of results: one a suite, as SVG, with what it was drawn from beside its title.

The numbers' digest stands in the file, so that whether a picture is up to date can be told without
drawing it again: another matplotlib draws other bytes.
"""

import hashlib
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.comparison import PEERS, Comparison
from bench.panels import AXES, Bars, Curves, Panel, Ratios, numbers_of, panels_of
from bench.timing import number_of, readable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Color-blind safe (Okabe and Ito), and dark enough for a white page.
OURS = ("#0072b2", "#009e73", "#004c77", "#56b4e9")
OTHERS = ("#d55e00", "#a0522d", "#cc79a7", "#7f7f7f", "#b8860b", "#5f3dc4", "#333333", "#e69f00")
WIDTH, HEIGHT = 4.1, 2.9  # inches of a panel; two stand side by side
LEGEND_COLUMNS = 4
MOST_SPREADS = 6  # lines of a panel whose quartiles are drawn
MISSING = "matplotlib is not installed: pip install matplotlib"


def digest_of(panels: Sequence[Panel]) -> str:
    """Of every number that a picture shows."""
    return hashlib.sha256("\n".join(numbers_of(panels)).encode()).hexdigest()[:16]


def is_drawn(path: Path, comparisons: Sequence[Comparison]) -> bool:
    """Whether a file is the picture of these results."""
    digest = digest_of(panels_of(comparisons))
    return path.is_file() and f"results {digest}" in path.read_text("utf-8")


def draw(path: Path, suite: str, comparisons: Sequence[Comparison]) -> bool:
    """Write the picture of a suite's results; False if there is nothing to draw.

    Raises:
      ImportError: matplotlib is not installed.
    """
    import matplotlib
    from matplotlib.figure import Figure

    panels = panels_of(comparisons)
    if not panels:
        return False
    columns = 1 if isinstance(panels[0], Ratios) else min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    with matplotlib.rc_context({
        "svg.fonttype": "none", "svg.hashsalt": suite, "font.size": 10, "axes.spines.top": False,
        "axes.spines.right": False, "font.family": "sans-serif",
    }):  # fmt: skip
        tallest = [
            max(_height(panel) for panel in panels[row * columns : (row + 1) * columns])
            for row in range(rows)
        ]
        lines = [name for panel in panels if isinstance(panel, Curves) for name in panel.lines]
        colors = _colors([*dict.fromkeys(lines)])
        legend = 0.25 * math.ceil(len(colors) / LEGEND_COLUMNS)
        size = 2 * WIDTH, sum(tallest) + legend
        figure = Figure(figsize=size, layout="constrained")
        places = figure.subplots(rows, columns, squeeze=False, height_ratios=tallest).flat
        for panel, axes in zip(panels, places, strict=False):
            _draw(panel, axes, colors)
        for axes in figure.axes[len(panels) :]:
            axes.remove()
        if colors:
            known = dict(
                pair
                for axes in figure.axes
                for pair in zip(*reversed(axes.get_legend_handles_labels()), strict=True)
            )
            figure.legend(
                known.values(), known, loc="outside lower center", ncols=LEGEND_COLUMNS,
                fontsize=8, frameon=False,
            )  # fmt: skip
        figure.savefig(
            path, format="svg", facecolor="white",
            metadata={"Date": None, "Description": f"results {digest_of(panels)}"},
        )  # fmt: skip
    # Trailing blanks and the machine's version of matplotlib would make needless differences.
    text = re.sub(r"[ \t]+$", "", path.read_text("utf-8"), flags=re.MULTILINE)
    path.write_text(re.sub(r"Matplotlib v[\d.]+[^<]*", "Matplotlib", text), "utf-8")
    return True


def _height(panel: Panel) -> float:
    """Inches."""
    if isinstance(panel, Ratios):
        return 1.2 + 0.3 * len(panel.lines)
    return 0.8 + 0.28 * len(panel.points) if isinstance(panel, Bars) else HEIGHT


def _draw(panel: Panel, axes: "Axes", colors: Mapping[str, str]) -> None:
    if isinstance(panel, Curves):
        _draw_curves(panel, axes, colors)
    elif isinstance(panel, Bars):
        _draw_bars(panel, axes)
    else:
        _draw_ratios(panel, axes)


def _colors(names: Sequence[str]) -> dict[str, str]:
    ours = [name for name in names if name not in PEERS]
    others = [name for name in names if name in PEERS]
    return {name: OURS[place % len(OURS)] for place, name in enumerate(ours)} | {
        name: OTHERS[place % len(OTHERS)] for place, name in enumerate(others)
    }


def _draw_curves(panel: Curves, axes: "Axes", colors: Mapping[str, str]) -> None:
    from matplotlib.ticker import LogLocator

    places = sorted({point.at for points in panel.lines.values() for point in points})
    linear = places[0] <= 0 or panel.axis == "k"  # K = 0 has no logarithm
    at = {place: index if linear else place for index, place in enumerate(places)}
    for name, points in panel.lines.items():
        color = colors[name]
        across = [at[point.at] for point in points]
        axes.plot(
            across, [point.median for point in points], color=color, label=name, marker="o",
            markersize=4, linewidth=2.4 if name not in PEERS else 1.3,
        )  # fmt: skip
        if len(panel.lines) <= MOST_SPREADS:
            lows, highs = [point.low for point in points], [point.high for point in points]
            axes.fill_between(across, lows, highs, color=color, alpha=0.15, linewidth=0)
    axes.set_xscale("linear" if linear else "log")
    axes.set_yscale("log")
    seconds = [point.median for points in panel.lines.values() for point in points]
    if max(seconds) < 50 * min(seconds):  # powers of ten alone would be one or two
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    apart = [place for place in places if linear or place == places[-1] or all(
        not 1 < other / place < 1.5 for other in places
    )]  # fmt: skip
    axes.set_xticks([at[place] for place in apart], [f"{place:,.0f}" for place in apart])
    axes.set_xticks([], minor=True)
    axes.set_xlabel(AXES[panel.axis])
    axes.yaxis.set_major_formatter(lambda seconds, _: readable(seconds))
    axes.yaxis.set_minor_formatter(lambda *_: "")
    axes.set_title(panel.title, fontsize=9)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)


def _draw_bars(panel: Bars, axes: "Axes") -> None:
    names = [*panel.points]
    colors = _colors(names)
    for place, name in enumerate(names):
        point = panel.points[name]
        axes.barh(place, point.median, color=colors[name], height=0.7)
        axes.plot([point.low, point.high], [place, place], color="#222222", linewidth=1.2)
        end, text = max(point.median, point.high), f" {readable(point.median)}"
        axes.text(end, place, text, va="center", fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, 1.3 * max(point.high for point in panel.points.values()))
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    across = max(24, 52 - max(map(len, names)))  # letters: long names leave little room
    axes.set_title(textwrap.fill(panel.title, across), fontsize=9, loc="left")


def _draw_ratios(panel: Ratios, axes: "Axes") -> None:
    numbers = sorted({at for line in panel.lines.values() for at, _ in line})
    colors = dict(zip(numbers, (*OURS[:1], *OTHERS), strict=False))
    for place, line in enumerate(panel.lines.values()):
        axes.plot([ratio for _, ratio in line], [place] * len(line), color="#bbbbbb", linewidth=1)
        for at, ratio in line:
            axes.plot(ratio, place, "o", color=colors[at], markersize=6)
    for at, color in colors.items():
        axes.plot([], [], "o", color=color, label=f"{number_of(at)} rows")
    axes.axvline(1.0, color="#222222", linewidth=1)
    axes.set_yticks(range(len(panel.lines)), [*panel.lines], fontsize=8)
    axes.set_ylim(len(panel.lines) - 0.4, -0.6)
    axes.set_xscale("log")
    ticks = [0.5, 1, 2, 3, 4, 5]
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("theirs over ours: right of 1x they take more time")
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.legend(fontsize=8, frameon=False, loc="lower right")
