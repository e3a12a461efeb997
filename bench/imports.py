"""The cost of importing the engine's side, beside NumPy's own import and beside jax's.

A fresh process times each import alone, in turn with the others. Bytecode is cached, as in an
installed package; the first processes fill the cache.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace

from bench.timing import Comparison, Target, from_samples, rotated

NUMPY, OURS, JAX = "numpy", "numpy and the engine side", "numpy and jax"
STATEMENTS = {
    NUMPY: "import numpy",
    OURS: "import numpy, jax_specdec.engine, jax_specdec.export",
    JAX: "import numpy, jax",
}


def seconds(statement: str, environment: Mapping[str, str]) -> float:
    """The time of `statement` in a process of its own, without the process's start."""
    code = f"import time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment
    )
    return float(done.stdout)


def run(quick: bool) -> list[Comparison]:
    """Measure one comparison; the engine side's own cost is its median difference to NumPy."""
    with tempfile.TemporaryDirectory() as cache:
        kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        environment = {**kept, "PYTHONPYCACHEPREFIX": cache, "JAX_PLATFORMS": "cpu"}
        for statement in STATEMENTS.values():
            seconds(statement, environment)
        samples: dict[str, list[float]] = {name: [] for name in STATEMENTS}
        for index in range(5 if quick else 21):
            for name in rotated(list(STATEMENTS), index):
                samples[name].append(seconds(STATEMENTS[name], environment))
    beyond = [ours - numpy for ours, numpy in zip(samples[OURS], samples[NUMPY], strict=True)]
    target = Target("engine side beyond numpy", 50, 1e3 * statistics.median(beyond), "ms")
    found = from_samples("importing, in a fresh process", samples)
    return [replace(found, suite="imports", targets=(target,))]
