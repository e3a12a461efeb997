"""A prompt's logprobs in the processor: chunk by chunk, before the first token, once.

`test_state_machine` has the records and the counts against a reference.
"""

import numpy as np
import pytest

from ipc.wire import Kind, LogprobsMode
from jax_specdec.records.decode import decode
from jax_specdec.records.encode import encode
from jax_specdec.records.output_processor import ProcessorState, admit, step
from jax_specdec.records.processor_state import ProcessorError, Progress, StepLost
from jax_specdec.records.record import Records
from jax_specdec.requests import Request, SamplingParams
from tests.support.processor_messages import run, silent, target, tokens

PROMPT = (9, 4, 7, 7, 2)


def asking(id="r", prompt=PROMPT, **params):
    params = {"prompt_logprobs": 1, "max_tokens": 9} | params
    return Request(id=id, prompt_token_ids=prompt, params=SamplingParams(**params))


def admitted(handed_over=None, **params):
    return admit(ProcessorState.empty(2), 0, 1, asking(**params), handed_over=handed_over)


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


def test_chosen_ids_and_modes_are_those_of_the_request():
    params = {"logprobs": 0, "extra_token_ids": (3, 1), "logprobs_mode": LogprobsMode.SCALED}
    good = {"chosen": 2, "mode": LogprobsMode.SCALED}
    _, (record,) = step(admitted(**params), chunk(4, 7, 7, 2, **good))
    assert record.prompt.logprobs.shape == record.prompt.chosen_logprobs.shape == (4, 2)
    np.testing.assert_allclose(record.prompt.chosen_logprobs[0], [-5 / 24, -5 / 32])
    for wrong in ({"columns": 3}, {"chosen": 1}, {"mode": LogprobsMode.RAW}, {"columns": 1}):
        with pytest.raises(ProcessorError, match="asked for prompt logprobs with K = 1, 2 chosen"):
            step(admitted(**params), chunk(4, 7, **good | wrong))


LOST = r"where tokens 1 and on of request 'r' were next"


@pytest.mark.parametrize(
    ("state", "messages", "error", "complaint"),
    [
        *[(admitted(), [lost], StepLost, LOST) for lost in (chunk(7, 7), chunk(9, 4), chunk(4, 8))],
        (admitted(), [chunk(4, 7, 7, 2, 5)], StepLost, LOST),
        (admitted(), [chunk(4, 7), chunk(4, 7)], StepLost, "tokens 3 and on"),
        (admitted(), [chunk(4, 7, 7), target(0, tokens(5))], StepLost,
         "after 3 of the 4 rows of its prompt's logprobs: the others are"),
        (admitted(Progress(num_prompt_rows=4)), [target(0, tokens(5))], StepLost,
         "after 0 of the 4 rows"),
        (admitted(prompt_logprobs=None), [chunk(4)], ProcessorError, "which has none to come"),
        # A prompt of one token has no rows.
        (admitted(prompt=(9,)), [target(0, tokens(5)), chunk(4)], ProcessorError,
         "which has none to come"),
        (admitted(), [chunk(4, generation=3)], ProcessorError, "admit a request before"),
    ],
)  # fmt: skip
def test_rows_that_are_not_the_next_are_refused(state, messages, error, complaint):
    state, _ = run(state, *messages[:-1])
    with pytest.raises(error, match=complaint):
        step(state, messages[-1])


def test_one_of_two_prompts_in_a_message_can_be_taken():
    state = admit(admitted(), 1, 5, asking("s", (3, 8, 4)))
    state, _ = step(state, chunk(8, slot=1, generation=5))
    slots = [tokens(4, 7, columns=2, drafts=0), tokens(4, generation=5, columns=2, drafts=0)]
    _, records = step(state, decode(encode(Kind.PROMPT, 1, slots)))
    whole = parts(records)
    assert [part[:2] for part in whole] == [(1, [4, 7]), (2, [4])]
    (batch,) = records.batches
    one_by_one = [parts(Records((batch.take(np.array([n])),))) for n in (0, 1)]
    assert one_by_one == [[one] for one in whole]
