"""One peer measured in an environment that has it, on whatever device jax finds there.

    python -m bench.peers.measure PEER FILE [--quick]

writes the comparisons to FILE. On a CPU the time is the process's CPU time; on others, the clock's.
"""

import importlib
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bench.comparison import HOST, MEMORY, Comparison, Target
from bench.peers.cases import GRID, OF, QUICK, Case
from bench.timing import BenchError, compare, write_json

OURS = "the adapter"
MANY_ROWS = 1024
SHARE = 25.0  # % of the peer's memory, in a trainer
BUDGET = 1.0  # seconds of a contender in one case, except for three rounds
MOST_FLOPS = 3e11  # of a call on a CPU: several take minutes there


def main(peer: str, file: str, *more: str) -> None:
    """Measure the cases of a peer, a part of them with `--quick`."""
    importlib.import_module("bench.peers.stand_ins")
    measured = comparisons(peer, "--quick" in more)
    write_json(Path(file), [replace(comparison, suite="peers") for comparison in measured])


def comparisons(peer: str, quick: bool) -> Iterator[Comparison]:
    """A comparison for each case."""
    distribution, name, cases = OF[peer]
    version = f"{name} {metadata.version(distribution)}, jax {jax.__version__}"
    on_cpu = jax.default_backend() == "cpu"
    settings = {
        "device": jax.devices()[0].device_kind,
        "clock": "CPU time of one thread" if on_cpu else "wall clock",
        "with": f"{version}, Python {platform.python_version()}",
    }
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((1, 1), ("data", "model"), auto)
    with jax.set_mesh(mesh):  # tpu-inference's functions want one
        for shape in QUICK if quick else GRID:
            for case in cases(shape):
                yield measured(name, case, settings, on_cpu)


def measured(peer: str, case: Case, settings: dict[str, Any], on_cpu: bool) -> Comparison:
    """The peer's way and ours: memory as they are compiled, equal results, then times."""
    ways = {
        name: jax.jit(call).lower(*case.arguments).compile()
        for name, call in ((peer, case.theirs), (OURS, case.ours))
    }
    host = {} if case.to_host is None else {HOST: case.to_host / 1e3}
    figures = {name: {MEMORY: megabytes(way)} | host for name, way in ways.items()}
    shape = case.shape
    title = f"{peer} {case.name} R={shape.rows} V={shape.vocabulary} K={shape.k} {shape.dtype}"
    settings = settings | {"shape": str(shape)}
    found = Comparison(title, settings, (), figures=figures)
    flops = (ways[peer].cost_analysis() or {}).get("flops", 0.0)
    if on_cpu and flops > MOST_FLOPS:
        found = replace(found, notes={"NOT RUN": f"{flops / 1e12:.2f} Tflop a call on a CPU"})
    else:
        calls = case.calls or [bound(way, case.arguments) for way in ways.values()]
        if case.compared is not None:
            try:
                check(title, *(way(*case.compared) for way in ways.values()))
            except AssertionError as error:
                raise BenchError(f"{title}: {OURS} differs from {peer}: {error}") from error
        found = compare(
            title, dict(zip(ways, calls, strict=True)), check=None if case.compared else check,
            rounds=15, budget=BUDGET, settings=settings,
            clock=time.process_time if on_cpu else time.perf_counter,
        )  # fmt: skip
        found = replace(found, figures=figures)
    return replace(found, targets=targets_of(found, peer, case))


def bound(way: Any, arguments: tuple[Any, ...]) -> Any:
    """A call that waits for its results."""
    return lambda: jax.block_until_ready(way(*arguments))


def megabytes(way: Any) -> float:
    """Temporaries and results of a compiled program: what it needs beside its arguments."""
    memory = way.memory_analysis()
    return float(memory.temp_size_in_bytes + memory.output_size_in_bytes) / 1e6


def check(_: str, expected: Any, actual: Any) -> None:
    """Integers are equal, and numbers except for the rounding of sums in another order."""
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        if one.dtype.kind in "iu":
            np.testing.assert_array_equal(other, one)
        else:
            atol = 1e-5 * max(1.0, float(np.abs(one).max(initial=0)))
            np.testing.assert_allclose(other, one, rtol=1e-4, atol=atol)


def targets_of(found: Comparison, peer: str, case: Case) -> tuple[Target, ...]:
    """Nowhere slower than the peer, by the fastest rounds, and a quarter of a trainer's memory."""
    targets = []
    if found.timings:
        theirs, ours = (min(found[name].rounds) for name in (peer, OURS))
        targets.append(Target(f"speed over {peer}", 1.0, theirs / ours, "x", at_least=True))
    if case.trains and case.shape.rows >= MANY_ROWS:
        share = 100 * found.figures[OURS][MEMORY] / found.figures[peer][MEMORY]
        targets.append(Target(f"memory of {peer}'s", SHARE, share, "%"))
    return tuple(targets)


if __name__ == "__main__":
    main(*sys.argv[1:])
