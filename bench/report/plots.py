"""Plots of the benchmarks' results, one message each; needs matplotlib (the `bench` extra)."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from bench.report import drawing
from bench.report.comparison import PEERS, Comparison, middle_half, shape_of
from bench.report.drawing import OURS
from bench.ring.contenders import SEED_BYTES
from bench.timing import readable

AXES = {"k": "K, logprobs a token", "rows": "rows (tokens) of a step", "vocabulary": "vocabulary"}
PREFIXES = {  # of the files' names, by suite
    "kernels": ("kernels-",),
    "ring": ("ring-",),
    "host": ("host-", "message-"),
    "end-to-end": ("loop-",),
    "sampling": ("sampled-",),
}
PARTS = ("copy", "ring", "decode", "process")
PART_COLORS = ("#0072B2", "#56B4E9", "#E69F00", "#CC79A7")


def draw(comparisons: Sequence[Comparison], directory: Path, suffix: str = ".svg") -> list[Path]:
    """Draw every plot for which the results have figures, and return the files."""
    with drawing.style():
        return [
            drawing.save(figure, directory / f"{name}{suffix}")
            for name, figure in _figures(comparisons).items()
            if figure is not None
        ]


def _figures(comparisons: Sequence[Comparison]) -> dict[str, Figure | None]:
    """The plots by name; None where the results have too few figures."""
    made: dict[str, Figure | None] = {}
    for axis in AXES:
        made[f"kernels-against-{axis}"] = kernels(comparisons, axis)
    made["host-against-requests"] = host(comparisons, "requests", {"k": 20})
    made["host-against-k"] = host(comparisons, "k", {"requests": 256})
    made["host-garbage"] = garbage(comparisons)
    made["message-bytes"] = message_bytes(comparisons)
    made["sampled-rows"] = sampled(comparisons)
    for one in of_suite(comparisons, "ring"):
        if any(timing.percentiles for timing in one.timings):
            made[f"ring-{slug(one.title)}"] = latencies(one)
    for one in of_suite(comparisons, "end-to-end"):
        if one.figures:
            name = slug(one.title.removeprefix("decoding "))
            made[f"loop-{name}"] = kept(one)
            made[f"loop-host-{name}"] = host_parts(one)
    return made


def of_suite(comparisons: Sequence[Comparison], suite: str) -> list[Comparison]:
    """The comparisons of one suite."""
    return [one for one in comparisons if one.suite == suite]


def slug(title: str) -> str:
    """A file name for a title."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def kernels(comparisons: Sequence[Comparison], axis: str) -> Figure | None:
    """The time of logprobs against K, rows or vocabulary, the other two fixed."""
    center = {"rows": 64, "vocabulary": 131_072, "k": 20, "dtype": "float32"}
    fixed = {name: value for name, value in center.items() if name != axis}
    chosen = [
        one
        for one in (*of_suite(comparisons, "kernels"), *of_suite(comparisons, "gpu"))
        if fixed.items() <= shape_of(one).items()
    ]
    series: dict[str, list[tuple[float, float]]] = {}
    for one in chosen:
        for timing in one.timings:
            point = (shape_of(one)[axis], 1e3 * timing.median)
            series.setdefault(timing.name, []).append(point)
    if not series or max(map(len, series.values())) < 3:
        return None
    what = {"k": "K", "rows": "the batch", "vocabulary": "the vocabulary"}[axis]
    figure, axes = drawing.new(f"Logprobs of logits: time against {what}")
    if axis == "k":
        axes.set_xscale("symlog", linthresh=1)
    else:
        axes.set_xscale("log")
    axes.set_yscale("log")
    rest = {"rows": "{rows} rows", "vocabulary": "V = {vocabulary:,}", "k": "K = {k}"}
    texts = [text.format(**fixed) for name, text in rest.items() if name != axis]
    axes.set_xlabel(f"{AXES[axis]}   ({', '.join(texts)}, float32, {device(chosen[0])})")
    axes.set_ylabel("ms a step")
    places = sorted({point[0] for points in series.values() for point in points})
    ticks(axes, places)
    drawing.lines(axes, series, {"xla": "this project (XLA)", "mosaic_gpu": "this project (GPU)"})
    return figure


