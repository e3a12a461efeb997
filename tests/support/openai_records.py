"""Records of small requests, for tests of the responses that they become."""

import math

from jax_specdec.text.detokenize import TokenTable
from tests.support.processor_messages import admitted, run, target, tokens

SNOWMAN = "\N{SNOWMAN}".encode()  # three bytes, as three tokens: 0, 1, 2


TABLE = TokenTable([SNOWMAN[:1], SNOWMAN[1:2], SNOWMAN[2:], b" a", b"b"], special={5: "</s>"})


MADE = {"model": "m", "created": 17}


def records_of(*messages, **params):
    return [record for records in run(admitted(**params), *messages)[1] for record in records]


def two_steps(**params):
    first = tokens(3, 4, columns=3, logprobs=[[-0.5, -0.5, -1.5], [-2.0, -0.25, -math.inf]])
    second = tokens(0, columns=3, logprobs=[[math.nan] * 3], ranks=[0])
    first.topk_ids[:] = [[3, 0], [1, -1]]
    second.topk_ids[:] = [[-1, -1]]
    return records_of(target(0, first), target(1, second), logprobs=2, **params)


def snowman(**params):
    """A snowman in two steps, then " a" and the end."""
    return records_of(
        target(0, tokens(3, 0, columns=1)),
        target(1, tokens(1, columns=1)),
        target(2, tokens(2, 3, 5, columns=1)),
        logprobs=0,
        stop_token_ids=(5,),
        **params,
    )
