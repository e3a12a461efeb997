"""What a fleet brings: all tokens of an undisturbed run once, and the rows of each prompt."""

import numpy as np

from jax_specdec.ray.batch import columns
from tests.support.scripted_worker import continuation, logprob


def check(requests, batches):
    """Check that each request has one end, and all tokens and prompt rows once, in order."""
    found = columns(batches)
    asked = {request.id: request for request in requests}
    parts = [part for batch in batches for part in batch]
    assert sorted(p.request_id for p in parts if p.finish_reason is not None) == sorted(asked)
    by_request = {name: [] for name in asked}
    for row, at in enumerate(found.request.tolist()):
        by_request[str(found.request_id[at])].append(row)
    scored = {name: [] for name in asked}
    for part in parts:
        if (prompt := part.prompt) is None:
            assert not len(part.prompt_weights_versions)
            continue
        begun, k = scored[part.request_id], part.request.params.prompt_logprobs
        n, ids = len(prompt.token_ids), part.request.prompt_token_ids
        assert prompt.start == max(part.request.params.prompt_logprobs_start, 1) + len(begun)
        assert prompt.token_ids.tolist() == list(ids[prompt.start : prompt.start + n])
        assert (prompt.logprobs.shape, prompt.topk_ids.shape) == ((n, k + 1), (n, k))
        assert prompt.token_ranks.tolist() == [1] * n
        assert len(part.prompt_weights_versions) == n
        begun += prompt.logprobs[:, 0].tolist()
    for name, request in asked.items():
        rows, prompt = np.array(by_request[name], int), list(request.prompt_token_ids)
        ids, logprobs = continuation(request)
        assert found.token_id[rows].tolist() == ids, name
        assert found.position[rows].tolist() == [len(prompt) + n for n in range(len(ids))]
        if request.params.logprobs is not None:
            assert found.logprob[rows].tolist() == logprobs
        first = max(request.params.prompt_logprobs_start, 1)
        wanted = range(first, len(prompt)) if request.params.prompt_logprobs is not None else ()
        assert scored[name] == [logprob(prompt[:place]) for place in wanted], name
    return found
