"""The distribution of the rows of sampled tokens, in float64."""

import numpy as np


def expected_probs(row, temperature, top_k, top_p, min_p):
    """The distribution of one row [V] in float64, filter by filter, as in the contract."""
    x = row.astype(np.float64)
    if temperature == 0 or np.isnan(x).any() or (x == np.inf).any() or not np.isfinite(x).any():
        numbers = np.where(np.isnan(x), -np.inf, x)
        wanted = ~np.isnan(x) & (numbers == numbers.max())
        return np.eye(len(x))[int(np.argmax(wanted))]
    p = np.exp((x - x.max()) / temperature)
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda t: (-x[t], t))
    if top_k:
        for t in order[top_k:]:
            p[t] = 0
        p /= p.sum()
    if top_p < 1:
        mass = 0.0
        for t in order:
            if mass >= top_p:
                p[t] = 0
            mass += p[t]
        p /= p.sum()
    p[p < min_p * p.max()] = 0
    return p / p.sum()
