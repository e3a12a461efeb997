"""Greedy ids of runs of other shapes: equal up to the first two logits that nearly tie."""

import numpy as np

NEAR_TIE = 1e-4  # two largest logits closer than this may change places with the batch's shape


def compare(ids, others, margins):
    """Positions compared before the first near tie, and whether there was one.

    `margins` [n] are the differences of the two largest logits behind `ids`.
    """
    near = np.flatnonzero(np.asarray(margins) < NEAR_TIE)
    end = int(near[0]) if near.size else len(ids)
    assert ids[:end] == others[:end]
    return end, bool(near.size)


def margins(result, request_id):
    found = []
    for record in result.records[request_id]:
        rows = np.sort(result.outputs[record.step].logits[record.slot][: record.num_tokens], axis=1)
        found += (rows[:, -1] - rows[:, -2]).tolist()
    return found
