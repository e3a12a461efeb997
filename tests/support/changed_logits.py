"""Masks and biases of every kind, and the logits that they make."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.contract.changes import Changes
from pallas_kernels.testing import oracle

ALL = {"log_sum_exp": True, "entropy": True, "top_logits": True}


def bits_of(ids, vocabulary):
    """Bit mask words [ceil(V / 32)] uint32 that allow these ids."""
    words = np.zeros(-(-vocabulary // 32), np.uint32)
    for i in ids:
        words[i // 32] |= np.uint32(1 << i % 32)
    return words


def changes_of(rng, rows, vocabulary, names=("allowed", "bias")):
    """Arguments of a call: masks of all, most, few and no tokens; biases, some of one token."""
    found = {}
    if "allowed" in names:
        shares = rng.choice([1.0, 0.9, 0.1, 0.0], rows, p=[0.3, 0.3, 0.3, 0.1])
        chosen = rng.random((rows, vocabulary)) < shares[:, None]
        found["allowed"] = np.stack([bits_of(np.flatnonzero(row), vocabulary) for row in chosen])
    if "bias" in names:
        count = 6
        ids = rng.integers(-1, vocabulary + 1, (rows, count)).astype(np.int32)
        ids[:, 1] = ids[:, 0]  # a token twice; their sums are exact
        found["bias_token_ids"] = ids
        numbers = np.array([-100, -0.5, 0, 0.25, 5, 1e3, -np.inf], np.float32)
        found["bias"] = rng.choice(numbers, (rows, count))
        if rng.random() < 0.2:
            found["bias"][rng.integers(rows), 2] = rng.choice([np.nan, np.inf])
    return found


def as_changes(arrays):
    """The `Changes` among a call's arguments, as kernels take them."""
    parts = {name: jnp.asarray(arrays[name]) for name in Changes._fields if name in arrays}
    if "allowed" in parts:
        parts["allowed"] = parts["allowed"].view(jnp.int32)
    return Changes(**parts)


def in_float64(x, arrays):
    """The changed rows [R, V] of a call without row ids."""
    nothing = [None] * len(x), np.zeros((len(x), 0))
    words = arrays.get("allowed", nothing[0])
    biases = (arrays.get(name, nothing[1]) for name in ("bias_token_ids", "bias"))
    each = zip(x, words, *biases, strict=True)
    return np.stack(
        [oracle.with_changes(row, w, zip(ids, b, strict=True)) for row, w, ids, b in each]
    )
