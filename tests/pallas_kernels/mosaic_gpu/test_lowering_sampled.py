"""The GPU kernels' work for rows that are sampled, without a GPU: schedules, lowering, choice.

What the machine code looks like is checked by `python -m bench.aot --options --check`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import VocabShard
from pallas_kernels.backends import read
from pallas_kernels.backends.groups import Drawn, ListedRows, RowsToDraw
from pallas_kernels.backends.mosaic_gpu.schedule import choose_fixed_schedule
from pallas_kernels.backends.read import read_groups
from pallas_kernels.lowering import choose
from pallas_kernels.sampling.rows import GroupedRows
from pallas_kernels.testing import shapes
from tests.support import lowered
from tests.support.shards import P, mesh_of


def reader(k, implementation=None, *shard):
    def call(logits, inverse, needed):
        rows = GroupedRows.of(logits, *shard)
        return read_groups(rows.part, inverse, needed, k, implementation)[0]

    return call


def reading(vocabulary):
    """The arrays of a read."""
    return ((8, vocabulary), "bfloat16"), ((8,), "float32"), ((8,), "int32")


def kernels_of(function, kinds, platform="cuda", batch=()):
    arrays = [lowered.array((*batch, *shape), dtype) for shape, dtype in kinds]
    return lowered.kernels_of(function, *arrays, platform=platform)


@pytest.mark.parametrize("vocabulary", [*shapes.VOCABULARIES.values(), 300, 2048, 4097, 50_260])
def test_groups_are_those_of_the_contract(vocabulary):
    """Multiples of 256 in every row; each block is read by one program."""
    for rows in (1, 64, 2048):
        schedule = choose_fixed_schedule(rows, vocabulary, "bfloat16")
        assert schedule.group_width == 256
        assert schedule.skew(np.int32(7)) == 0
        steps = range(schedule.num_steps)
        assert sorted((*steps, *schedule.edges)) == list(range(schedule.num_blocks))
        assert len(steps) * schedule.block <= vocabulary  # a step goes beyond no row
        assert schedule.num_groups * 256 >= vocabulary
        assert schedule.splits <= schedule.num_steps


def test_one_pass_1_and_a_pass_2_for_each_number_of_candidates():
    """Pass 1, then one pass 2 of K = 20, 64 or 128 candidates; without K, of 64 or 128."""
    assert kernels_of(reader(20), reading(151_936)) == 4
    assert kernels_of(reader(-1), reading(50_257)) == 3


@pytest.mark.fast
def test_who_reads():
    assert kernels_of(reader(-1), reading(4099), "cpu") == 0
    assert kernels_of(reader(-1, "xla"), reading(4099)) == 0
    assert kernels_of(reader(-1), reading(2000)) == 0
    assert kernels_of(jax.vmap(reader(-1)), reading(4099), batch=(2,)) == 0
    with pytest.raises(NotImplementedError, match="less than one block of 2048"):
        kernels_of(reader(-1, "mosaic_gpu"), reading(2000))
    with pytest.raises(NotImplementedError, match="no CUDA device"):
        kernels_of(reader(-1, "mosaic_gpu"), reading(4099), "cpu")
    with pytest.raises(ValueError, match="'gpu' is not known"):
        kernels_of(reader(-1, "gpu"), reading(4099))


def test_an_older_device_takes_xla(monkeypatch):
    monkeypatch.setattr(choose, "cuda_capability", lambda: 8.9)
    assert kernels_of(reader(-1), reading(4099)) == 0
    with pytest.raises(NotImplementedError, match=r"compute capability 8\.9"):
        kernels_of(reader(-1, "mosaic_gpu"), reading(4099))


@pytest.mark.parametrize(("width", "kernels"), [(4096, 3), (4112, 4)])
def test_shards(width, kernels):
    """Where columns cut groups, the tail and the candidates have reads of their own."""

    def call(logits, inverse, needed):
        found = reader(-1, "mosaic_gpu", VocabShard("model"))(logits, inverse, needed)
        return found.groups.sums[None], found.top_ids[None]

    given = P(None, "model"), P(), P()
    sharded = jax.shard_map(call, mesh=mesh_of(4), in_specs=given, out_specs=P("model"))
    assert kernels_of(sharded, reading(4 * width)) == kernels


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


@pytest.mark.fast
@pytest.mark.parametrize("function", [draws, counts])
def test_who_draws_and_counts(function, monkeypatch):
    assert kernels_of(function, drawing(151_936)) == 1
    assert kernels_of(function, drawing(4099), "cpu") == 0
    assert kernels_of(function, drawing(2000)) == 0  # too short
    assert kernels_of(function, drawing(2**20 + 1)) == 0  # too many groups
    assert kernels_of(jax.vmap(function), drawing(4099), batch=(2,)) == 0
    monkeypatch.setattr(choose, "cuda_capability", lambda: 8.9)
    assert kernels_of(function, drawing(4099)) == 0


@pytest.mark.fast
def test_candidates_of_valid_rows_are_the_kernels():
    def call(valid):
        def candidates(logits, slots, *_):
            return read.candidates(ListedRows(logits, slots, slots[0]), 5, valid=valid)

        return candidates

    assert kernels_of(call(True), drawing(4099)) == 2
    assert kernels_of(call(False), drawing(4099)) == 0
    assert kernels_of(call(True), drawing(4099), "cpu") == 0


def test_taken_tokens_that_are_too_many():
    assert kernels_of(draws, drawing(4099, 128)) == 1
    assert kernels_of(draws, drawing(4099, 129)) == 0
