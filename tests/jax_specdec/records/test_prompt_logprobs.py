"""A prompt's logprobs in the processor: chunk by chunk, before the first token, once."""

import numpy as np
import pytest

from ipc.wire import Kind, LogprobsMode
from jax_specdec.records.decode import decode
from jax_specdec.records.encode import encode
from jax_specdec.records.output_processor import (
    ProcessorError,
    ProcessorState,
    Progress,
    StepLost,
    abort,
    admit,
    release,
    step,
)
from jax_specdec.records.record import Records
from jax_specdec.requests import Request, SamplingParams
from tests.support.processor_messages import silent, target, tokens

pytestmark = pytest.mark.fast

PROMPT = (9, 4, 7, 7, 2)


def asking(id="r", prompt=PROMPT, **params):
    return Request(
        id=id,
        prompt_token_ids=prompt,
        params=SamplingParams(**{"prompt_logprobs": 1, "max_tokens": 9} | params),
    )


def admitted(**params):
    return admit(ProcessorState.empty(2), 0, 1, asking(**params))


def chunk(*ids, slot=0, generation=1, columns=2, **fields):
    """The message of one slot's chunk; the others say nothing."""
    slots = [silent(generation=generation)] * 2
    slots[slot] = tokens(*ids, generation=generation, columns=columns, drafts=0, **fields)
    return decode(encode(Kind.PROMPT, 0, slots))


def parts(records):
    """Place, ids and logprobs of each record's part of the prompt."""
    return [
        (r.prompt.start, r.prompt.token_ids.tolist(), r.prompt.logprobs[:, 0].tolist())
        for r in records
    ]


def test_chunks_come_in_order_before_the_first_token():
    state = admitted(logprobs=0)
    state, first = step(state, chunk(4, 7))
    state, second = step(state, chunk(7, 2))
    assert parts(first) == [(1, [4, 7], [-5 / 8, -1.0])]
    assert parts(second) == [(3, [7, 2], [-1.0, -3 / 8])]
    (record,) = first
    assert record.request_id == "r"
    assert record.prompt.token_ranks.tolist() == [4 % 5 + 1, 7 % 5 + 1]
    assert record.prompt.topk_ids.tolist() == [[4], [7]]
    assert record.prompt.logprobs.shape == (2, 2)
    assert record.prompt.chosen_logprobs.shape == (2, 0)
    # It is a record without tokens: nothing of it is counted.
    assert record.token_ids.tolist() == []
    assert record.logprobs.shape == (0, 1)
    assert record.finish_reason is record.statistics is None
    assert not record.reschedule
    state, (record,) = step(state, target(0, tokens(5, columns=1)))
    assert record.prompt is None
    assert record.cumulative_logprob == -6 / 8
    assert state.statistics.num_tokens == 1


def test_chosen_ids_and_modes_are_those_of_the_request():
    params = {"logprobs": 0, "extra_token_ids": (3, 1), "logprobs_mode": LogprobsMode.SCALED}
    good = {"chosen": 2, "mode": LogprobsMode.SCALED}
    _, records = step(admitted(**params), chunk(4, 7, 7, 2, **good))
    rows = records[0].prompt
    assert rows.logprobs.shape == rows.chosen_logprobs.shape == (4, 2)
    np.testing.assert_allclose(rows.chosen_logprobs[0], [-5 / 24, -5 / 32])
    for wrong in ({"columns": 3}, {"chosen": 1}, {"mode": LogprobsMode.RAW}, {"columns": 1}):
        with pytest.raises(ProcessorError, match="asked for prompt logprobs with K = 1, 2 chosen"):
            step(admitted(**params), chunk(4, 7, **good | wrong))


@pytest.mark.parametrize("lost", [chunk(7, 7), chunk(9, 4), chunk(4, 8), chunk(4, 7, 7, 2, 5)])
def test_rows_of_other_tokens_mean_that_something_is_lost(lost):
    with pytest.raises(StepLost, match=r"where tokens 1 and on of request 'r' were next"):
        step(admitted(), lost)


def test_a_chunk_does_not_come_twice():
    state, _ = step(admitted(), chunk(4, 7))
    with pytest.raises(StepLost, match="tokens 3 and on"):
        step(state, chunk(4, 7))


