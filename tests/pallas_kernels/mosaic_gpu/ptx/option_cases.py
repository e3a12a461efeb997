"""Calls with optional results, masks and biases, to be executed as PTX."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.backends.mosaic_gpu import rows as run
from pallas_kernels.backends.mosaic_gpu.schedule import Schedule
from pallas_kernels.contract.changes import Changes
from pallas_kernels.contract.rows import Outputs
from pallas_kernels.testing import oracle
from tests.pallas_kernels.mosaic_gpu.ptx.cases import TEMPERATURES, Case, chosen, edge_rows
from tests.support import kernel_calls
from tests.support.changed_logits import ALL, bits_of, changes_of, in_float64


def with_options(
    name: str,
    schedule: Schedule,
    k: int,
    changed: tuple[str, ...] = (),
    ties: str = "strict",
    fused: bool = False,
    rows: int | None = None,
) -> Case:
    """All optional results, of the rows in order; `changed` names what changes their logits."""
    x = edge_rows(schedule)[:rows]
    count, vocabulary = x.shape
    rng = np.random.default_rng(k)
    arrays: dict[str, Any] = {
        "temperatures": rng.choice(TEMPERATURES, count).astype(np.float32),
        "extra_token_ids": rng.integers(-1, vocabulary + 1, (count, 2)).astype(np.int32),
        **changes_of(rng, count, vocabulary, changed),
    }
    token_ids = rng.integers(0, vocabulary, count).astype(np.int32)
    if "allowed" in arrays:  # few tokens, in two groups and at the end
        arrays["allowed"][0] = bits_of([1, 5, 300, vocabulary - 1], vocabulary)
    if "bias" in arrays:
        token_ids[0] = oracle.greedy_token_id(x[0])
        arrays["bias_token_ids"][0, :3] = [token_ids[0], token_ids[0], 1]
        arrays["bias"][0, :3] = [-3, 1, 50]
    if fused:
        token_ids = np.array([oracle.greedy_token_id(row) for row in in_float64(x, arrays)])
    expected = oracle.topk_logprobs(x, token_ids, k, **arrays, rank_ties=ties)

    wanted = Outputs(k, inclusive=ties == "inclusive", **ALL)
    words = None if "allowed" not in arrays else jnp.asarray(arrays["allowed"].view(np.int32))
    biases = (jnp.asarray(arrays[part]) if "bias" in arrays else None for part in BIAS)
    rest = (
        None,
        jnp.asarray(arrays["temperatures"]),
        jnp.asarray(arrays["extra_token_ids"]),
        Changes(words, *biases) if changed else None,
    )
    logits = jnp.asarray(x)

    def call() -> Any:
        if fused:
            return kernel_calls.greedy_topk_logprobs(run, logits, wanted, *rest, schedule)
        ids = jnp.asarray(token_ids)
        return kernel_calls.topk_logprobs(run, logits, ids, wanted, None, *rest, schedule)

    def check(actual: Any) -> None:
        oracle.assert_matches(actual, expected)

    return Case(name, schedule, k, count, call, check)


BIAS = ("bias_token_ids", "bias")


def option_mutant_case() -> Case:
    """A quick case for spoiled kernels: a mask whose words begin between vectors."""
    return with_options("masks", Schedule(8195, "bfloat16", 128, 1, 1), 3, ("allowed",), rows=3)


def option_cases() -> list[Callable[[], Case]]:
    """Functions that make the cases, one by one."""
    bf16, f16, f32 = "bfloat16", "float16", "float32"
    mask, bias = ("allowed",), ("bias",)
    few = 10
    return [
        lambda: with_options("options", Schedule(8448, bf16, 256, 2, 1), 5),
        lambda: with_options(
            "options, odd, inclusive", chosen(64, 9001, 3, f32), 3, ties=INCLUSIVE
        ),
        lambda: with_options("options, fused", Schedule(8448, f32, 256, 1, 2), 2, fused=True),
        lambda: with_options("options, K = 0", Schedule(8192, f16, 128, 1, 2), 0),
        lambda: with_options("mask", Schedule(8448, bf16, 256, 2, 1), 20, mask),
        lambda: with_options("mask, odd", Schedule(8195, bf16, 128, 1, 1), 3, mask, rows=few),
        lambda: with_options("mask, float32, split", Schedule(12_290, f32, 256, 1, 2), 5, mask),
        lambda: with_options("mask, edges only", Schedule(4100, f16, 128, 1, 0), 0, mask, rows=few),
        lambda: with_options(
            "mask and bias", Schedule(8452, bf16, 128, 1, 1), 4, (*mask, *bias), INCLUSIVE
        ),
        lambda: with_options(
            "bias, fused", Schedule(8195, f16, 128, 1, 1), 2, bias, fused=True, rows=few
        ),
    ]


INCLUSIVE = "inclusive"
