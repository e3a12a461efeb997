"""The GPU kernels against their peers and against the memory's speed, on the device's own clock.

One launch of a contender's program is one sample: behind a plug that evicts the L2 cache, on the
next of several buffers, timed by `device_clock`. Rounds are interleaved. All results are compared
on the same arrays before.
"""

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.gpu import contenders as peers
from bench.gpu.contenders import BUFFERS, COPY, FLOOR, FUSED, OURS, PLAIN, TORCH, Contender, Machine
from bench.gpu.device_clock import Span, Work, device_spans
from bench.report.comparison import Comparison, Target, from_samples
from bench.timing import rotated
from pallas_kernels.backends.mosaic_gpu.schedule import choose_schedule
from pallas_kernels.testing.shapes import Shape

SECONDS_PER_SHAPE = 4.0


def run(shapes: Sequence[Shape], machine: Machine | None = None) -> list[Comparison]:
    """Measure a large copy, whose bandwidth is the ceiling, and then every shape."""
    machine = machine or Machine()
    ceiling = measure_ceiling(machine)
    found = [ceiling]
    for shape in shapes:
        found.append(measure(shape, machine, ceiling.figures[COPY]["GB/s"]))
    return found


def measure_ceiling(machine: Machine) -> Comparison:
    """Measure a copy so large that launching it does not count."""
    shape = machine.ceiling
    buffers = [peers.random_logits(shape, seed) for seed in range(BUFFERS)]
    copy = peers.jax_contender(
        lambda x, _: -x,
        buffers,
        peers.random_ids(shape),
        peers.jax_plug(machine.plug_bytes),
    )
    spans = interleave({COPY: copy}, machine)
    moved = 2 * shape.rows * shape.vocabulary * 4
    comparison = from_samples(
        f"copy of {moved // 2 >> 20} MiB", {COPY: [s.total for s in spans[COPY]]}
    )
    figures = {COPY: {"GB/s": moved / comparison[COPY].median / 1e9}}
    return replace(comparison, suite="gpu", figures=figures, settings=settings(shape, machine))


def measure(shape: Shape, machine: Machine, ceiling: float) -> Comparison:
    """Check all contenders on the same arrays, then measure them; `ceiling` in GB/s."""
    contenders, missing = peers.make_contenders(shape, machine)
    contenders, failed = peers.check_equal(shape, contenders)
    missing |= failed
    spans = interleave(contenders, machine)
    comparison = from_samples(
        f"topk_logprobs R={shape.rows} V={shape.vocabulary} K={shape.k} {shape.dtype}",
        {name: [span.total for span in found] for name, found in spans.items()},
        settings=settings(shape, machine) | {"ceiling GB/s": ceiling},
        notes={name: f"not measured: {why}" for name, why in missing.items()},
    )
    comparison = with_figures(shape, comparison, contenders, spans)
    return replace(comparison, targets=targets(shape, comparison, ceiling, machine.on_gpu))


def glance(shape: Shape, machine: Machine, ceiling: float, only: Sequence[str]) -> Comparison:
    """Measure a few contenders without comparing their results; the first is the baseline."""
    contenders, _ = peers.make_contenders(shape, machine, only)
    spans = interleave(contenders, machine)
    comparison = from_samples(
        f"a glance at R={shape.rows} V={shape.vocabulary} K={shape.k} {shape.dtype}",
        {name: [span.total for span in spans[name]] for name in only},
        settings=settings(shape, machine) | {"ceiling GB/s": ceiling},
    )
    return replace(with_figures(shape, comparison, contenders, spans), suite="gpu glance")


def with_figures(
    shape: Shape,
    comparison: Comparison,
    contenders: Mapping[str, Contender],
    spans: Mapping[str, Sequence[Span]],
) -> Comparison:
    """The comparison with the figures beside the time."""
    figures = {}
    for name, contender in contenders.items():
        row = {
            "GB/s": bytes_moved(shape, name) / comparison[name].median / 1e9,
            "busy us": float(np.median([span.busy for span in spans[name]])) * 1e6,
        }
        if contender.temporaries is not None:
            row["temporaries %"] = 100 * contender.temporaries / logits_bytes(shape)
        figures[name] = row
    return replace(comparison, suite="gpu", figures=figures)


