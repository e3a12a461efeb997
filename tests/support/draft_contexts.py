"""What a drafter is given."""

import functools

import jax.numpy as jnp
import numpy as np

from jax_specdec.device.drafting.drafters import Context
from pallas_kernels.sampling.parameters import Sampling
from pallas_kernels.sampling.types import Verified
from tests.support import quick_compile


def context(texts, limit=None, length=12):
    """What a drafter sees of slots that hold `texts`."""
    batch = len(texts)
    tokens = np.full((batch, length), 9, np.int32)  # stale ids behind the known tokens
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    return Context(
        tokens=jnp.asarray(tokens),
        lengths=jnp.array([len(text) for text in texts], jnp.int32),
        verified=Verified(jnp.zeros((batch, 1), jnp.int32), jnp.ones(batch, jnp.int32)),
        num_drafts=jnp.zeros(batch, jnp.int32),
        hidden=jnp.zeros((batch, 1, 4)),
        positions=jnp.zeros((batch, 1), jnp.int32),
        sampling=Sampling.greedy(batch),
        limit=jnp.full(batch, 3, jnp.int32) if limit is None else jnp.array(limit, jnp.int32),
    )


@functools.cache
def compiled(drafter):
    return quick_compile.jit(lambda *args: drafter.propose(None, *args))
