"""The GPU kernels' read of sampled rows without a GPU: schedules, lowering, choice.

What the machine code looks like is checked by `python -m bench.aot --options --check`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import VocabShard
from pallas_kernels.backends.mosaic_gpu.schedule import choose_fixed_schedule
from pallas_kernels.backends.read import read_groups
from pallas_kernels.lowering import choose
from pallas_kernels.sampling.rows import GroupedRows
from pallas_kernels.testing import shapes


def reader(k, implementation=None, shard=None):
    def call(logits, inverse, needed):
        rows = GroupedRows.of(logits) if shard is None else GroupedRows.of(logits, shard)
        return read_groups(rows.part, inverse, needed, k, implementation)[0]

    return call


def kernels_of(function, vocabulary, platform="cuda", batch=()):
    """How many kernels a program for the platform has."""
    numbers = jax.ShapeDtypeStruct((*batch, 8), jnp.float32)
    counts = jax.ShapeDtypeStruct((*batch, 8), jnp.int32)
    logits = jax.ShapeDtypeStruct((*batch, 8, vocabulary), jnp.bfloat16)
    program = jax.jit(function).trace(logits, numbers, counts)
    text = program.lower(lowering_platforms=(platform,)).as_text()
    return text.count("custom_call @mosaic_gpu")


@pytest.mark.parametrize("vocabulary", [*shapes.VOCABULARIES.values(), 300, 2048, 4097, 50_260])
def test_groups_are_those_of_the_contract(vocabulary):
    """Multiples of 256 in every row; each block is read by one program."""
    for rows in (1, 64, 2048):
        schedule = choose_fixed_schedule(rows, vocabulary, "bfloat16")
        assert schedule.group_width == 256
        assert schedule.skew(np.int32(7)) == 0
        steps = range(schedule.num_steps * schedule.blocks_per_step)
        assert sorted((*steps, *schedule.edges)) == list(range(schedule.num_blocks))
        assert len(steps) * schedule.block <= vocabulary  # a step goes beyond no row
        assert schedule.num_groups * 256 >= vocabulary
        assert schedule.splits <= schedule.num_steps


def test_one_pass_1_and_a_pass_2_for_each_number_of_candidates():
    """Pass 1, then one pass 2 of K = 20, 64 or 128 candidates; without K, of 64 or 128."""
    assert kernels_of(reader(20), 151_936) == 4
    assert kernels_of(reader(-1), 50_257) == 3


@pytest.mark.fast
def test_who_is_chosen():
    assert kernels_of(reader(-1), 4099, "cpu") == 0
    assert kernels_of(reader(-1, "xla"), 4099) == 0
    assert kernels_of(reader(-1), 2000) == 0
    assert kernels_of(jax.vmap(reader(-1)), 4099, batch=(2,)) == 0
    with pytest.raises(NotImplementedError, match="less than one block of 2048"):
        kernels_of(reader(-1, "mosaic_gpu"), 2000)
    with pytest.raises(NotImplementedError, match="no CUDA device"):
        kernels_of(reader(-1, "mosaic_gpu"), 4099, "cpu")
    with pytest.raises(ValueError, match="'gpu' is not known"):
        kernels_of(reader(-1, "gpu"), 4099)


def test_an_older_device_takes_xla(monkeypatch):
    monkeypatch.setattr(choose, "cuda_capability", lambda: 8.9)
    assert kernels_of(reader(-1), 4099) == 0
    with pytest.raises(NotImplementedError, match=r"compute capability 8\.9"):
        kernels_of(reader(-1, "mosaic_gpu"), 4099)


@pytest.mark.parametrize(("width", "kernels"), [(4096, 3), (4112, 6)])
def test_shards(width, kernels):
    """Where columns cut groups, the tail and the candidates have reads of their own."""
    mesh = jax.make_mesh(
        (4,), ("v",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4]
    )
    spec = jax.sharding.PartitionSpec

    def call(logits, inverse, needed):
        found = reader(-1, "mosaic_gpu", VocabShard("v"))(logits, inverse, needed)
        return found.groups.sums[None], found.top_ids[None]

    sharded = jax.shard_map(
        call, mesh=mesh, in_specs=(spec(None, "v"), spec(), spec()), out_specs=spec("v")
    )
    assert kernels_of(sharded, 4 * width) == kernels
