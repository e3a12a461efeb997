"""Which counts a slot of a message may have: every small combination, and the largest of each."""

import itertools

import numpy as np
import pytest

from ipc import wire
from ipc.wire import Kind, LogprobsMode, SlotState
from jax_specdec.records.decode import MessageError, decode
from jax_specdec.records.encode import SlotContents, encode

EMITTING = SlotState.TOKENS, SlotState.PREFILL_FIRST_TOKEN


def slot_of(state, tokens, drafts, rows, columns, chosen):
    """A slot with these counts, whether they go together or not."""
    return SlotContents(
        state=state, num_drafts=drafts, columns=columns, num_chosen=chosen,
        token_ids=np.zeros(tokens), token_ranks=np.zeros(rows),
        logprobs=np.zeros(rows * (columns + chosen) if columns else 0),
        topk_ids=np.zeros(rows * (columns - 1) if columns else 0),
    )  # fmt: skip


# Beside a first token, a target message goes through the checks of every field.
FIRST = slot_of(SlotState.PREFILL_FIRST_TOKEN, 3, 2, 0, 0, 0)


def may_be(kind, state, tokens, drafts, rows, columns, chosen, most_logprobs):
    """The contract, in its own words: a slot at a time."""
    first = state is SlotState.PREFILL_FIRST_TOKEN
    if kind is Kind.TARGET and state is SlotState.TOKENS:
        right = 1 <= tokens <= drafts + 1
    elif kind is Kind.TARGET and first:
        right = tokens == drafts + 1  # each of its drafts comes with it
    elif kind is Kind.DRAFT and tokens:
        right = tokens == drafts and state in EMITTING
    else:
        right = not tokens or state in EMITTING
    if kind is Kind.TARGET and state not in EMITTING:
        right = tokens == 0
    if kind is Kind.PROMPT:
        right &= drafts == 0
    right &= columns <= most_logprobs + 1 and (columns > 0 or not chosen)
    return right and rows == (0 if not columns else min(tokens, 1) if first else tokens)


def is_taken(kind, slots, most_logprobs):
    data = encode(kind, 0, slots, max_num_logprobs=most_logprobs)
    try:
        decode(data)
    except MessageError:
        return False
    return True


@pytest.mark.parametrize(
    ("kind", "beside"),
    [(Kind.TARGET, []), (Kind.TARGET, [FIRST]), (Kind.DRAFT, []), (Kind.PROMPT, [])],
)
def test_counts_are_taken_where_they_go_together(kind, beside):
    num_taken = 0
    sizes = range(4), range(3), range(4), range(3), range(2)
    for counts in itertools.product(SlotState, *sizes):
        right = may_be(kind, *counts, most_logprobs=0)
        assert is_taken(kind, [slot_of(*counts), *beside], 0) == right, counts
        num_taken += right
    assert num_taken > 20


@pytest.mark.parametrize("beside", [[], [FIRST]], ids=["alone", "beside a first token"])
@pytest.mark.parametrize("most", [0, 1, 20, wire.MAX_TOP_K])
def test_a_slot_has_at_most_the_columns_of_its_message(most, beside):
    good, wrong = (slot_of(SlotState.TOKENS, 1, 0, 1, most + n, 0) for n in (1, 2))
    assert is_taken(Kind.TARGET, [good, *beside], most)
    with pytest.raises(MessageError, match=rf"slot 0: columns = {most + 2} .* at most {most + 1};"):
        decode(encode(Kind.TARGET, 0, [wrong, *beside], max_num_logprobs=most))


LARGEST = {
    "state": (max(SlotState), [0, 0, 0]),
    "mode": (max(LogprobsMode), [0]),
    "num_drafts": (wire.MAX_DRAFTS, [0] * (wire.MAX_DRAFTS + 1)),
    "num_chosen": (wire.MAX_CHOSEN, [0]),
}


def test_a_row_of_a_prompt_may_name_more_ids():
    for count in (wire.MAX_CHOSEN_OF_ROW, wire.MAX_CHOSEN_OF_ROW + 1):
        slot = SlotContents(
            columns=1, num_chosen=count, token_ids=[0], token_ranks=[1],
            logprobs=np.zeros((1, 1 + count)),
        )  # fmt: skip
        assert is_taken(Kind.PROMPT, [slot], 0) == (count == wire.MAX_CHOSEN_OF_ROW)
        assert not is_taken(Kind.TARGET, [slot], 0)


@pytest.mark.parametrize("beside", [[], [FIRST]], ids=["alone", "beside a first token"])
@pytest.mark.parametrize("name", LARGEST)
def test_a_field_is_taken_up_to_its_limit(name, beside):
    limit, token_ids = LARGEST[name]
    for value in (int(limit), int(limit) + 1):
        chosen = value if name == "num_chosen" else 0
        fields = {"num_drafts": len(token_ids) - 1, "columns": 1, name: value}
        rows = 1 if name == "state" else len(token_ids)
        values = {"token_ranks": [1] * rows, "logprobs": np.zeros(rows * (1 + chosen))}
        data = encode(
            Kind.TARGET, 0, [SlotContents(token_ids=token_ids, **fields, **values), *beside]
        )
        if value == limit:
            assert int(getattr(decode(data), name)[0]) == value
            continue
        with pytest.raises(MessageError, match=f"slot 0: {name} = {value} cannot be"):
            decode(data)
