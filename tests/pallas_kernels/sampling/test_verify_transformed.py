"""`verify` exported with a symbolic batch, and under vmap: what it gives in one plain call."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from pallas_kernels.sampling import CompactQ, Drafts, Sampling, emitted_logprobs, verify
from tests.support import quick_compile

B, S, V = 4, 3, 1300


def verified(logits, ids, num, log_q, sampling, positions):
    q = CompactQ(jnp.stack([ids, (ids + 1) % V], -1), log_q)
    found = verify(logits, Drafts(ids, num, q), sampling, positions, k=3)
    return found[:3], emitted_logprobs(logits, found.token_ids, found.read)[:4]


@functools.cache
def batch():
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 2, (B, S, V)).astype(np.float32)
    ids = logits[:, :-1].argmax(-1).astype(np.int32)
    log_q = np.log(np.broadcast_to(np.float32([0.6, 0.4]), (B, S - 1, 2)))
    sampling = Sampling.of(
        B, temperature=np.float32([0, 1, 0.8, 1.2]), top_k=np.int32([0, 0, 30, 0]),
        top_p=np.float32([1, 0.9, 1, 1]), min_p=np.float32([0, 0, 0, 0.01]), seed=np.arange(B),
    )  # fmt: skip
    num = jnp.full(B, S - 1, jnp.int32)
    return jnp.asarray(logits), jnp.asarray(ids), num, jnp.asarray(log_q), sampling, jnp.arange(B)


def test_of_a_symbolic_number_of_slots():
    (slots,) = export.symbolic_shape("B")
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct((slots, *x.shape[1:]), x.dtype), batch())
    exported = export.export(jax.jit(verified))(*types)
    for count in (B, 1):
        given = jax.tree.map(lambda x: x[:count], batch())  # noqa: B023
        chex.assert_trees_all_equal(exported.call(*given), quick_compile.jit(verified)(*given))


def test_of_several_batches():
    other = jax.tree.map(lambda x: x[::-1], batch())
    two = jax.tree.map(lambda *x: jnp.stack(x), batch(), other)
    found = quick_compile.jit(jax.vmap(verified))(*two)
    expected = [quick_compile.jit(verified)(*one) for one in (batch(), other)]
    chex.assert_trees_all_equal(found, jax.tree.map(lambda *x: jnp.stack(x), *expected))
