"""Where greedy ids of runs of other shapes may part: at two largest logits that nearly tie."""

import numpy as np

NEAR_TIE = 1e-4  # two largest logits closer than this may change places with the batch's shape


def margins(result, request_id):
    """The differences of the two largest logits behind a request's ids."""
    found = []
    for record in result.records[request_id]:
        rows = np.sort(result.outputs[record.step].logits[record.slot][: record.num_tokens], axis=1)
        found += (rows[:, -1] - rows[:, -2]).tolist()
    return found
