"""The cut of rows of min-p that keep many tokens: more candidates, and a search of whole rows."""

import chex
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.meshes.placement import WHOLE
from pallas_kernels.sampling.distribution import truncation
from tests.support import quick_compile
from tests.support.processed_probs import processed_probs
from tests.support.shards import P, on_shards
from tests.support.truncation_checks import check, sampling_of

V = 1100  # five groups, the last one short; more than the read's candidates, and than 1,024
KINDS = ("flat", "ties", "masked", "one group", "equal", "zeros", "large", "peaked")
MIN_P = (0.02, 0.05, 1e-30, 0.9, 0.1, 0.5, 0.02, 0.2)


def rows_of(dtype):
    """Rows [8, 2, V], one kind a slot; of all but the last, min-p keeps more than 64 tokens."""
    rng = np.random.default_rng(11)
    x = rng.normal(0, 0.5, (len(KINDS), 2, V))
    x[1] = np.round(2 * x[1]) / 2
    x[2] = np.where(rng.random(x[2].shape) < 0.7, -np.inf, x[2])
    x[3] -= 9
    x[3, :, 256:512] = rng.normal(0, 0.01, (2, 256))
    x[4] = 1
    x[5] = np.where(rng.random(x[5].shape) < 0.5, 0.0, -0.0)
    x[6] += 1000  # a step of bfloat16 there is wider than the gap
    x[7] *= 20
    return x.astype(dtype)


def sampling(top_k=0, top_p=1.0):
    temperature = [1.0, 0.7, 1.9, 1.0, 1e4, 0.3, 1.0, 1.0]
    return sampling_of(temperature, top_k, top_p, np.float32(MIN_P))


def both(rows, sampling):
    return truncation(rows, sampling), processed_probs(rows, sampling)


def test_kept_tokens_are_those_of_sorting():
    rows = rows_of(jnp.bfloat16)
    found = quick_compile.jit(both)(rows, sampling())
    assert check(rows, sampling(), *found) >= 12
    cut = jax.device_get(found[0])
    x = rows.astype(np.float32)
    tied = np.where(x == cut.cut_logit[..., None], np.arange(V), -1)
    np.testing.assert_array_equal(tied.max(axis=-1), cut.cut_id)  # the last of equal ones


def test_shards_give_the_same_bits():
    """Ragged shards are padded with NaN, and groups are split; one slot has more candidates."""
    asked = sampling(top_p=[0.9] + [1.0] * 7)

    def on_shard(x, shard):
        return truncation(x, asked, shard=shard)

    rows = rows_of(jnp.float32)
    cut = on_shards(on_shard, 2, rows, V, P())
    chex.assert_trees_all_equal(cut, quick_compile.jit(lambda x: on_shard(x, WHOLE))(rows))
