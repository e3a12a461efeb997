"""Random kept sets for messages."""

import numpy as np

from ipc.wire import KEPT_ALL, KEPT_MANY
from jax_specdec.kept_sets import KeptSets


def random_kept(rng, counts, vocab_size):
    """Sets of these counts or marks, with random ids and masses."""
    ids = [sorted(rng.sample(range(vocab_size), max(count, 0))) for count in counts]
    return KeptSets.of(
        np.array(counts, np.int32),
        np.array([0.0 if count == KEPT_ALL else -rng.random() for count in counts], np.float32),
        np.array([token_id for row in ids for token_id in row], np.int32),
    )


def random_counts(rng, num, most):
    """Counts and marks, one or two of each kind among many."""
    return [rng.choice([1, most, rng.randint(1, most), KEPT_ALL, KEPT_MANY]) for _ in range(num)]


def as_lists(kept):
    """Sets as [count, mass, ids] each, read without code of the product; None stays."""
    if kept is None:
        return None
    found, rest = [], [int(token_id) for token_id in kept.token_ids]
    for count, mass in zip(kept.counts, kept.log_kept, strict=True):
        size = max(int(count), 0)
        found.append([int(count), float(mass), rest[:size]])
        rest = rest[size:]
    assert rest == []
    return found
