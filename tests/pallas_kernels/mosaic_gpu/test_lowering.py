"""The GPU kernels without a GPU: schedules, lowering, choice; of given rows and of sampled ones.

Lowering for CUDA runs Mosaic GPU's layout inference and its shared-memory check. What the machine
code looks like is checked by `python -m bench.aot --check`, with `--options` of sampled rows.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    VocabShard,
    topk_logprobs,
    use_implementation,
)
from pallas_kernels.backends import read
from pallas_kernels.backends.groups import Drawn, ListedRows, Needed, RowsToDraw
from pallas_kernels.backends.mosaic_gpu import compat, finish_kernel, limits, selection
from pallas_kernels.backends.mosaic_gpu import rows as run
from pallas_kernels.backends.mosaic_gpu.limits import cannot_run
from pallas_kernels.backends.mosaic_gpu.schedule import choose_read_schedule, choose_schedule
from pallas_kernels.backends.read import read_groups
from pallas_kernels.contract.changes import Changes
from pallas_kernels.contract.rows import Outputs
from pallas_kernels.sampling.rows import GroupedRows
from pallas_kernels.testing import shapes
from tests.support import kernel_calls, lowered
from tests.support.changed_logits import ALL
from tests.support.proved_kernels import proved_kernels  # noqa: F401
from tests.support.shards import P, mesh_of

SHARED_MEMORY = 227 * 1024  # per program, H100
SORTS = ("stablehlo.sort", "chlo.top_k")


def inputs(rows, vocabulary, dtype):
    """logits, token_ids, row_ids, num_rows, temperatures and extra_token_ids of a call."""
    kinds = (
        ((rows, vocabulary), dtype), ((rows,), "int32"), ((rows,), "int32"), ((), "int32"),
        ((rows,), "float32"), ((rows, 2), "int32"),
    )  # fmt: skip
    return [lowered.array(*kind) for kind in kinds]


@pytest.mark.parametrize(
    "vocabulary", [*shapes.VOCABULARIES.values(), 300, 2048, 2049, 4097, 50_260]
)
def test_schedules(vocabulary):
    """In every row every id belongs to one group and one part, each block is read by one program,
    and shared memory has room."""
    for rows, k, dtype in itertools.product(
        (1, 4, 64, 560, 2048), (None, 0, 20, 33, 512), ("bfloat16", "float32")
    ):
        if k is None:  # of sampled rows
            schedule, k = choose_read_schedule(rows, vocabulary, dtype), 0
        else:
            schedule = choose_schedule(rows, vocabulary, k, dtype)
        assert min(schedule.num_steps, 1) <= schedule.splits <= schedule.num_steps
        assert schedule.splits > 0 or schedule.edges
        in_steps = range(schedule.num_steps)
        assert sorted((*in_steps, *schedule.edges)) == list(range(schedule.num_blocks))
        assert len(in_steps) * schedule.block <= vocabulary <= schedule.num_groups * 256
        assert schedule.num_blocks * schedule.block == schedule.num_groups * 256
        assert schedule.num_parts * schedule.part_width == schedule.num_groups * 256
        assert schedule.part_width == (256 if k <= 32 else 128)
        assert schedule.num_groups <= schedule.padded_groups
        assert schedule.padded_groups % min(schedule.padded_groups, 1024) == 0
        assert schedule.block % math.prod(schedule.piece) == 0
        held = finish_kernel.all_scratch_types(schedule, Outputs(k, entropy=True), "given")
        assert sum(4 * math.prod(x.shape) for x in held) < SHARED_MEMORY
        assert selection.capacity(max(k, 1)) >= max(k, 1)


@pytest.mark.fast
@pytest.mark.parametrize("rows", [133, 256, 1536])
def test_no_row_is_a_cluster_of_three(rows):
    """Its programs take more registers than let five share a multiprocessor."""
    for vocabulary in range(3 * 4096, 160_000, 997):
        schedule = choose_schedule(rows, vocabulary, 20, "bfloat16")
        assert schedule.programs != 3 or schedule.splits == schedule.num_steps


# `.ci/heavy aot` compiles these and many more.
@pytest.mark.parametrize(
    ("rows", "vocabulary", "k", "dtype"),
    [
        (1536, 131_072, 20, "bfloat16"),
        pytest.param(4, 151_936, 5, "float32", marks=pytest.mark.fast),
        pytest.param(2048, 262_144, 0, "bfloat16", marks=pytest.mark.fast),
    ],
)
def test_lowers_for_cuda(rows, vocabulary, k, dtype):
    def call(logits, token_ids, *rest):
        return kernel_calls.topk_logprobs(run, logits, token_ids, Outputs(k), *rest)

    text = lowered.text_of(call, *inputs(rows, vocabulary, dtype))
    # Few rows keep more multiprocessors busy than a cluster each has programs.
    assert text.count(lowered.KERNELS[0]) == (2 if rows == 4 else 1)
    assert not any(operation in text for operation in SORTS)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("capability", "version", "obstacle"),
    [
        (7.5, (0, 12, 0), "capability 7.5, 8.0 is the least"),
        (7.5, (0, 10, 2), "capability 7.5, 9.0 is the least"),
        (8.0, (0, 10, 2), "9.0 is the least with jax 0.10 (8.0 with jax 0.11 and later)"),
        (8.0, (0, 11, 0), None),
        (8.6, (0, 11, 2), None),
        (9.0, (0, 10, 2), None),
        (12.0, (0, 12, 0), None),
    ],
)
def test_the_least_capability_is_that_of_the_jax_at_hand(capability, version, obstacle):
    said = limits.capability_obstacle(capability, version)
    assert said is None if obstacle is None else said.endswith(obstacle)


@pytest.mark.chips
@pytest.mark.fast
@pytest.mark.parametrize(
    ("capability", "kernels"), [(None, 1), (12.0, 1), (9.0, 1), (8.9, 2), (8.0, 2)]
)
def test_chips_without_clusters_take_two_launches(monkeypatch, capability, kernels):
    def call(logits, token_ids):
        return kernel_calls.topk_logprobs(run, logits, token_ids, Outputs(2))

    monkeypatch.setattr(limits, "cuda_capability", lambda: capability)
    assert lowered.kernels_of(call, *inputs(64, 32_768, "bfloat16")[:2]) == kernels


@pytest.mark.chips
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
        lambda x, ids: kernel_calls.row_sums(run, x, ids.astype(jnp.float32), *one),
    ):
        assert lowered.kernels_of(function, *given[:2]) == 2
    assert len(grids) == 4
    for *others, last in grids:
        assert last == 70_000
        assert max(others, default=1) <= 65_535


@pytest.mark.fast
def test_by_name_all_that_is_missing_is_said():
    """That there is no GPU, and then the shape."""
    with pytest.raises(NotImplementedError, match="run: there is no CUDA device here, and a voca"):
        topk_logprobs(
            np.zeros((2, 100), np.float32), np.zeros(2, np.int32), 1, implementation="mosaic_gpu"
        )


@pytest.mark.parametrize(("shape", "capability", "words"), [
    ((2, 4096), None, "no CUDA device"), ((2, 4096), 8.9, "compute capability 8.9"),
    ((2, 2047), 9.0, "less than one block of 2048"), ((16_384, 131_072), 9.0, "32-bit index"),
    ((2, 2048), 9.0, None), ((16_383, 131_072), 10.0, None),
])  # fmt: skip
def test_what_can_run(shape, capability, words):
    obstacle = cannot_run(jax.ShapeDtypeStruct(shape, jnp.bfloat16), capability)
    assert (obstacle is None) if words is None else (words in obstacle)


@pytest.mark.chips
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


def reader(k, implementation=None, *shard):
    def call(logits, inverse, needed):
        rows = GroupedRows.of(logits, *shard)
        with use_implementation(implementation):
            return read_groups(rows.part, inverse, Needed.all_of(needed), k)[0]

    return call


def reading(vocabulary):
    """The arrays of a read."""
    return ((8, vocabulary), "bfloat16"), ((8,), "float32"), ((8,), "int32")


def kernels_of(function, kinds, platform="cuda", batch=()):
    arrays = [lowered.array((*batch, *shape), dtype) for shape, dtype in kinds]
    return lowered.kernels_of(function, *arrays, platform=platform)


@pytest.mark.chips
def test_one_pass_1_and_a_pass_2_for_each_number_of_candidates():
    """Pass 1, then one pass 2 of K = 20, 64 or 128 candidates; without K, of 64 or 128."""
    assert kernels_of(reader(20), reading(151_936)) == 4
    assert kernels_of(reader(-1), reading(50_257)) == 3


@pytest.mark.chips
@pytest.mark.fast
def test_who_reads(monkeypatch):
    assert kernels_of(reader(-1), reading(4099), "cpu") == 0
    assert kernels_of(reader(-1, "xla"), reading(4099)) == 0
    assert kernels_of(reader(-1), reading(2000)) == 0
    assert kernels_of(jax.vmap(reader(-1)), reading(4099), batch=(2,)) == 0
    with pytest.raises(NotImplementedError, match="less than one block of 2048"):
        kernels_of(reader(-1, "mosaic_gpu"), reading(2000))
    monkeypatch.setattr(limits, "cuda_capability", lambda: 7.5)
    with pytest.raises(NotImplementedError, match=r"compute capability 7\.5"):
        kernels_of(reader(-1, "mosaic_gpu"), reading(4099))


@pytest.mark.chips
@pytest.mark.parametrize(("width", "kernels"), [(4096, 3), (4112, 4)])
def test_shards(width, kernels):
    """Where columns cut groups, the tail and the candidates have reads of their own."""

    def call(logits, inverse, needed):
        found = reader(-1, "mosaic_gpu", VocabShard("model"))(logits, inverse, needed)
        return found.groups.sums[None], found.top_ids[None]

    given = P(None, "model"), P(), P()
    sharded = jax.shard_map(call, mesh=mesh_of(4), in_specs=given, out_specs=P("model"))
    assert kernels_of(sharded, reading(4 * width)) == kernels


@pytest.mark.chips
@pytest.mark.parametrize(("width", "kernels"), [(4096, 2), (4112, 5)])
def test_rows_that_shards_have(width, kernels):
    """Both passes; where columns cut groups, the tail's groups and what is at both ends too."""

    def call(logits, ids):
        found = topk_logprobs(logits, ids, 2, axis_name="model", implementation="mosaic_gpu")
        return found.logprobs

    given = P(None, "model"), P()
    sharded = jax.shard_map(call, mesh=mesh_of(4), in_specs=given, out_specs=P(), check_vma=False)
    assert kernels_of(sharded, [((8, 4 * width), "bfloat16"), ((8,), "int32")]) == kernels


