"""Which ids a cut keeps: against sorting, on one device and on shards, and what it costs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipc.wire import KEPT_ALL, KEPT_MANY
from pallas_kernels.sampling import Truncation, kept_set, kept_sets
from tests.support import quick_compile
from tests.support.lowered import array, temporaries
from tests.support.shards import P, on_shards

R, V = 20, 2_600  # more than a block of rows, and of ids than a set may have
# Tokens to keep: around the sizes of groups and of parts that are listed together; all of them.
SIZES = [1, 2, 63, 64, 65, 127, 128, 129, 300, 1000, 1023, 1024, 1025, 2000, V, 5, 1, 7, 64, 3]


def a_case(dtype, seed=0):
    """Rows [R, V] with ties and -inf, their cuts, and the kept ids of each by sorting."""
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 3, (R, V)).astype(np.float32)
    x[rng.random((R, V)) < 0.3] = 1.5  # ties, which bfloat16 adds to
    x[15, rng.random(V) < 0.9] = -np.inf
    x[18, 100:] = -np.inf
    rows = np.asarray(jnp.asarray(x, dtype).astype(jnp.float32))
    kept, cuts = [], []
    for row, size in zip(rows, SIZES, strict=True):
        order = np.lexsort((np.arange(V), -row))
        order = order[row[order] > -np.inf][:size]
        last = order[-1]
        cut = (row[last], last) if size < V else (-np.inf, V - 1)
        kept.append(np.sort(order))
        cuts.append((*cut, -rng.random()))
    logit, ids, mass = zip(*cuts, strict=True)
    cut = Truncation(np.float32(logit), np.int32(ids), np.float32(mass))
    return jnp.asarray(x, dtype), jax.tree.map(jnp.asarray, cut), kept


def check(found, kept, cut, num_rows=R, vocab=V):
    assert found.token_ids.shape == (R, min(1024, vocab))
    for n, ids in enumerate(kept):
        got = np.asarray(found.token_ids[n])
        count = KEPT_ALL if len(ids) == vocab else KEPT_MANY if len(ids) > 1024 else len(ids)
        there = ids.tolist() if count > 0 else []
        if n >= num_rows:
            count, there = 0, []
        assert found.counts[n] == count, n
        assert got[: len(there)].tolist() == there
        assert (got[len(there) :] == -1).all()
        assert found.log_kept[n] == (cut.log_kept[n] if n < num_rows else 0)


@quick_compile.jit
def found_in(x, rows, num_rows, cut):
    return kept_sets(x, rows, num_rows, cut)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_ids_are_those_of_sorting(dtype):
    x, cut, kept = a_case(dtype)
    rows = jnp.arange(R, dtype=jnp.int32)
    for num_rows in (R, 16, 3, 0):
        check(found_in(x, rows, num_rows, cut), kept, cut, num_rows)
    # Other rows of more logits: those from `num_rows` on may be anything.
    more = jnp.concatenate([jnp.full((7, V), jnp.nan, x.dtype), x])
    check(found_in(more, rows + 7, R, cut), kept, cut)
    check(found_in(more, jnp.where(rows < 4, rows + 7, 99), 4, cut), kept, cut, 4)


@pytest.mark.parametrize("shards", [pytest.param(2, marks=pytest.mark.chips), 3])
def test_shards_give_the_same(shards):
    """V does not divide by 3: the last shard has padding columns."""
    x, cut, kept = a_case("float32")
    rows = jnp.arange(R, dtype=jnp.int32)

    def call(part, shard):
        return kept_sets(part, rows, jnp.int32(R - 1), cut, shard=shard)

    found = on_shards(call, shards, x, V, P())
    check(found, kept, cut, R - 1)


def test_rows_that_keep_one_token_are_not_read(monkeypatch):
    """Greedy rows and invalid ones: the cut says it all."""
    reads = []
    real = kept_set.join_kept

    def joined(*args):
        jax.debug.callback(lambda: reads.append(1))
        return real(*args)

    monkeypatch.setattr(kept_set, "join_kept", joined)
    x = jnp.full((R, V), jnp.nan)
    ids = jnp.arange(R, dtype=jnp.int32) * 3
    call = quick_compile.jit(lambda *args: kept_sets(*args))

    def found(num_rows, cut):
        """The sets, and how often rows were read for them."""
        reads.clear()
        sets = jax.block_until_ready(call(x, ids, jnp.int32(num_rows), cut))
        jax.effects_barrier()
        return sets, len(reads)

    cut = Truncation.greedy(ids)
    sets, number = found(R, cut)
    assert number == 0
    assert sets.counts.tolist() == [1] * R
    assert sets.token_ids.tolist() == [[3 * i] + [-1] * 1023 for i in range(R)]
    one_sampled = cut._replace(cut_logit=cut.cut_logit.at[R - 1].set(0.0))
    assert found(R - 1, one_sampled)[1] == 0  # that row is not wanted
    assert found(R, one_sampled)[1] == 1


def test_a_small_vocabulary_that_is_kept_whole_is_marked():
    x = jnp.zeros((R, 3)).at[1, 2].set(-jnp.inf)
    everything = Truncation.nothing((R,), 3)
    found = found_in(x, jnp.arange(R, dtype=jnp.int32), R, everything)
    assert found.counts.tolist() == [KEPT_ALL, 2] + [KEPT_ALL] * (R - 2)
    assert found.token_ids[1].tolist() == [0, 1, -1]  # a masked token is not kept


def test_temporaries_are_one_block_of_rows():
    rows, vocab = 256, 32_000

    def sorted_instead(x, rows, num_rows, cut):
        """A negative control."""
        x = x.astype(jnp.float32)
        kept = cut.keeps(x, jnp.broadcast_to(rows[:, None], x.shape))
        return jax.lax.top_k(jnp.where(kept, x, 0), 1024)

    cut = jax.eval_shape(lambda: Truncation.nothing((rows,), vocab))
    most = 2 * kept_set.KEPT_BLOCK * vocab * 4 + 2 * rows * 1024 * 4  # a block of rows, and the ids
    for dtype in ("float32", "bfloat16"):
        given = array((rows, vocab), dtype), array((rows,)), array(()), cut
        assert temporaries(kept_sets, *given) < most
        assert temporaries(sorted_instead, *given) > 4 * most
