"""Everything about the kernels that needs a GPU, in one run: correctness first, then the benchmark.

    python -m bench.gpu_check              with a GPU of compute capability 9.0 or newer
    python -m bench.gpu_check --rehearse   anywhere: the same steps, small and interpreted

1. The repository's kernel tests, with the real kernels in place of the interpreted ones.
2. Every vocabulary, dtype and K of the product at real sizes: ids and token ranks equal to the XLA
   implementation's, a sample of rows against the float64 oracle.
3. `bench kernels`, written with the device, driver, versions and date.

Without such a GPU it says so and exits with 2.
"""

import argparse
import itertools
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import kernels
from bench.timing import print_table, write_json
from pallas_kernels import TopkLogprobs, implementations, mosaic_gpu, xla
from pallas_kernels.shapes import VOCABULARIES, Shape
from tests import oracle

TESTS = ("tests/test_mosaic_interpreted.py",)
INTERPRETED_ONLY = "not race_detection"  # a race on a GPU proves nothing
ORACLE_ROWS = 4
LOGITS_AT_MOST = 1 << 28

REAL = tuple(
    Shape(rows, vocabulary, k, dtype)
    for (rows, k), vocabulary, dtype in itertools.product(
        ((1, 128), (4, 20), (64, 0), (256, 5), (2048, 20)),
        VOCABULARIES.values(),
        ("bfloat16", "float16", "float32"),
    )
    if rows * vocabulary <= LOGITS_AT_MOST
)
REHEARSAL = (Shape(2, 4352, 2, "bfloat16"), Shape(2, 4097, 1, "float32"))


def main(arguments: list[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--rehearse", action="store_true", help="small, interpreted, on any machine"
    )
    parser.add_argument("--quick", action="store_true", help="a few shapes of the benchmark")
    parser.add_argument("--json", type=Path, help="default: bench/results/gpu-DATE.json")
    options = parser.parse_args(arguments)
    logits = jnp.zeros((1, 4096), jnp.float32)
    obstacle = implementations.cannot_run(logits, implementations.cuda_capability())
    if obstacle is not None and not options.rehearse:
        print(f"NOT RUN: {obstacle}. Nothing was measured. (--rehearse runs the steps anywhere.)")
        return 2
    if run_tests(options.rehearse) != 0:
        return 1
    for shape in REHEARSAL if options.rehearse else REAL:
        check_shape(shape, options.rehearse)
        print(f"equal: {shape}")
    if options.rehearse:
        results = [kernels.measure(Shape(4, 4096, 5, "float32"), calls=2, rounds=1)]
        print_table(results)
        print("REHEARSED on a CPU: the steps ran, nothing about a GPU was measured.")
        return 0
    results = kernels.run(options.quick)
    print_table(results)
    now = datetime.now(UTC).strftime("%Y-%m-%d")
    path = options.json or Path(f"bench/results/gpu-{now}.json")
    write_json(path, results)
    print(f"wrote {path}; {driver()}")
    return 0


def run_tests(rehearse: bool) -> int:
    """The kernel tests in a process of their own: theirs is a device choice too."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu" if rehearse else "cuda"}
    # Both processes use the GPU: neither may take all of its memory.
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    chosen = f"{INTERPRETED_ONLY} and float16" if rehearse else INTERPRETED_ONLY
    command = [sys.executable, "-m", "pytest", "-q", *TESTS, "-k", chosen]
    return subprocess.run(command, env=environment, check=False).returncode


def check_shape(shape: Shape, rehearse: bool) -> None:
    """Both paths of the kernels against XLA on all rows and the oracle on a few."""
    x = kernels.random_logits(shape, seed=shape.vocabulary)
    # An invalid row, a masked one and one of equal logits among the ordinary ones.
    x = x.at[0, 5].set(jnp.nan) if shape.rows > 4 else x
    x = x.at[1, 7:].set(-jnp.inf) if shape.rows > 4 else x
    x = x.at[2].set(0.5) if shape.rows > 4 else x
    rng = np.random.default_rng(shape.rows)
    token_ids = jnp.asarray(rng.integers(0, shape.vocabulary, shape.rows), jnp.int32)
    row_ids = jnp.asarray(rng.permutation(shape.rows), jnp.int32)
    num_rows = jnp.int32(max(1, shape.rows - 1))
    temperatures = jnp.asarray(rng.choice([0, 0.7, 1, 2], shape.rows), jnp.float32)
    extra = jnp.asarray(rng.integers(0, shape.vocabulary, (shape.rows, 3)), jnp.int32)
    interpret: dict[str, Any] = {}
    if rehearse:
        from pallas_kernels import compat

        interpret = {"interpret": compat.interpret_params(detect_races=False)}
    arguments = (x, token_ids, shape.k, row_ids, num_rows, temperatures, extra)
    kernel = jax.jit(
        lambda x, t, r, n, temp, e: mosaic_gpu.topk_logprobs(
            x, t, shape.k, r, n, temp, e, **interpret
        )
    )
    actual = kernel(x, token_ids, row_ids, num_rows, temperatures, extra)
    expected = jax.jit(xla.topk_logprobs, static_argnums=2)(*arguments)
    compare(actual, expected)
    sample = slice(0, ORACLE_ROWS)
    rows = np.asarray(row_ids[sample])
    few = TopkLogprobs(*(part[sample] for part in actual))
    oracle.assert_matches(
        few,
        oracle.topk_logprobs(
            np.asarray(x[rows]),
            np.asarray(token_ids[sample]),
            shape.k,
            num_rows=int(num_rows),
            temperatures=np.asarray(temperatures[sample]),
            extra_token_ids=np.asarray(extra[sample]),
        ),
    )
    fused = jax.jit(
        lambda x, n, temp, e: mosaic_gpu.greedy_topk_logprobs(x, shape.k, n, temp, e, **interpret)
    )
    greedy_expected = jax.jit(implementations.xla_greedy_topk_logprobs, static_argnums=1)(
        x, shape.k, num_rows, temperatures, extra
    )
    compare(fused(x, num_rows, temperatures, extra), greedy_expected)


def compare(actual: TopkLogprobs, expected: TopkLogprobs) -> None:
    """Ids and ranks equal; logprobs within twice the bound, since both sides have an error."""
    np.testing.assert_array_equal(actual.token_ids, expected.token_ids)
    np.testing.assert_array_equal(actual.token_ranks, expected.token_ranks)
    for part in ("logprobs", "extra_logprobs"):
        np.testing.assert_allclose(
            getattr(actual, part),
            getattr(expected, part),
            rtol=2 * oracle.RELATIVE_ERROR,
            atol=2 * oracle.ABSOLUTE_ERROR,
        )


def driver() -> str:
    """The GPU's driver, for the notes."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