def test_the_first_token_does_not_come_before_the_last_row():
    state, _ = step(admitted(), chunk(4, 7, 7))
    with pytest.raises(
        StepLost, match="after 3 of the 4 rows of its prompt's logprobs: the others are"
    ):
        step(state, target(0, tokens(5)))
    state, _ = step(state, target(0, silent()))
    state, _ = step(state, chunk(2))
    _, records = step(state, target(1, tokens(5)))
    assert records[0].token_ids.tolist() == [5]


def test_a_request_that_did_not_ask_gets_none():
    with pytest.raises(ProcessorError, match="which has none to come"):
        step(admitted(prompt_logprobs=None), chunk(4))
    state = admitted(prompt=(9,))  # a prompt of one token has no rows
    state, _ = step(state, target(0, tokens(5)))
    with pytest.raises(ProcessorError, match="which has none to come"):
        step(state, chunk(4))


def test_requests_side_by_side_have_their_own_chunks():
    state = admit(admitted(), 1, 1, asking("other", (1, 2, 3)))
    state, one = step(state, chunk(4))
    state, other = step(state, chunk(2, 3, slot=1))
    state, again = step(state, chunk(7, 7, 2))
    found = [(r.request_id, *parts([r])[0][:2]) for records in (one, other, again) for r in records]
    assert found == [("r", 1, [4]), ("other", 1, [2, 3]), ("r", 2, [7, 7, 2])]


def test_one_of_two_prompts_in_a_message_can_be_taken():
    state = admit(admitted(), 1, 5, asking("s", (3, 8, 4)))
    state, _ = step(state, chunk(8, slot=1, generation=5))
    slots = [tokens(4, 7, generation=1, columns=2, drafts=0),
             tokens(4, generation=5, columns=2, drafts=0)]  # fmt: skip
    _, records = step(state, decode(encode(Kind.PROMPT, 1, slots)))
    whole = parts(records)
    assert [part[:2] for part in whole] == [(1, [4, 7]), (2, [4])]
    (batch,) = records.batches
    assert [parts(Records((batch.take(np.array([n])),))) for n in (0, 1)] == [
        [one] for one in whole
    ]


def test_rows_of_an_ended_request_or_an_old_generation_are_counted():
    state, _ = step(admitted(), chunk(4))
    state, _ = abort(state, "r")
    state, records = step(state, chunk(7, 7))
    assert len(records) == 0
    assert state.counters.surplus_tokens == 2
    state = admit(release(state, 0), 0, 2, asking("new"))
    state, records = step(state, chunk(2))
    assert len(records) == 0
    assert state.counters.late_slots == 1
    assert state.columns.num_prompt[0] == 0
    with pytest.raises(ProcessorError, match="admit a request before"):
        step(state, chunk(4, generation=3))


def test_a_prompt_that_is_run_again_delivers_only_what_is_new():
    state = admit(ProcessorState.empty(2), 0, 1, asking(), handed_over=Progress(num_prompt_rows=3))
    state, records = step(state, chunk(4, 7))
    assert len(records) == 0
    state, records = step(state, chunk(7, 2))
    assert parts(records) == [(4, [2], [-3 / 8])]
    assert records[0].prompt.topk_ids.tolist() == [[2]]
    progress = Progress(num_prompt_rows=4)
    state = admit(ProcessorState.empty(2), 0, 1, asking(), handed_over=progress)
    with pytest.raises(StepLost):  # all of them must come again
        step(state, target(0, tokens(5)))


def test_a_request_that_has_begun_has_had_its_rows():
    begun = Progress(token_ids=(5,), num_prompt_rows=4)
    state = admit(ProcessorState.empty(2), 0, 1, asking(), handed_over=begun)
    _, records = step(state, target(0, tokens(6)))
    assert records[0].token_ids.tolist() == [6]


def test_other_records_that_wait_go_on_waiting():
    state = admit(admitted(), 1, 1, asking("other", prompt_logprobs=None))
    state, records = step(state, target(0, silent(), tokens(6), draft_follows=True))
    assert len(records) == 0
    state, records = step(state, chunk(4))
    assert [record.request_id for record in records] == ["r"]
    _, records = step(state, target(1, silent(), silent()))
    assert [record.token_ids.tolist() for record in records] == [[6]]