def settings(shape: Shape, machine: Machine) -> dict[str, Any]:
    """The settings of a measurement."""
    return {
        "rows": shape.rows,
        "vocabulary": shape.vocabulary,
        "k": shape.k,
        "dtype": shape.dtype,
        "device": jax.devices()[0].device_kind,
        "clock": clock_name(machine),
        "schedule": str(choose_schedule(shape.rows, shape.vocabulary, shape.k, shape.dtype)),
    }


def clock_name(machine: Machine) -> str:
    """The clock's name; only "device" makes a result that the pages may show."""
    if not machine.on_gpu:
        return "host, a rehearsal"
    return "device" if machine.clock is device_spans else "host, launching included"


def interleave(contenders: Mapping[str, Contender], machine: Machine) -> dict[str, list[Span]]:
    """Sample all contenders: one launch each in every round."""
    names = list(contenders)
    rounds = rounds_of(contenders, machine)
    schedule = [(i, name) for i in range(rounds) for name in rotated(names, i)]

    def work(i: int, name: str) -> Work:
        contender = contenders[name]
        return Work(name, contender.plug, lambda: contender.launch(i), contender.wait)

    spans = machine.clock(list(itertools.starmap(work, schedule)))
    found: dict[str, list[Span]] = {name: [] for name in names}
    for (_, name), span in zip(schedule, spans, strict=True):
        found[name].append(span)
    return found


def rounds_of(contenders: Mapping[str, Contender], machine: Machine) -> int:
    """How many rounds take about `SECONDS_PER_SHAPE`, by one launch each."""
    least, most = machine.rounds
    if least == most:
        return least
    once = 0.0
    for contender in contenders.values():
        contender.wait(contender.plug())
        begin = time.perf_counter()
        contender.wait(contender.launch(0))
        once += time.perf_counter() - begin
    return min(most, max(least, int(SECONDS_PER_SHAPE / once)))


def targets(
    shape: Shape, comparison: Comparison, ceiling: float, on_gpu: bool
) -> tuple[Target, ...]:
    """The limits for this shape; without a GPU they are named and not measured."""
    ours = comparison[OURS].median

    def found(value: float) -> float | None:
        return value if on_gpu else None

    out = []
    share = {1536: 90, 256: 75}.get(shape.rows)
    if share is not None and shape.k <= 20:
        measured = 100 * comparison.figures[OURS]["GB/s"] / ceiling
        out.append(Target("bandwidth over the copy's", share, found(measured), "%", True))
    if shape.rows == 64 and shape.k == 0:
        ratio = ours / comparison[FLOOR].median
        out.append(Target("time over the floor's", 1.25, found(ratio), "x"))
    if shape.rows == 64 and shape.k == 20:
        beyond = (ours - comparison[FLOOR].median) * 1e6
        out.append(Target("time beyond the floor's", 12, found(beyond), "us"))
    if shape.k == 20:
        faster = comparison.speedup(OURS, PLAIN)
        out.append(Target(f"speed over {PLAIN}", 10, found(faster), "x", True))
        for name in TORCH:
            measured_peer = name in comparison.names
            faster = comparison.speedup(OURS, name) if measured_peer else 0.0
            value = found(faster) if measured_peer else None
            out.append(Target(f"speed over {name}", 3, value, "x", True))
    for name in (OURS, FUSED):
        held = comparison.figures[name].get("temporaries %")
        value = None if held is None else found(held)
        out.append(Target(f"memory of {name} beyond outputs, of the logits", 3, value, "%"))
    return tuple(out)


def logits_bytes(shape: Shape) -> int:
    """The size of the logits."""
    return shape.rows * shape.vocabulary * jnp.dtype(shape.dtype).itemsize


def bytes_moved(shape: Shape, name: str) -> int:
    """The least that a contender reads and writes: the logits once, ids and outputs."""
    size = logits_bytes(shape)
    if name == COPY:
        return 2 * size
    if name == FLOOR:
        return size + 4 * shape.rows
    return size + 4 * shape.rows * (2 * (shape.k + 1) + 2)
