"""The lines of a session on a GPU that a person reads first: speeds and verdicts."""

from collections.abc import Iterable

from bench.gpu.contenders import COPY, FLOOR, FUSED, OURS, PLAIN
from bench.gpu_tune import CURRENT
from bench.report.comparison import Comparison


def lines(comparisons: Iterable[Comparison]) -> list[str]:
    """A line for each comparison, then the number of verdicts on targets."""
    out: list[str] = []
    verdicts: dict[str, int] = {}
    for one in comparisons:
        if OURS in one.names:
            out.append(_speed(one))
        elif one.names[0].startswith(CURRENT):
            out.append(_tuning(one))
        elif one.names == (COPY,):
            out.append(f"{one.title}: {one.figures[COPY]['GB/s']:.0f} GB/s")
        for target in one.targets:
            verdicts[target.verdict] = verdicts.get(target.verdict, 0) + 1
            if target.verdict == "MISSED":
                out.append(f"  {target}")
    counted = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
    return [*out, f"targets: {counted or 'none'}"]


def _speed(one: Comparison) -> str:
    parts = []
    for name in (OURS, FUSED, FLOOR, PLAIN):
        if name in one.names:
            parts.append(f"{name} {one[name].median * 1e6:.1f} us")
    share = 100 * one.figures[OURS]["GB/s"] / float(one.settings["ceiling GB/s"])
    return f"{one.title}: {', '.join(parts)}; {share:.0f} % of the copy's bandwidth"


def _tuning(one: Comparison) -> str:
    current = one.timings[0]
    best = min(one.timings, key=lambda timing: timing.median)
    return (
        f"{one.title}: current {current.median * 1e6:.1f} us, best {best.median * 1e6:.1f} us "
        f"({best.name.removeprefix(CURRENT)})"
    )
