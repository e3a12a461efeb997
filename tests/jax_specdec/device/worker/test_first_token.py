"""How many steps of a worker a request waits for its first token beside requests that run."""

import pytest

from tests.support.decoding import VOCAB, Local, request

CHUNK, SLOTS = 8, 8


def long_request(n, num_tokens):
    """Prompts that share no beginning."""
    return request(f"long{n}", [(n + at) % VOCAB for at in range(num_tokens)], max_tokens=30)


def steps_to_the_first_token(beside, prompts, before):
    """Steps from the admission of a 2-token request to its first token.

    Args:
      beside: how many long requests run, whose prompts have `prompts` tokens, `before` steps ago.
    """
    local = Local("ngram", num_slots=SLOTS, chunk=CHUNK)
    for n in range(beside):
        local.admit(long_request(n, prompts))
    for _ in range(before):
        local.advance()
    local.admit(request("short", [1, 2], max_tokens=2))
    for count in range(1, 40):
        if any(each.request_id == "short" and each.num_tokens for each in local.advance()):
            return count
    raise AssertionError("it has no token")


@pytest.mark.parametrize(
    ("prompts", "before"), [(2, 6), (5 * CHUNK, 1)], ids=["in their texts", "in their prompts"]
)
def test_a_short_request_waits_for_no_long_one(prompts, before):
    alone = steps_to_the_first_token(0, prompts, before)
    beside = steps_to_the_first_token(SLOTS - 1, prompts, before)
    assert 1 <= alone <= beside <= alone + 3
