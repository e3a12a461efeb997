"""The GPU kernels without a GPU or an interpreter: schedules, lowering, choice.

Lowering for CUDA runs Mosaic GPU's layout inference and its shared-memory check. What the machine
code looks like is checked by `python -m bench.aot --check`.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import greedy_topk_logprobs, topk_logprobs
from pallas_kernels.backends.mosaic_gpu import compat, finish_kernel
from pallas_kernels.backends.mosaic_gpu import rows as run
from pallas_kernels.backends.mosaic_gpu.schedule import choose_schedule
from pallas_kernels.contract.changes import Changes
from pallas_kernels.contract.rows import Outputs
from pallas_kernels.lowering import choose
from pallas_kernels.testing import shapes
from tests.support import kernel_calls, lowered
from tests.support.changed_logits import ALL

SHARED_MEMORY = 227 * 1024  # per program, H100
SORTS = ("stablehlo.sort", "chlo.top_k")


def inputs(rows, vocabulary, dtype):
    """logits, token_ids, row_ids, num_rows, temperatures and extra_token_ids of a call."""
    kinds = (
        ((rows, vocabulary), dtype), ((rows,), "int32"), ((rows,), "int32"), ((), "int32"),
        ((rows,), "float32"), ((rows, 2), "int32"),
    )  # fmt: skip
    return [lowered.array(*kind) for kind in kinds]


@pytest.mark.parametrize("vocabulary", [*shapes.VOCABULARIES.values(), 2048, 2049, 4097, 50_260])
def test_schedules(vocabulary):
    """In every row every id belongs to one group, and loads of steps are whole and aligned."""
    for rows, k, dtype, row in itertools.product(
        (1, 4, 64, 560, 2048), (0, 20, 33, 512), ("bfloat16", "float32"), (0, 1, 2, 7, 1001)
    ):
        schedule = choose_schedule(rows, vocabulary, k, dtype)
        assert schedule.splits <= schedule.num_steps
        assert schedule.splits > 0 or schedule.edges
        skew = schedule.skew(row)
        assert skew == row * vocabulary % (16 // jnp.dtype(dtype).itemsize)
        last = schedule.first_block + schedule.num_steps
        in_steps = range(schedule.first_block, last)
        assert sorted((*in_steps, *schedule.edges)) == list(range(schedule.num_blocks))
        end = 0
        for block in range(schedule.num_blocks):
            start, begin, past = map(int, schedule.block_ids(block, skew))
            owned = max(begin, 0), min(past, vocabulary)
            assert owned[0] == min(end, vocabulary)
            assert 0 <= start <= owned[0] or owned[0] >= owned[1]
            assert owned[1] <= start + schedule.block <= vocabulary or owned[0] >= owned[1]
            end = max(end, owned[1])
            if block in in_steps:
                assert (start, start + schedule.block) == (begin, past) == owned
                assert (row * vocabulary + start) % schedule.vector == 0
        assert end == vocabulary
        assert schedule.num_blocks * schedule.groups_per_block == schedule.num_groups
        assert schedule.num_groups <= schedule.padded_groups
        loaded = math.prod(schedule.piece(schedule.vector))
        assert schedule.block % loaded == 0
        assert loaded == 128 * schedule.vector
        held = finish_kernel.scratch_types(schedule, max(k, 1))
        assert sum(4 * math.prod(x.shape) for x in held) < SHARED_MEMORY
        assert finish_kernel.capacity(max(k, 1)) >= max(k, 1)


# `.ci/heavy aot` compiles these and many more.
@pytest.mark.parametrize(
    ("path", "rows", "vocabulary", "k", "dtype"),
    [
        ("separate", 1536, 131_072, 20, "bfloat16"),
        pytest.param("separate", 4, 151_936, 5, "float32", marks=pytest.mark.fast),
        pytest.param("fused", 2048, 262_144, 0, "bfloat16", marks=pytest.mark.fast),
    ],
)
def test_lowers_for_cuda(path, rows, vocabulary, k, dtype):
    def call(logits, token_ids, *rest):
        if path == "fused":
            return kernel_calls.greedy_topk_logprobs(run, logits, Outputs(k), *rest[1:])
        return kernel_calls.topk_logprobs(run, logits, token_ids, Outputs(k), *rest)

    text = lowered.text_of(call, *inputs(rows, vocabulary, dtype))
    # Few rows keep more multiprocessors busy than a cluster each has programs.
    assert text.count(lowered.KERNELS[0]) == (2 if rows == 4 else 1)
    assert not any(operation in text for operation in SORTS)


def test_more_rows_than_a_grid_has_elsewhere(monkeypatch):
    """A grid's y and z end at 65535; its x, the last axis in Pallas, at 2**31 - 1."""
    grids = []

    def recorded(body, *, grid, **options):
        grids.append(grid)
        return kernel(body, grid=grid, **options)

    kernel = compat.GPU.kernel
    monkeypatch.setattr(compat.GPU, "kernel", recorded)
    given, one = inputs(70_000, 2048, "bfloat16"), (Outputs(1), None, None, None)
    for function in (
        lambda x, ids: kernel_calls.topk_logprobs(run, x, ids, *one, ids[:, None]),
        lambda x, ids: kernel_calls.greedy_topk_logprobs(run, x, *one[:3], ids[:, None]),
        lambda x, ids: kernel_calls.row_sums(run, x, ids.astype(jnp.float32), *one),
    ):
        assert lowered.kernels_of(function, *given[:2]) == 2
    assert len(grids) == 6
    for *others, last in grids:
        assert last == 70_000
        assert max(others, default=1) <= 65_535


