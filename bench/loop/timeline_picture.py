"""The picture of one step's timeline; needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from bench.loop.spans import ENGINE, TRACKS, Span
from bench.report import drawing

COLORS = {
    "launch and wait": "#56B4E9",
    "model, verify, draft": "#888888",
    "logprobs, pack": "#0072B2",
    "copy": "#009E73",
    "check and send": "#F0E442",
    "ring": "#E69F00",
    "decode": "#D55E00",
    "process": "#CC79A7",
}


def draw(spans: Sequence[Span], step: tuple[int, int], setup: str, path: Path) -> Path:
    """Draw the step from `step[0]` to `step[1]`: above the whole, below what follows the device."""
    begin, end = step
    inside = [s for s in spans if s.begin >= begin and s.end <= end and s.name in COLORS]
    done = max((s.end for s in inside if s.name == "logprobs, pack"), default=begin)
    # The engine may still work on the step before.
    inside = [s for s in inside if s.track != ENGINE or s.begin >= done]
    with drawing.style():
        figure, (whole, after) = drawing.stacked(f"One step, part by part: {setup}", (7.2, 4.6))
        for axes, start, unit, scale in ((whole, begin, "ms", 1e6), (after, done, "us", 1e3)):
            shown = [s for s in inside if s.end > start]
            for span in shown:
                left = max(span.begin, start) - begin if axes is whole else span.begin - start
                width = (span.end - span.begin) / scale
                row = TRACKS.index(span.track)
                axes.barh(row, width, 0.6, left / scale, color=COLORS[span.name])
            axes.set_yticks(range(len(TRACKS)), TRACKS)
            axes.set_ylim(len(TRACKS) - 0.4, -0.6)
            axes.set_xlim(0, (end - start) / scale)
            axes.set_xlabel(
                f"{unit} since {'the step began' if axes is whole else 'packing ended'}"
            )
        handles = [drawing.patch(color, name) for name, color in COLORS.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=4)
        return drawing.save(figure, path)
