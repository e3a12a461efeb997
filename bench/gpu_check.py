"""Everything about the kernels that needs a GPU, in one run: correctness first, then speed.

    python -m bench.gpu_check                    on a GPU of compute capability 9.0 or newer
    python -m bench.gpu_check --part tests ...   only some parts, to fit into a short loan
    python -m bench.gpu_check --rehearse         anywhere: the same steps, small and interpreted

The parts, with an estimate of their minutes on an H100 (compiling is most of it):

  tests     2   the repository's kernel tests, with real kernels in place of interpreted ones
  shapes    7   every vocabulary, dtype and kind of K at real sizes: both paths against XLA on all
                rows and the float64 oracle on a few; every edge of the contract; arbitrary values
  speed-R   4   R = 4, 16, 64, 256 or 1536: against peers and the memory's speed, see `gpu_kernels`

Results go to bench/results/gpu-DATE-PART.json, with device, driver and versions. Without such a GPU
it says so and exits with 2; it exits with 1 where an answer is wrong.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# Before jax is imported: the tests' process and PyTorch need memory of the same GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
from rich.console import Console

from bench import gpu_contenders, gpu_correctness, gpu_kernels, torch_peers
from bench.files import environment, write_json
from bench.timing import Comparison, print_table
from pallas_kernels import compat, implementations
from pallas_kernels.shapes import GPU, Shape

ROWS = tuple(dict.fromkeys(shape.rows for shape in GPU))
PARTS = ("tests", "shapes", *(f"speed-{rows}" for rows in ROWS))
# Test files and what to run of them; a race on a GPU proves nothing, and some are about CPUs.
TESTS = {
    "tests/test_mosaic_interpreted.py": "not race_detection",
    "tests/test_topk_logprobs.py": (
        "small_shapes or every_argument or by_hand or edges or any_values or num_rows or "
        "equal_terms or any_size or while_loop or temperatures or (greedy and not temporaries)"
    ),
}
REHEARSED_TESTS = {
    "tests/test_mosaic_interpreted.py": "not race_detection and float16",
    "tests/test_topk_logprobs.py": "by_hand",
}
# Interpreted kernels take a second a row: few rows in every part.
REHEARSED_SHAPES = {
    4: (Shape(2, 4352, 1, "bfloat16"),),
    16: (Shape(2, 2048, 0, "float32"),),
    64: (Shape(1, 2048, 20, "float32"),),
    256: (Shape(1, 2048, 5, "bfloat16"),),
    1536: (Shape(1, 2048, 0, "bfloat16"),),
}


def main(arguments: list[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--rehearse", action="store_true", help="small, interpreted, on any machine"
    )
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument("--results", type=Path, default=Path("bench/results"), metavar="FOLDER")
    options = parser.parse_args(arguments)
    logits = jax.ShapeDtypeStruct((1, 4096), jnp.float32)  # type: ignore[no-untyped-call]
    obstacle = implementations.cannot_run(logits, implementations.cuda_capability())
    if obstacle is not None and not options.rehearse:
        print(f"NOT RUN: {obstacle}. Nothing was measured. (--rehearse runs the steps anywhere.)")
        return 2
    interpret = compat.interpret_params(detect_races=False) if options.rehearse else None
    comparisons: list[Comparison] = []
    for part in options.part:
        begin = time.perf_counter()
        if part == "tests":
            if run_tests(REHEARSED_TESTS if options.rehearse else TESTS, options.rehearse) != 0:
                print("FAILED: the tests above. Nothing was measured.")
                return 1
        elif part == "shapes":
            gpu_correctness.run(interpret)
        else:
            found = measure(int(part.removeprefix("speed-")), interpret)
            print_table(found, Console(width=150))
            comparisons += found
        print(f"{part}: done in {time.perf_counter() - begin:.0f} s", flush=True)
    if options.rehearse:
        print("REHEARSED: the steps ran, nothing about a GPU was measured.")
    if comparisons:
        path = options.results / file_name(options.part, options.rehearse)
        write_json(path, comparisons, environment() | device())
        print(f"wrote {path}")
    return 0


def run_tests(tests: Mapping[str, str], rehearse: bool) -> int:
    """The tests in processes of their own: which device they run on is decided at their start."""
    variables = os.environ | {"JAX_PLATFORMS": "cpu" if rehearse else "cuda"}
    for file, chosen in tests.items():
        command = [sys.executable, "-m", "pytest", "-q", file, "-k", chosen]
        if code := subprocess.run(command, env=variables, check=False).returncode:
            return code
    return 0


def measure(rows: int, interpret: Any) -> list[Comparison]:
    """All shapes with so many rows."""
    if interpret is not None:
        return gpu_kernels.run(REHEARSED_SHAPES[rows], gpu_contenders.rehearsal(interpret))
    return gpu_kernels.run([shape for shape in GPU if shape.rows == rows])


def file_name(parts: Sequence[str], rehearse: bool) -> str:
    """gpu-DATE.json of a whole run; the name of others says which parts, or that it rehearsed."""
    speed = [part for part in parts if part.startswith("speed")]
    kind = "rehearsal" if rehearse else "gpu"
    some = "" if len(speed) == len(ROWS) else "-" + "-".join(speed)
    return f"{kind}-{datetime.now(UTC):%Y-%m-%d}{some}.json"


def device() -> dict[str, Any]:
    """What the results belong to, besides `files.environment`."""
    return {
        "device": jax.devices()[0].device_kind,
        "compute capability": implementations.cuda_capability(),
        "driver": driver(),
        "torch": torch_peers.version(),
    }


def driver() -> str:
    """The GPU's driver."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "none"


if __name__ == "__main__":
    sys.exit(main())
