"""The tokens that a row of a sampled request keeps and their distribution, in float64."""

import numpy as np

from pallas_kernels.testing import oracle

BOUNDARY = 4e-6  # relative: closer than this, a sum may round to either side


def kept_by_sorting(row, temperature, top_k, top_p, min_p):
    """The kept tokens [V] bool of a row, log of their share, and whether a boundary is near.

    Filter by filter, as in the contract. An invalid row keeps its greedy token, as a greedy one.
    """
    x = np.asarray(row).astype(np.float64)
    order = sorted(range(len(x)), key=lambda t: (-x[t], t))
    if temperature == 0 or not oracle.is_valid(x):
        return np.arange(len(x)) == oracle.greedy_token_id(x), 0.0, False
    p = np.exp((x - x.max()) / temperature)
    p[np.isneginf(x)] = 0
    p /= p.sum()
    kept = np.zeros(len(x), bool)
    near = False
    first_k = order[: top_k or len(x)]
    mass, before = p[first_k].sum(), 0.0
    for t in first_k:
        if top_p < 1:
            near |= bool(before and abs(before - top_p * mass) <= BOUNDARY * mass)
            if before >= top_p * mass:
                break
        kept[t] = not np.isneginf(x[t])
        before += p[t]
    if min_p > 0:
        gap = (x - x.max()) / temperature - np.log(min_p)
        near |= bool((np.abs(gap) < BOUNDARY * max(1, abs(np.log(min_p)))).any() and min_p < 1)
        kept &= gap >= 0
    return kept, float(np.log(p[kept].sum())), near


def probs_of(row, temperature, kept):
    """The distribution of one row [V] in float64: that of its kept tokens."""
    p = kept.astype(np.float64)
    if kept.sum() > 1:
        x = np.asarray(row)[kept].astype(np.float64)
        p[kept] = np.exp((x - x.max()) / temperature)
    return p / p.sum()


def expected_probs(row, temperature, top_k, top_p, min_p):
    return probs_of(row, temperature, kept_by_sorting(row, temperature, top_k, top_p, min_p)[0])
