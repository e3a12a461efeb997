"""Verification of changed rows, bit for bit that of a copy that is changed first."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.contract.changes import Changes, apply, prepared
from pallas_kernels.sampling import CompactQ, Drafts, Sampling, logprobs_of_read, verify
from tests.support import quick_compile

B, S, V, M = 8, 3, 2900, 3  # more than a cut's 1,024 candidates, and a group that is cut off
NAN, INF = np.nan, np.inf


def given():
    """Slots of every kind: greedy, whole, cut by each filter, flat; rows changed in each way."""
    rng = np.random.default_rng(5)
    x = rng.normal(0, 2, (B, S, V))
    x[4:6] = rng.normal(0, 0.1, (2, S, V))  # more tokens are kept than are candidates
    x[1, 0, 3], x[7, 2, 9] = NAN, INF
    ids = rng.integers(0, V, (B, S - 1, M)).astype(np.int32)
    ids[:, :, 0] = x[:, :-1].argmax(axis=-1)
    q = CompactQ(jnp.asarray(ids), jnp.full(ids.shape, np.log(1 / M), jnp.float32))
    drafts = Drafts(jnp.asarray(ids[:, :, 0]), jnp.full(B, S - 1, jnp.int32), q)
    sampling = Sampling.of(
        B, temperature=[0, 1, 0.7, 1, 1, 1, 0, 1], top_k=[0, 0, 40, 0, 2000, 0, 0, 0],
        top_p=[1, 1, 1, 0.9, 1, 0.8, 1, 1], min_p=[*[0] * 7, 0.02], seed=np.arange(B),
    )  # fmt: skip
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
    return jnp.asarray(x, jnp.float32), drafts, sampling, changes


def flat(tree):
    return jax.tree.map(lambda one: one.reshape(B * S, *one.shape[2:]), tree)


def verified(x, drafts, sampling, changes):
    """Verification of changed rows, of a copy and of the rows alone, each with its logprobs."""
    copy = apply(x.reshape(-1, V), prepared(Changes(**flat(changes)), V)).reshape(x.shape)
    positions, where = jnp.arange(B, dtype=jnp.int32), {"axis_name": ()}
    ours = verify(x, drafts, sampling, positions, k=20, **where, **changes)
    copied = verify(copy, drafts, sampling, positions, k=20, **where)
    other = jnp.argmax(copy, axis=-1) != jnp.argmax(x, axis=-1)
    own = verify(x, drafts, sampling, positions, k=20, **where)
    named = {"scaled": jnp.ones(B, bool), "extra_token_ids": jnp.full((B, 2), V - 1, jnp.int32)}
    rows = jnp.arange(B * S, dtype=jnp.int32).reshape(B, S)
    ids = jnp.where(jnp.arange(S) % 2 == 0, 7, ours.token_ids)  # some of them far down
    logprobs = (
        logprobs_of_read(x, ids, ours.changed_read, **named, **where, **changes),
        logprobs_of_read(copy, ids, copied.read, **named, **where),
        logprobs_of_read(flat(x), ids, flat(ours.changed_read), row_ids=rows, **named, **where,
                         **flat(changes)),
    )  # fmt: skip
    return ours, copied, other, own, logprobs


@pytest.mark.long
def test_verification_of_changed_rows():
    """One read leaves two: the bits of a read of the copy, and of the rows themselves."""
    x, drafts, sampling, changes = given()
    ours, copied, other, own, (found, *others) = quick_compile.jit(verified)(
        x, drafts, sampling, changes
    )
    jax.tree.map(np.testing.assert_array_equal, ours[:3], copied[:3])
    assert np.any(other)
    assert len(set(np.asarray(ours.num_tokens).tolist())) > 1
    jax.tree.map(np.testing.assert_array_equal, ours.read, own.read)
    at_one = np.asarray(sampling.temperature)[:, None] % 1 == 0
    log_sum = np.where(at_one, copied.read.log_sum, NAN)
    expected = copied.read._replace(log_sum=log_sum)
    jax.tree.map(np.testing.assert_array_equal, ours.changed_read, expected)
    for other in others:
        np.testing.assert_array_equal(found.token_ids, other.token_ids)
        np.testing.assert_array_equal(found.token_ranks, other.token_ranks)
        for name in ("logprobs", "extra_logprobs"):
            np.testing.assert_allclose(getattr(found, name), getattr(other, name), rtol=3e-7)
    assert np.isfinite(found.logprobs[:, 0]).sum() > B
    assert (found.token_ranks > 20).sum() > B // 2
