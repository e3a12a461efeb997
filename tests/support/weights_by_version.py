"""Records' logprobs against separate forward passes of the weights that they name."""

import numpy as np

from jax_specdec.device.model.params import named_arrays
from tests.support import reference_model


def check_scores(weights, config, requests, records, *, atol=1e-4):
    """Check every token's logprob in NumPy and float64; returns the versions that were met.

    Args:
      weights: by version: a list, or a dictionary.
      records: each request's, by id.
    """
    met = set()
    for item in requests:
        found = [record for record in records[item.id] if record.num_tokens]
        ids = [*item.prompt_token_ids, *(t for r in found for t in r.token_ids.tolist())]
        place, tables = len(item.prompt_token_ids), {}
        for record in found:
            version = record.weights_version
            met.add(version)
            if record.logprobs is not None:
                if version not in tables:
                    params = named_arrays(weights[version])
                    tables[version] = reference_model.logprobs(params, config.to_dict(), ids)
                rows = tables[version][place - 1 :][: record.num_tokens]
                expected = rows[np.arange(record.num_tokens), record.token_ids]
                np.testing.assert_allclose(record.logprobs[:, 0], expected, atol=atol)
            place += record.num_tokens
    return met
