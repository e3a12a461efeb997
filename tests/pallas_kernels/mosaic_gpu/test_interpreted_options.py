"""The GPU kernels' optional results and changed logits, interpreted, against the oracle.

The compiled forms of the same calls are executed by `.ci/heavy ptx`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backends.mosaic_gpu import mask
from pallas_kernels.backends.mosaic_gpu import rows as run
from pallas_kernels.backends.mosaic_gpu.tiling import Tiling
from pallas_kernels.contract.changes import Changes
from pallas_kernels.contract.types import Outputs
from pallas_kernels.testing import oracle
from tests.support import kernel_calls
from tests.support.changed_logits import ALL, bits_of, changes_of, in_float64
from tests.support.interpreted_kernels import run_without_races

# Rows that start between two vectors and between two words; split rows and edges; a K of 0.
CASES = {
    "odd bfloat16": (Tiling(8195, "bfloat16", 128, 1, 1), 2, "strict", ("allowed", "bias")),
    "float32": (Tiling(4868, "float32", 256, 1, 1), 3, "inclusive", ("bias",)),
    "float16": (Tiling(4100, "float16", 128, 1, 0), 0, "strict", ("allowed",)),
    "nothing changed": (Tiling(4352, "bfloat16", 128, 1, 1), 2, "inclusive", ()),
}


def rows_of(tiling):
    return oracle.edge_rows(tiling.vocabulary, tiling.dtype, tiling.group_width)


def arguments(x, vocabulary, changed):
    rng = np.random.default_rng(vocabulary)
    rows = len(x)
    token_ids = rng.integers(0, vocabulary, rows).astype(np.int32)
    token_ids[:3] = [oracle.greedy_token_id(x[0]), 2, vocabulary]
    arrays = {
        "temperatures": rng.choice(np.array([0, 0.5, 1, 2], np.float32), rows),
        "extra_token_ids": rng.integers(-1, vocabulary + 1, (rows, 2)).astype(np.int32),
        **changes_of(rng, rows, vocabulary, changed),
    }
    if "bias" in arrays:  # the row's largest token, unbiased ties of biased ones, and no token
        arrays["bias_token_ids"][0, :3] = [token_ids[0], token_ids[0], 1]
        arrays["bias"][0, :3] = [-3, 1, 50]
    if "allowed" in arrays:  # two groups of one row, and in another only what a bias names
        arrays["allowed"][0] = bits_of([1, 5, 300, vocabulary - 1], vocabulary)
        arrays["allowed"][1] = bits_of([2], vocabulary)
    return token_ids, arrays


def kernel_arguments(arrays):
    """Positional arguments after `Outputs`, and the changes."""
    words = arrays.get("allowed")
    changes = Changes(
        None if words is None else words.view(np.int32),
        arrays.get("bias_token_ids"),
        arrays.get("bias"),
    )
    return (
        arrays["temperatures"],
        arrays["extra_token_ids"],
        changes if any(part is not None for part in changes) else None,
    )


@pytest.mark.parametrize("name", CASES)
def test_separate_path(name):
    tiling, k, ties, changed = CASES[name]
    x = rows_of(tiling)
    token_ids, arrays = arguments(x, tiling.vocabulary, changed)
    wanted = Outputs(k, inclusive=ties == "inclusive", **ALL)

    def call(x, token_ids, count, rest, interpret):
        temperatures, extra, changes = rest
        given = (None, count, temperatures, extra, changes)
        return kernel_calls.topk_logprobs(run, x, token_ids, wanted, *given, tiling, interpret)

    found = run_without_races(call, x, token_ids, np.int32(len(x)), kernel_arguments(arrays))
    oracle.assert_matches(found, oracle.topk_logprobs(x, token_ids, k, **arrays, rank_ties=ties))


@pytest.mark.parametrize(
    ("changed", "ties"),
    [
        (("allowed", "bias"), "strict"),
        pytest.param((), "strict", marks=pytest.mark.slow),
        pytest.param(("allowed",), "inclusive", marks=pytest.mark.slow),
    ],
)
def test_fused_path(changed, ties):
    """The choice among the changed logits, of rows that the changes make valid or invalid too."""
    tiling = Tiling(2056, "bfloat16", 128, 1, 1)
    x = rows_of(tiling)
    _, arrays = arguments(x, tiling.vocabulary, changed)
    wanted = Outputs(1, inclusive=ties == "inclusive", **ALL)

    def call(x, rest, interpret):
        return kernel_calls.greedy_topk_logprobs(run, x, wanted, None, *rest, tiling, interpret)

    found = run_without_races(call, x, kernel_arguments(arrays))
    chosen = [oracle.greedy_token_id(row) for row in in_float64(x, arrays)]
    oracle.assert_matches(found, oracle.topk_logprobs(x, chosen, 1, **arrays, rank_ties=ties))


def test_a_wrong_mask_would_be_seen(monkeypatch):
    """Negative control: the bits of the words beside."""
    tiling = Tiling(2056, "float16", 128, 1, 1)
    x = rows_of(tiling)[:1]
    token_ids = np.zeros(1, np.int32)
    words = np.stack([bits_of([1, 5, 300], tiling.vocabulary)])
    right = mask.allowed
    monkeypatch.setattr(
        "pallas_kernels.backends.mosaic_gpu.mask.allowed", lambda m, ids, t: right(m, ids + 1, t)
    )

    def call(x, token_ids, words, interpret):
        rest = (None, None, None, jnp.zeros((1, 0), jnp.int32), Changes(words))
        return kernel_calls.topk_logprobs(run, x, token_ids, Outputs(1), *rest, tiling, interpret)

    found = run_without_races(call, x, token_ids, words.view(np.int32))
    with pytest.raises(AssertionError):
        oracle.assert_matches(found, oracle.topk_logprobs(x, token_ids, 1, allowed=words))


@pytest.mark.parametrize("k", [3, 0])
def test_plain_calls_take_the_plain_kernels(k):
    """What is not asked for leaves no argument, result or operation behind."""

    def kernels(wanted, changes):
        def call(x, ids):
            extra = jnp.zeros((4, 0), jnp.int32)
            return kernel_calls.topk_logprobs(run, x, ids, wanted, None, None, None, extra, changes)

        arrays = jax.ShapeDtypeStruct((4, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((4,), "int32")
        text = jax.jit(call).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
        return [line for line in text.split("\n") if "custom_call @mosaic_gpu" in line]

    plain = kernels(Outputs(k), None)
    assert len(plain) == 2
    first, second = kernels(Outputs(k, **ALL), None)
    assert (first, second) != tuple(plain)
    assert kernels(Outputs(k, log_sum_exp=True), None)[0] == plain[0]
    assert len(kernels(Outputs(k), Changes(jnp.zeros((4, 128), jnp.int32)))) == 2
