"""The logits that a request's token is chosen from, in float64, written as the contract says it."""

import numpy as np


def changed_row(row, params, prompt, emitted):
    """[V] float64: the model's row [V] behind `prompt` and `emitted`, changed as `params` say.

    A token named twice or more is looked up in plain lists: nothing here is the device's way.
    """
    x = np.asarray(row, np.float64).copy()
    if len(emitted) < params.min_tokens:
        for token in params.stop_token_ids:
            x[token] = -np.inf
    for token, bias in params.logit_bias:
        x[token] += bias
    for token in {*prompt, *emitted}:
        r = params.repetition_penalty
        x[token] = x[token] / r if x[token] > 0 else x[token] * r
    for token in set(emitted):
        x[token] -= params.frequency_penalty * list(emitted).count(token)
        x[token] -= params.presence_penalty
    return x
