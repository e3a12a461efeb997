"""`verify` exported with any batch, and under vmap: what it gives in one plain call."""

import chex
import jax
import jax.numpy as jnp
from jax import export

from pallas_kernels.sampling import emitted_logprobs, verify
from pallas_kernels.testing import checks
from pallas_kernels.testing.shapes import Shape
from tests.support import quick_compile


def verified(logits, *given):
    found = verify(logits, *given, k=3)
    return found[:3], emitted_logprobs(logits, found.token_ids, found.read)[:4]


VERIFIED = quick_compile.jit(verified)


def batch():
    return checks.verification(Shape(8, 1300, 3, "float32"))


def test_of_a_symbolic_number_of_slots():
    (slots,) = export.symbolic_shape("B")
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct((slots, *x.shape[1:]), x.dtype), batch())
    exported = export.export(jax.jit(verified))(*types)
    chex.assert_trees_all_equal(exported.call(*batch()), VERIFIED(*batch()))


def test_of_several_batches():
    other = jax.tree.map(lambda x: x[::-1], batch())
    two = jax.tree.map(lambda *x: jnp.stack(x), batch(), other)
    found = quick_compile.jit(jax.vmap(verified))(*two)
    expected = [VERIFIED(*one) for one in (batch(), other)]
    chex.assert_trees_all_equal(found, jax.tree.map(lambda *x: jnp.stack(x), *expected))
