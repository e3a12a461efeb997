"""Verification that draws and ranks by the GPU kernels, interpreted, beside XLA's."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backends import read
from pallas_kernels.backends.mosaic_gpu import count_larger, draw
from pallas_kernels.sampling.parameters import Sampling
from pallas_kernels.sampling.row_read import emitted_logprobs
from pallas_kernels.sampling.types import CompactQ, Drafts
from pallas_kernels.sampling.verification import verify
from tests.support import quick_compile
from tests.support.interpreted_kernels import checked, interpret

B, S, V, M = 8, 3, 4099, 4


def given():
    """Slots of all kinds: greedy, plain, cut widely and narrowly; drafts mostly rejected."""
    rng = np.random.default_rng(0)
    logits = (rng.normal(size=(B, S, V)) * 2).astype(np.float32)
    ids = rng.integers(0, V, (B, S - 1, M)).astype(np.int32)
    ids[:, :, 0] = logits[:, :-1].argmax(axis=-1)
    q = CompactQ(jnp.asarray(ids), jnp.full(ids.shape, np.log(1 / M), jnp.float32))
    tokens = ids[:, :, 1]
    tokens[0] = ids[0, :, 0]  # which the greedy request accepts
    drafts = Drafts(jnp.asarray(tokens), jnp.asarray([2, 2, 2, 0, 1, 2, 2, 2], jnp.int32), q)
    sampling = Sampling(
        temperature=jnp.asarray([0, 1, 0.7, 1, 1, 1, 1.5, 1], jnp.float32),
        top_k=jnp.asarray([0, 0, 0, 0, 900, 5, 0, 0], jnp.int32),
        top_p=jnp.asarray([1, 1, 1, 1, 1, 1, 0.9, 1], jnp.float32),
        min_p=jnp.asarray([0, 0, 0, 0, 0, 0, 0, 0.02], jnp.float32),
        seed=jnp.arange(B, dtype=jnp.uint32),
    )
    return jnp.asarray(logits), drafts, sampling, jnp.arange(B, dtype=jnp.int32)


def verified():
    def call(*arguments):
        found = verify(*arguments, k=2)
        logprobs = emitted_logprobs(arguments[0], found.token_ids, found.read)
        return found.token_ids, found.num_tokens, logprobs.token_ranks

    return checked(jax.jit(call, compiler_options=quick_compile.OPTIONS), *given())


@pytest.mark.slow
def test_tokens_and_ranks_are_those_of_xla(monkeypatch):
    expected = verified()
    used = []

    def drawn(*arguments):
        return draw.draw(*arguments, interpret())

    def counted(*arguments):
        return count_larger.count_larger(*arguments, interpret())

    kernels = SimpleNamespace(draw=drawn, count_larger=counted)

    def chosen(job, by_kernels, by_xla, *arguments, backends=(), **_):
        if backends != ("mosaic_gpu",):
            return by_xla(*arguments)
        used.append(job)
        return by_kernels(kernels, *arguments)

    monkeypatch.setattr(read, "kernels_or_xla", chosen)
    found = verified()
    assert used == ["draw", "count_larger"]
    for mine, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, other)
    assert (np.asarray(found[2]) > 3).any()  # a rank that the top K do not tell
    assert len(set(np.asarray(found[1]).tolist())) > 1