def host(comparisons: Sequence[Comparison], axis: str, fixed: dict[str, int]) -> Figure | None:
    """The time from a step's bytes to its records, against the batch or against K."""
    series: dict[str, list[tuple[float, float]]] = {}
    for one in of_suite(comparisons, "host"):
        if fixed.items() <= one.settings.items():
            for timing in one.timings:
                point = (one.settings[axis], 1e3 * timing.median)
                series.setdefault(timing.name, []).append(point)
    if not series or max(map(len, series.values())) < 3:
        return None
    what = {"k": "K", "requests": "the batch"}[axis]
    figure, axes = drawing.new(f"From a step's bytes to its records: time against {what}")
    if axis == "requests":
        axes.set_xscale("log")
    axes.set_yscale("log")
    rest = "K = 20" if axis == "requests" else "256 requests"
    label = {"k": "K, logprobs a token", "requests": "requests in the batch"}[axis]
    axes.set_xlabel(f"{label}   ({rest}, 3 tokens a request)")
    axes.set_ylabel("ms a step")
    ticks(axes, sorted({point[0] for points in series.values() for point in points}))
    drawing.lines(axes, series, {"columns (ours)": "columns (this project)"})
    return figure


def sampled(comparisons: Sequence[Comparison]) -> Figure | None:
    """The time of sampled rows at temperature 1, with raw logprobs, against their number."""
    fixed = {"vocabulary": 151_936, "dtype": "bfloat16", "kind": "temperature 1", "flat": False}
    series: dict[str, list[tuple[float, float]]] = {}
    for one in of_suite(comparisons, "sampling"):
        if fixed.items() <= one.settings.items():
            for timing in one.timings:
                point = (one.settings["rows"], 1e3 * timing.median)
                series.setdefault(timing.name, []).append(point)
    if not series or max(map(len, series.values())) < 3:
        return None
    figure, axes = drawing.new("Sampled rows, verified and with logprobs: time against the batch")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("rows   (temperature 1, K = 20, V = 151,936, bfloat16)")
    axes.set_ylabel("ms a step")
    ticks(axes, sorted({point[0] for points in series.values() for point in points}))
    shown = {"verify, draw and logprobs": "this project", "topk_logprobs, K = 20": "logprobs alone"}
    drawing.lines(axes, series, shown)
    return figure


def garbage(comparisons: Sequence[Comparison]) -> Figure | None:
    """The objects that the garbage collector visits, by design."""
    chosen = [
        one
        for one in of_suite(comparisons, "host")
        if one.figures and (one.settings["requests"], one.settings["k"]) == (256, 20)
    ]
    if not chosen:
        return None
    one = chosen[0]
    names = list(one.figures)
    counts = [max(one.figures[name]["gc objects"], 1) for name in names]
    figure, axes = drawing.new("Objects that one step leaves to the garbage collector", (6.4, 2.5))
    _bars(axes, names, counts, lambda value: f"{value:,.0f}")
    axes.set_xscale("log")
    axes.set_xlabel("objects, 256 requests x 3 tokens, K = 20, logarithmic")
    plain(axes.xaxis)
    return figure


def message_bytes(comparisons: Sequence[Comparison]) -> Figure | None:
    """The bytes of a message against K, by batch, beside a struct of fixed size."""
    series: dict[str, list[tuple[float, float]]] = {}
    for one in of_suite(comparisons, "host"):
        size = one.notes.get("message bytes")
        if isinstance(size, int):
            name = f"{one.settings['requests']} requests"
            series.setdefault(name, []).append((one.settings["k"], size / 1e3))
    series = {name: points for name, points in series.items() if len(points) > 1}
    if not series:
        return None
    figure, axes = drawing.new("Bytes of a step: only what was asked for travels")
    axes.set_yscale("log")
    ticks(axes, sorted({point[0] for points in series.values() for point in points}))
    axes.set_xlabel("K, logprobs a token   (3 tokens a request)")
    axes.set_ylabel("kB a step")
    axes.axhline(SEED_BYTES / 1e3, color=drawing.OTHERS[0], linewidth=1.2, linestyle="--")
    axes.annotate(
        f"a struct of fixed size: {SEED_BYTES / 1e3:.0f} kB, whatever is in it",
        (0.01, SEED_BYTES / 1e3), xycoords=("axes fraction", "data"),
        xytext=(0, 4), textcoords="offset points", color=drawing.OTHERS[0],
    )  # fmt: skip
    least = min(size for points in series.values() for _, size in points)
    axes.set_ylim(least / 1.5, 1.8 * SEED_BYTES / 1e3)
    drawing.lines(axes, series)
    return figure