@pytest.mark.fast
def test_choice_without_a_gpu():
    """None means XLA here; asking for the GPU kernels says why not: that, and then the shape."""
    x, ids = np.zeros((2, 4096), np.float32), np.zeros(2, np.int32)
    assert topk_logprobs(x, ids, 1).token_ids.tolist() == [[0, 0], [0, 0]]
    for call, words in (
        (lambda **how: topk_logprobs(x, ids, 1, **how), "no CUDA device"),
        (lambda **how: greedy_topk_logprobs(x, 1, **how), "no CUDA device"),
        (lambda **how: topk_logprobs(x[:, :100], ids, 1, **how),
         "run: there is no CUDA device here, and a voca"),
    ):  # fmt: skip
        with pytest.raises(NotImplementedError, match=words):
            call(implementation="mosaic_gpu")


@pytest.mark.parametrize(
    ("shape", "capability", "words"),
    [
        ((2, 4096), None, "no CUDA device"),
        ((2, 4096), 8.9, "compute capability 8.9"),
        ((2, 2047), 9.0, "less than one block of 2048"),
        ((16_384, 131_072), 9.0, "32-bit index"),
        ((2, 2048), 9.0, None),
        ((16_383, 131_072), 10.0, None),
    ],
)
def test_what_can_run(shape, capability, words):
    obstacle = choose.cannot_run(jax.ShapeDtypeStruct(shape, jnp.bfloat16), capability)
    assert (obstacle is None) if words is None else (words in obstacle)


@pytest.mark.parametrize("k", [3, 0])
def test_plain_calls_take_the_plain_kernels(k):
    """What is not asked for leaves no argument, result or operation behind."""

    def kernels(wanted, changes):
        def call(x, ids):
            extra = jnp.zeros((4, 0), jnp.int32)
            return kernel_calls.topk_logprobs(run, x, ids, wanted, None, None, None, extra, changes)

        text = lowered.text_of(call, *inputs(4, 4096, "bfloat16")[:2])
        return [line for line in text.split("\n") if lowered.KERNELS[0] in line]

    plain = kernels(Outputs(k), None)
    assert len(plain) == 2
    first, second = kernels(Outputs(k, **ALL), None)
    assert (first, second) != tuple(plain)
    assert kernels(Outputs(k, log_sum_exp=True), None)[0] == plain[0]
    assert len(kernels(Outputs(k), Changes(jnp.zeros((4, 128), jnp.int32)))) == 2
