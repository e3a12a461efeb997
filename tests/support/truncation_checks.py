"""A truncation against the definition of its cuts."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.sampling.parameters import Sampling
from pallas_kernels.testing import oracle
from tests.support import quick_compile
from tests.support.expected_probs import kept_by_sorting, probs_of


@quick_compile.jit
def kept_tokens(cut, rows):
    """[B, S, V] bool."""
    ids = lax.broadcasted_iota(jnp.int32, rows.shape, 2)
    return cut.keeps(rows.astype(jnp.float32), ids)


def sampling_of(temperature, top_k=0, top_p=1.0, min_p=0.0):
    """Parameters of as many slots as `temperature` has entries; a scalar is for all of them.

    Shares may lie outside of 0 .. 1, which the door refuses where it knows them: under `jit` they
    keep what the nearest share keeps.
    """
    slots = len(temperature)
    shares = (jnp.broadcast_to(jnp.asarray(x, jnp.float32), slots) for x in (top_p, min_p))
    sampling = Sampling.of(slots, temperature=temperature, top_k=top_k)
    return sampling._replace(**dict(zip(("top_p", "min_p"), shares, strict=True)))


def check(rows, sampling, cut, probs):
    """Check cuts [B, S] and probabilities of rows [B, S, V]; returns the number compared."""
    rows = np.asarray(rows)
    kept, cut, probs = jax.device_get((kept_tokens(cut, rows), cut, probs))
    columns = [np.asarray(field).tolist() for field in sampling[:4]]
    compared = 0
    for b, s in np.ndindex(rows.shape[:2]):
        row = rows[b, s]
        arguments = [column[b] for column in columns]
        expected, log_kept, near = kept_by_sorting(row, *arguments)
        if near:
            continue
        compared += 1
        valid = oracle.is_valid(row)
        if valid:  # in an invalid row the greedy token is no prefix
            finite = ~np.isneginf(row.astype(np.float32))
            np.testing.assert_array_equal(kept[b, s] & finite, expected)
            assert abs(float(cut.log_kept[b, s]) - log_kept) <= 2e-6 or arguments[0] == 0
        # Excluded tokens have probability 0; of the others, none is missing and none is extra.
        p = np.asarray(probs[b, s], np.float64)
        assert (p[~expected] == 0).all()
        np.testing.assert_allclose(p, probs_of(row, arguments[0], expected), atol=1e-6)
    return compared