ROWS, SLOTS = 8, 2


def draws(logits, slots, floats, groups, taken):
    given = RowsToDraw(
        rows=slots, cut_logit=floats, cut_id=slots, excluded_ids=taken,
        seed=slots.astype(jnp.uint32), position=slots, maxima=groups, sums=groups,
        largest=groups[:, 0], inverse=groups[:, 0],
    )  # fmt: skip

    def by_xla(slots):  # anything of the right shape
        return Drawn(slots.astype(jnp.float32), slots)

    return read.draw(given, slots, (3, 1), by_xla, logits, lambda drawn, _: drawn)


def counts(logits, slots, floats, groups, taken):
    ids = jnp.zeros(ROWS, jnp.int32)
    return read.num_larger(logits, groups, ids), slots, floats, taken


def drawing(vocabulary, taken=1):
    """The arrays of a draw, and of a count of larger logits."""
    groups = ((ROWS, -(-vocabulary // 256)), "float32")
    slots = ((SLOTS,), "int32"), ((SLOTS,), "float32"), groups, ((SLOTS, taken), "int32")
    return (((ROWS, vocabulary), "bfloat16"), *slots)


@pytest.mark.chips
@pytest.mark.fast
@pytest.mark.parametrize("function", [draws, counts])
def test_who_draws_and_counts(function, monkeypatch):
    assert kernels_of(function, drawing(151_936)) == 1
    assert kernels_of(function, drawing(4099), "cpu") == 0
    assert kernels_of(function, drawing(2000)) == 0  # too short
    assert kernels_of(function, drawing(2**20 + 1)) == 0  # too many groups
    assert kernels_of(jax.vmap(function), drawing(4099), batch=(2,)) == 0
    monkeypatch.setattr(limits, "cuda_capability", lambda: 7.5)
    assert kernels_of(function, drawing(4099)) == 0


@pytest.mark.chips
@pytest.mark.fast
def test_candidates_of_valid_rows_are_the_kernels():
    def call(valid):
        def candidates(logits, slots, *_):
            return read.candidates(ListedRows(logits, slots, slots[0]), 5, valid=valid)

        return candidates

    assert kernels_of(call(True), drawing(4099)) == 1  # a cluster of two
    assert kernels_of(call(False), drawing(4099)) == 0
    assert kernels_of(call(True), drawing(4099), "cpu") == 0


@pytest.mark.chips
def test_taken_tokens_that_are_too_many():
    assert kernels_of(draws, drawing(4099, 128)) == 1
    assert kernels_of(draws, drawing(4099, 129)) == 0
