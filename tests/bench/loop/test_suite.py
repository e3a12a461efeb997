"""The benchmark of the loop: the time of a worker, and differences of contenders, each caught."""

from dataclasses import replace

import numpy as np
import pytest

from bench.loop import consumer, content, rig
from bench.timing import BenchError


def changed(part, **changes):
    """One step of one request."""
    return [{0: replace(part, **changes)}]


# Two tokens, the second one not in its top 2.
PART = content.Part(
    [7, 9], [{7: -0.5, 3: -1.0}, {5: -0.25, 3: -2.0, 9: -4.0}], [{7: 1}, {9: 30}], drafts=1
)
PLAIN = content.Part([7, 9], [], [])
WRONG = {
    "other tokens": {"ids": [7, 8]},
    "fewer tokens": {"ids": [7]},
    "no logprobs": {"logprobs": [], "ranks": []},
    "one row": {"logprobs": PART.logprobs[:1], "ranks": PART.ranks[:1]},
    "another logprob": {"logprobs": [{7: -0.5, 3: -1.1}, PART.logprobs[1]]},
    "another id": {"logprobs": [{7: -0.5, 4: -1.01}, PART.logprobs[1]]},
    "the emitted token's is missing": {"logprobs": [PART.logprobs[0], {5: -0.25, 3: -2.0}]},
    "fewer logprobs": {"logprobs": [{7: -0.5}, PART.logprobs[1]]},
    "more logprobs": {"logprobs": [PART.logprobs[0] | {1: -1.0, 2: -1.0}, PART.logprobs[1]]},
    "another rank": {"ranks": [{7: 1}, {9: 29}]},
    "no drafts": {"drafts": 0},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_difference_from_the_request_is_caught(wrong):
    right, plain = changed(PART), changed(PLAIN)
    content.check("t", right, plain, [2], right, drafts=1)
    with pytest.raises(BenchError, match="t: step 0, request 0: "):
        content.check("t", changed(PART, **WRONG[wrong]), plain, [2], right, drafts=1)


def test_fewer_logprobs_are_the_first_of_more():
    right, plain = changed(PART), changed(PLAIN)
    k0 = changed(PART, logprobs=[{7: -0.5}, {9: -4.0}], drafts=0)
    content.check("t", k0, plain, [0], right)
    k1 = changed(PART, logprobs=[{7: -0.5}, {5: -0.25, 9: -4.0}], drafts=0)
    content.check("t", k1, plain, [1], right)
    content.check("t", plain, plain, [None], right)
    for steps, k in ((k1, 0), (k0, 1), (plain, 0), (k0, None), ([], 0), (2 * k0, 0), ([{}], 0)):
        with pytest.raises(BenchError, match="t"):
            content.check("t", steps, plain, [k], right)


def test_the_workers_time_is_that_of_launching_and_of_publishing():
    span = 9_000, 18_000, 4_000
    table = np.zeros((3, 5), np.int64)  # two steps as they ran, and this one
    table[2, consumer.PROCESSED] = 25_000
    found = rig._steps(1.0, np.zeros(2, np.int64), table, 0, [span])
    assert found["worker us"] == pytest.approx(13)
    assert found["host us"] == pytest.approx(16)
