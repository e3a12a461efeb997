"""The check of the kernel that needs a TPU: is it right, and how fast is it?

    python -m bench.tpu_check                on a TPU
    python -m bench.tpu_check --rehearse     anywhere: the same steps, small and interpreted

First edges of the contract and ordinary rows against the float64 oracle. Then, for each shape, the
kernel beside the plain way, the XLA implementation and the row maximum (which reads the logits and
does little else); all of them compute what they should before anything is timed. Results are in
FOLDER/tpu-DATE.json, in the form of the GPU's. Exit status: 0 if all passed, 1 if a check failed, 2
without a TPU.
"""

import argparse
import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from bench.gpu import contenders
from bench.timing import BenchError, Comparison, compare, print_table, write_json
from pallas_kernels import TopkLogprobs, topk_logprobs
from pallas_kernels.backends import answers
from pallas_kernels.backends.mosaic_tpu import rows as run
from pallas_kernels.contract.types import Outputs, Rows
from pallas_kernels.meshes.vocab_shard import VocabShard
from pallas_kernels.testing import oracle
from pallas_kernels.testing import plain as reference
from pallas_kernels.testing.shapes import Shape

OURS, XLA, FLOOR = "mosaic_tpu", "xla", "max only"
SHAPES = tuple(
    Shape(rows, vocabulary, k, dtype)
    for rows in (1, 64, 256, 2048)
    for vocabulary in (131_072, 151_936)
    for k in (0, 5, 20, 64)
    for dtype in ("bfloat16", "float32")
)
SMALL = (Shape(3, 300, 2, "float32"),)
EDGES = (50_257, 131_072)
SMALL_EDGES = (1_300,)

Kernel = Callable[..., TopkLogprobs]


def main(arguments: list[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("--rehearse", action="store_true", help="small, interpreted, anywhere")
    parser.add_argument("--results", type=Path, default=Path("bench/results"), metavar="FOLDER")
    options = parser.parse_args(arguments)
    if not options.rehearse and jax.default_backend() != "tpu":
        print("NOT RUN: jax finds no TPU here. (--rehearse runs the steps anywhere.)")
        return 2
    kernel = interpreted if options.rehearse else compiled
    small = options.rehearse
    failures = correctness(kernel, SMALL_EDGES if small else EDGES, (2,) if small else (0, 5, 20))
    results = []
    for shape in SMALL if options.rehearse else SHAPES:
        try:
            results.append(measure(shape, kernel, rounds=1 if options.rehearse else 15))
            print_table(results[-1:])
        except BenchError as error:
            failures.append(f"{shape}: {error}")
    kind = "tpu-rehearsal" if options.rehearse else "tpu"
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / f"{kind}-{datetime.now(UTC):%Y-%m-%d}.json"
    write_json(path, results)
    for failure in failures:
        print(f"FAILED {failure}")
    if options.rehearse:
        print("REHEARSED: the steps ran, and nothing was measured on a TPU.")
    print(f"{len(results)} shapes, {len(failures)} failures: {path}")
    return 1 if failures else 0


def compiled(logits: jax.Array, token_ids: jax.Array, k: int) -> TopkLogprobs:
    """The kernel on a TPU."""
    return topk_logprobs(logits, token_ids, k, implementation="mosaic_tpu")


def interpreted(logits: jax.Array, token_ids: jax.Array, k: int) -> TopkLogprobs:
    """The kernel on a CPU, in small chunks."""
    row_sums = functools.partial(run.row_sums, interpret=pltpu.InterpretParams(), cut=(2, 4))
    return answers.topk_logprobs(row_sums, Rows(logits, token_ids), Outputs(k), VocabShard())


def correctness(kernel: Kernel, vocabularies: tuple[int, ...], ks: tuple[int, ...]) -> list[str]:
    """What differs from the oracle, on rows with every edge and on subnormal logits."""
    failures = []
    for vocabulary in vocabularies:
        for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
            rows = oracle.edge_rows(vocabulary, dtype, 128)
            normal = np.random.default_rng(0).normal(size=(2, vocabulary))
            more = np.stack([normal[0] * 4, normal[1] * 1e-39]).astype(rows.dtype)
            x = np.concatenate([rows, more])
            ids = np.arange(len(x), dtype=np.int32)
            for k in ks:
                found = jax.jit(functools.partial(kernel, k=k))(jnp.asarray(x), jnp.asarray(ids))
                try:
                    oracle.assert_matches(found, oracle.topk_logprobs(x, ids, k))
                except AssertionError as error:
                    name = jnp.dtype(dtype).name
                    failures.append(f"V = {vocabulary}, K = {k}, {name}: {error}")
    return failures


def measure(shape: Shape, kernel: Kernel, rounds: int) -> Comparison:
    """The kernel beside the others on one shape; the read of the logits as gigabytes a second."""
    logits, token_ids = contenders.random_logits(shape, seed=0), contenders.random_ids(shape)

    def bind(program: Callable[..., Any]) -> Callable[[], Any]:
        jitted = jax.jit(program)
        return lambda: jax.block_until_ready(jitted(logits, token_ids))  # type: ignore[no-untyped-call]

    def check(name: str, expected: Any, actual: Any) -> None:
        if name != FLOOR:
            contenders.check(name, expected, actual)

    found = compare(
        f"topk_logprobs R={shape.rows} V={shape.vocabulary} K={shape.k} {shape.dtype}",
        {
            contenders.PLAIN: bind(lambda x, t: reference.topk_logprobs(x, t, shape.k)),
            XLA: bind(lambda x, t: topk_logprobs(x, t, shape.k, implementation="xla")),
            OURS: bind(lambda x, t: kernel(x, t, shape.k)),
            FLOOR: bind(lambda x, t: jnp.max(x, axis=1)),
        },
        check=check,
        rounds=rounds,
        settings={"shape": str(shape), "device": jax.devices()[0].device_kind},
    )
    size = logits.size * logits.dtype.itemsize
    figures = {one.name: {"GB/s": size / min(one.rounds) / 1e9} for one in found.timings}
    return replace(found, suite="tpu", figures=figures)


if __name__ == "__main__":
    sys.exit(main())
