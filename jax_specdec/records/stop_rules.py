"""Stop token ids and stop sequences, found for a whole batch at once.

Every stop token, and the last token of every stop sequence, is a key (slot, token id) of one sorted
table; a step looks up all its tokens in one search. Only the few hits are examined one by one.
"""

import numpy as np
from numpy.typing import NDArray

from jax_specdec.requests import SamplingParams

_END: NDArray[np.int64] = np.array([2**63 - 1])  # no key is larger: every search ends on an entry
_END.flags.writeable = False


def no_keys() -> NDArray[np.int64]:
    """The table without any rule."""
    return _END


def stop_keys(slots: NDArray[np.int64], token_ids: NDArray[np.int32]) -> NDArray[np.int64]:
    """One integer for each pair of slot and token id; arrays of one shape."""
    keys: NDArray[np.int64] = slots << 32 | token_ids.view(np.uint32)
    return keys


def with_slot(keys: NDArray[np.int64], slot: int, params: SamplingParams) -> NDArray[np.int64]:
    """The table with `slot`'s stop rules replaced by those of `params`."""
    last = {*params.stop_token_ids, *(sequence[-1] for sequence in params.stop_sequences)}
    ids = np.array(sorted(last), np.int32)
    other_keys = without_slot(keys, slot)
    return np.sort(np.concatenate([other_keys, stop_keys(np.full(ids.size, slot, np.int64), ids)]))


def without_slot(keys: NDArray[np.int64], slot: int) -> NDArray[np.int64]:
    """The table without the rules of `slot`."""
    other_keys: NDArray[np.int64] = keys[keys >> 32 != slot]
    return other_keys


def ids_of_rules(keys: NDArray[np.int64]) -> frozenset[int]:
    """The ids in a table, whoever's rules they are in."""
    return frozenset((keys[:-1] & 0xFFFFFFFF).astype(np.uint32).view(np.int32).tolist())


def stop_candidates(keys: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """The positions in `tokens`, which come from `stop_keys`, that may end their request."""
    hits: NDArray[np.bool_] = keys[keys.searchsorted(tokens)] == tokens
    return hits.nonzero()[0]


def history_needed(params: SamplingParams) -> int:
    """The number of earlier tokens to remember, so that no stop sequence is missed."""
    return max((len(sequence) - 1 for sequence in params.stop_sequences), default=0)


def sequence_ending(params: SamplingParams, token_ids: list[int], num_emitted: int) -> int | None:
    """The index of the first stop sequence that `token_ids` ends with, or None.

    Args:
      params: the request's.
      token_ids: the newest tokens, as many as `history_needed` and one.
      num_emitted: all tokens so far; none of the first `min_tokens` ends a sequence.
    """
    if num_emitted <= params.min_tokens:
        return None
    for index, sequence in enumerate(params.stop_sequences):
        if len(sequence) <= len(token_ids) and token_ids[-len(sequence) :] == list(sequence):
            return index
    return None
