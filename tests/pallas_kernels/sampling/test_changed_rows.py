"""Verification of changed rows, bit for bit that of a copy that is changed first."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.contract.changes import Changes, apply, prepared
from pallas_kernels.sampling import CompactQ, Drafts, Sampling, verify
from tests.support import quick_compile

B, S, V, M = 8, 3, 2900, 3  # more than a cut's 1,024 candidates, and a group that is cut off
NAN, INF = np.nan, np.inf


def given(dtype):
    """Slots of every kind: greedy, whole, cut by each filter, flat; rows changed in each way."""
    rng = np.random.default_rng(5)
    x = rng.normal(0, 2, (B, S, V))
    x[4:6] = rng.normal(0, 0.1, (2, S, V))  # more tokens are kept than are candidates
    x[1, 0, 3], x[7, 2, 9] = NAN, INF
    ids = rng.integers(0, V, (B, S - 1, M)).astype(np.int32)
    ids[:, :, 0] = x[:, :-1].argmax(axis=-1)
    q = CompactQ(jnp.asarray(ids), jnp.full(ids.shape, np.log(1 / M), jnp.float32))
    drafts = Drafts(jnp.asarray(ids[:, :, 0]), jnp.full(B, S - 1, jnp.int32), q)
    sampling = Sampling(
        temperature=jnp.asarray([0, 1, 0.7, 1, 1, 1, 0, 1], jnp.float32),
        top_k=jnp.asarray([0, 0, 40, 0, 2000, 0, 0, 0], jnp.int32),
        top_p=jnp.asarray([1, 1, 1, 0.9, 1, 0.8, 1, 1], jnp.float32),
        min_p=jnp.asarray([0, 0, 0, 0, 0, 0, 0, 0.02], jnp.float32),
        seed=jnp.arange(B, dtype=jnp.uint32),
    )
    bias_ids = rng.integers(-1, V + 3, (B, S, 12)).astype(np.int32)
    bias_ids[..., :3] = ids[:, :1, :]  # tokens of q
    bias_ids[..., 3] = V - 1  # of the group that is cut off
    bias = rng.normal(0, 4, bias_ids.shape).astype(np.float32)
    allowed = rng.random((B, S, V)) < 0.9
    allowed[1, 0, 3], allowed[0], allowed[6, 2] = False, True, False
    padded = np.pad(allowed, ((0, 0), (0, 0), (0, -V % 32)))
    words = np.packbits(padded, axis=-1, bitorder="little").view(np.uint32)
    changes = {
        "allowed": jnp.asarray(words),
        "bias_token_ids": jnp.asarray(bias_ids),
        "bias": jnp.asarray(bias),
    }
    return jnp.asarray(x, dtype), drafts, sampling, changes


@pytest.mark.parametrize(
    "kind", ["both", *(pytest.param(one, marks=pytest.mark.slow) for one in ("allowed", "bias"))]
)
def test_verification_of_changed_rows(kind):
    dtype = jnp.bfloat16 if kind == "bias" else jnp.float32
    x, drafts, sampling, changes = given(dtype)
    changes = {
        name: value for name, value in changes.items() if kind == "both" or name.startswith(kind)
    }

    @quick_compile.jit
    def call(x, changes):
        rows = Changes(**{name: one.reshape(B * S, -1) for name, one in changes.items()})
        copy = apply(x.reshape(-1, V), prepared(rows, V)).reshape(x.shape)
        positions = jnp.arange(B, dtype=jnp.int32)
        ours = verify(x, drafts, sampling, positions, axis_name=(), **changes)
        copied = verify(copy, drafts, sampling, positions, axis_name=())
        return ours, copied, jnp.argmax(copy, axis=-1) != jnp.argmax(x, axis=-1)

    ours, copied, other = call(x, changes)
    jax.tree.map(np.testing.assert_array_equal, ours, copied)
    assert np.any(other)
    assert len(set(np.asarray(ours.num_tokens).tolist())) > 1
