"""What the kernels return."""

from typing import NamedTuple

import jax


class TopkLogprobs(NamedTuple):
    """Logprobs of R target rows; K is the number of top columns, C that of extra ids.

    token_ids: [R, K + 1] int32. Column 0 is the given token, columns 1 to K are the largest logits
        in descending order, equal logits by id, lowest first; -1 where there is no such token.
    logprobs: [R, K + 1] float32, natural logarithms, of the tokens in `token_ids`.
    token_ranks: [R] int32, 1 + the number of tokens with a strictly larger logit than the given
        token's; 0 where there is no answer.
    extra_logprobs: [R, C] float32, of `extra_token_ids`; [R, 0] where none were named.
    """

    token_ids: jax.Array
    logprobs: jax.Array
    token_ranks: jax.Array
    extra_logprobs: jax.Array


class Greedy(NamedTuple):
    """The greedy choice of N rows.

    token_ids: [N] int32, the lowest id among the row's largest non-NaN logits; 0 if all are NaN.
    valid: [N] bool, false where the row has a NaN, a +inf or no finite logit.
    """

    token_ids: jax.Array
    valid: jax.Array