def latencies(one: Comparison) -> Figure:
    """The spread of the messages' latencies: p5 to p99, the middle half, the median."""
    timings = [timing for timing in one.timings if timing.percentiles]
    figure, axes = drawing.new(
        f"Latency of a message: {one.title}", (6.4, 0.8 + 0.3 * len(timings))
    )
    for row, timing in enumerate(timings):
        at = {name: 1e6 * seconds for name, seconds in timing.percentiles.items()}
        color = drawing.OTHERS[1] if timing.name in PEERS else OURS
        axes.plot((at["p5"], at["p99"]), (row, row), color=color, linewidth=1.2)
        axes.plot((at["p25"], at["p75"]), (row, row), color=color, linewidth=6, alpha=0.55)
        axes.plot(at["p50"], row, "o", color=color, markersize=6)
        text = readable(timing.percentiles["p50"])
        axes.annotate(text, (at["p50"], row), xytext=(0, 6), textcoords="offset points",
                      fontsize=7.5, color=color, ha="center")  # fmt: skip
    axes.set_xscale("log")
    plain(axes.xaxis)
    axes.set_xlabel("us, logarithmic: line p5 to p99, bar the middle half, dot the median")
    drawing.names_at_left(axes, [timing.name for timing in timings])
    return figure


def kept(one: Comparison) -> Figure:
    """Tokens a second as a share of the loop without logprobs: median and middle half of rounds."""
    base, *names = one.names
    halves = [
        (100 * low, 100 * high) for low, high in (middle_half(one.kept(name)) for name in names)
    ]
    shares = [one.figures[name]["% of tokens/s"] for name in names]
    speed = one.figures[base]["tokens/s"]
    figure, axes = drawing.new(
        f"Tokens a second that are left: {one.title.removeprefix('decoding ')}",
        (6.4, 1.1 + 0.27 * len(names)),
    )
    axes.axvline(100, color="#444444", linewidth=1)
    _bars(axes, names, shares, lambda value: f"{value:.0f} %", halves)
    axes.set_xlim(0, 12 + max(100.0, *shares, *(high for _, high in halves)))
    axes.set_xlabel(
        f"% of the loop without logprobs ({speed:,.0f} tokens/s, {device(one)})\n"
        "bar: the median of the rounds, line: their middle half"
    )
    return figure


def host_parts(one: Comparison) -> Figure:
    """The time of a step after the device array exists, part by part.

    In old results "copy" is not a part of its own, but in "ring".
    """
    names = list(one.figures)
    figure, axes = drawing.new(
        f"Host time of a step, by part: {one.title.removeprefix('decoding ')}",
        (6.4, 1.3 + 0.27 * len(names)),
    )
    left = [0.0] * len(names)
    for part, color in zip(PARTS, PART_COLORS, strict=True):
        key = f"part: {part} us"
        if any(key not in one.figures[name] for name in names):
            continue  # only "copy", see above
        widths = [one.figures[name][key] / 1e3 for name in names]
        axes.barh(range(len(names)), widths, 0.62, left, color=color, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for row, total in enumerate(left):
        axes.annotate(f" {total:.2g}", (total, row), va="center", fontsize=8)
    axes.set_xlim(0, 1.12 * max(left))
    axes.set_xlabel(f"ms, from the device array to the records ({device(one)})")
    axes.figure.legend(loc="outside lower center", ncols=len(PARTS))
    drawing.names_at_left(axes, names)
    return figure


def _bars(
    axes: Any,
    names: Sequence[str],
    values: Sequence[float],
    text: Callable[[float], str],
    halves: Sequence[tuple[float, float]] = (),
) -> None:
    """Draw a bar for each name, its value behind it, and a line over the middle half if given."""
    colors = [drawing.OTHERS[1] if name in PEERS else OURS for name in names]
    axes.barh(range(len(names)), values, 0.62, color=colors)
    for row, (low, high) in enumerate(halves):
        axes.plot((low, high), (row, row), color="black", linewidth=1.2)
    ends = values
    if halves:
        ends = [max(value, high) for value, (_, high) in zip(values, halves, strict=True)]
    for row, (value, end) in enumerate(zip(values, ends, strict=True)):
        axes.annotate(
            text(value), (end, row), xytext=(4, 0), textcoords="offset points", va="center",
            fontsize=8, bbox={"boxstyle": "square,pad=0.1", "color": "white"},
        )  # fmt: skip
    drawing.names_at_left(axes, names)


def ticks(axes: Any, places: Sequence[float]) -> None:
    """Put ticks at the measured places of the x axis alone, and plain numbers on the y axis."""
    axes.set_xticks(places, [f"{place:,.0f}" for place in places])
    axes.xaxis.set_minor_locator(NullLocator())
    if len(places) > 6 or max(places) > 20_000:
        axes.tick_params(axis="x", labelrotation=30)
    plain(axes.yaxis)


def plain(axis: Any) -> None:
    """Write numbers as people do, at whole decades."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_locator(NullLocator())


def device(one: Comparison) -> str:
    """The device's name for an axis label."""
    found = str(one.settings.get("device", "cpu"))
    return "CPU" if found.lower() == "cpu" else found
