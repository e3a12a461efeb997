"""The output processor by hand-made messages: what no random life of its slots compares.

`test_state_machine` has every record and counter against a reference.
"""

import numpy as np
import pytest

from ipc.wire import Kind, LogprobsMode
from jax_specdec.records.batch import FinishReason
from jax_specdec.records.decode import decode
from jax_specdec.records.encode import encode
from jax_specdec.records.outcomes import Outcomes
from jax_specdec.records.output_processor import ProcessorState, admit, release, step
from jax_specdec.records.processor_state import ProcessorError, Progress, StepLost, is_newer
from jax_specdec.records.record import Records
from tests.support import processor_messages
from tests.support.processor_messages import admitted, draft, drafts, request, run, target, tokens
from tests.support.requests import request as request_of


def two_requests(**params):
    state = admit(ProcessorState.empty(3), 0, 1, request("a", draft_logprobs=True, **params))
    return admit(state, 1, 1, request("b", draft_logprobs=True, **params))


def both(n, *, follows=True, a=(5, 6), b=(7,)):
    return target(n, tokens(*a, drafts=2), tokens(*b, drafts=2), draft_follows=follows)


def both_drafts(n):
    return draft(n, drafts(1, 2), drafts(3, 4))


def test_stop_sequences_begin_at_the_first_token():
    _, ((record,),) = run(admitted(stop_sequences=((0, 5),)), target(0, tokens(5)))
    assert record.finish_reason is None


def test_finish_reasons_are_those_of_the_contract():
    assert [reason.name for reason in FinishReason] == [
        "STOP_TOKEN", "STOP_SEQUENCE", "LENGTH", "ABORT", "RECOVERY_ERROR", "PREFILL_HANDOVER",
        "WORKER_LOST", "ATTEMPTS_EXHAUSTED", "STOP_STRING", "DEADLINE",
    ]  # fmt: skip


def columns_of(state):
    """All that changes with a step, as arrays."""
    columns = [getattr(state.columns, name) for name in state.columns.__slots__]
    return [x.counted() if isinstance(x, Outcomes) else x for x in columns]


def test_step_is_pure():
    state = admitted(logprobs=0, stop_sequences=((1, 2, 3),))
    columns = [column.copy() for column in columns_of(state)]
    message = target(0, tokens(1, 2, drafts=4, columns=1))
    after, once = step(state, message)
    for column, before in zip(columns_of(state), columns, strict=True):
        np.testing.assert_array_equal(column, before)
    assert not any(column.flags.writeable for column in columns_of(after))
    _, twice = step(state, message)
    assert once[0].token_ids.tolist() == twice[0].token_ids.tolist()


# --- Target and draft messages, joined by request and step. ---

ASKED = {"logprobs": 1, "extra_token_ids": (3, 4), "draft_logprobs": True}


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"columns": 3}, "has 3, 2 and RAW"),
        ({"columns": 0, "chosen": 0}, "has 0, 0 and RAW"),
        ({"chosen": 1}, "has 2, 1 and RAW"),
        ({"mode": LogprobsMode.PROCESSED}, "has 2, 2 and PROCESSED"),
    ],
)
def test_drafts_with_other_rows_than_were_asked_for_are_refused(wrong, complaint):
    """Either message may come first; nothing changes, and the records that wait can go on."""
    before = admit(ProcessorState.empty(2), 0, 1, request("plain", draft_logprobs=True))
    before = admit(before, 1, 1, request("a", **ASKED))
    fields = {"columns": 2, "chosen": 2}
    first = target(0, tokens(6), tokens(5, **fields), draft_follows=True)
    good, bad = (draft(0, drafts(9), drafts(1, 2, **fields | other)) for other in ({}, wrong))
    asked = r"slot 1: request 'a' asked for 2 columns .*, 2 chosen ids and mode RAW; "
    complaint = f"{asked}the draft message of step 0 {complaint}"

    waiting, _ = step(before, first)
    with pytest.raises(ProcessorError, match=complaint):
        step(waiting, bad)
    _, (plain, asking) = step(waiting, good)
    assert plain.draft.token_ids.tolist() == [9]
    assert plain.draft.logprobs is plain.draft.topk_ids is plain.draft.token_ranks is None
    assert plain.draft.chosen_logprobs is None
    assert asking.draft.logprobs.tolist() == [[-0.25, -0.125], [-0.375, -0.1875]]
    assert asking.draft.topk_ids.tolist() == [[1], [2]]
    assert asking.draft.token_ranks.tolist() == [2, 3]
    assert asking.draft.chosen_logprobs.shape == (2, 2)

    early, _ = step(before, bad)
    with pytest.raises(ProcessorError, match=complaint):
        step(early, first)
    assert early.next_step == 0


# --- What is refused, and the numbers that a refusal names. ---


PROMPT = (9, 4, 7, 7, 2)


def asking(id="r", prompt=PROMPT, **params):
    return request_of(id, prompt, **{"prompt_logprobs": 1, "max_tokens": 9} | params)


def scored(handed_over=None, **params):
    return admit(ProcessorState.empty(2), 0, 1, asking(**params), handed_over=handed_over)


def chunk(*ids, slot=0, generation=1, columns=2, **fields):
    """The message of one slot's chunk; the others say nothing."""
    slots = [processor_messages.silent(generation=generation)] * 2
    slots[slot] = tokens(*ids, generation=generation, columns=columns, drafts=0, **fields)
    return decode(encode(Kind.PROMPT, 0, slots))


LOST = r"where tokens 1 and on of request 'r' were next"


@pytest.mark.parametrize(
    ("state", "messages", "error", "complaint"),
    [
        (two_requests(), [both(0, follows=False), both(1, follows=False), both(4)], StepLost,
         r"target message 4 came, 2 was next: steps 2 to 3 \(2\) are lost"),
        (two_requests(), [both(0), both(0)], StepLost,
         "message 0 came, 1 was next: .* came twice or out of order"),
        (two_requests(), [both(1)], StepLost, "target message 1 came, 0 was next"),
        (two_requests(), [both(0), both_drafts(3)], StepLost,
         r"step 3 came before .* steps 1 to 2 are lost"),
        (two_requests(), [both(0), both_drafts(1), both_drafts(1)], StepLost,
         "draft message of step 1 came twice"),
        (two_requests(), [target(0, *[tokens(1)] * 4)], ProcessorError,
         "4 slots; this state has 3"),
        (two_requests(), [target(0, tokens(5), process_rank=1)], ProcessorError,
         "of process rank 1; this state belongs to rank 0"),
        (admitted(logprobs=0), [target(0, tokens(5, columns=2))], ProcessorError,
         r"asked for 1 column .*the target message of step 0 has 2"),
        (admitted(logprobs=0, logprobs_mode=LogprobsMode.SCALED),
         [target(0, tokens(1, columns=1))], ProcessorError,
         r"mode SCALED; the target .* has 1, 0 and RAW"),
        (admitted(handed_over=Progress(token_ids=(5,))),
         [target(0, processor_messages.first_token(5, 6))], ProcessorError,
         "request 'r', which has tokens already: it would be delivered twice"),
        (admitted(), [target(0, tokens(5, generation=2))], ProcessorError,
         "slot 0: the message is about generation 2, but the last one admitted is 1"),
        (ProcessorState.empty(1), [target(0, tokens(5))], ProcessorError,
         "the last one admitted is -1"),
        *[(scored(), [lost], StepLost, LOST) for lost in (chunk(7, 7), chunk(9, 4), chunk(4, 8))],
        (scored(), [chunk(4, 7, 7, 2, 5)], StepLost, LOST),
        (scored(), [chunk(4, 7), chunk(4, 7)], StepLost, "tokens 3 and on"),
        (scored(), [chunk(4, 7, 7), target(0, tokens(5))], StepLost,
         "after 3 of the 4 rows of its prompt's logprobs: the others are"),
        (scored(Progress(num_prompt_rows=4)), [target(0, tokens(5))], StepLost,
         "after 0 of the 4 rows"),
        (scored(prompt_logprobs=None), [chunk(4)], ProcessorError, "which has none to come"),
        # A prompt of one token has no rows.
        (scored(prompt=(9,)), [target(0, tokens(5)), chunk(4)], ProcessorError,
         "which has none to come"),
        (scored(), [chunk(4, generation=3)], ProcessorError, "admit a request before"),
    ],
)  # fmt: skip
def test_a_message_that_contradicts_the_state_is_refused(state, messages, error, complaint):
    state, _ = run(state, *messages[:-1])
    with pytest.raises(error, match=complaint):
        step(state, messages[-1])


def test_a_reader_may_join_a_running_stream():
    state = admit(ProcessorState.empty(1, first_step=None), 0, 1, request("a"))
    state, (nothing, (record,)) = run(state, draft(40, drafts(1)), target(41, tokens(5)))
    assert (nothing, record.step, record.token_ids.tolist(), record.draft) == ([], 41, [5], None)
    with pytest.raises(StepLost):
        step(state, target(43, tokens(5)))


@pytest.mark.parametrize(
    ("progress", "params", "complaint"),
    [
        ({"token_ids": (1, 2)}, {"max_tokens": 2}, "nothing is left"),
        ({"token_ids": (6,)}, {"stop_token_ids": (6,)}, "ended with stop token 6"),
        ({"token_ids": (1, 2)}, {"stop_sequences": ((1, 2),), "min_tokens": 1},
         "ended with a stop sequence"),
        ({"token_ids": (1,)}, {"logprobs": 0}, "needs cumulative_logprob"),
    ],
)  # fmt: skip
def test_progress_with_nothing_left_is_refused(progress, params, complaint):
    with pytest.raises(ProcessorError, match=complaint):
        admitted(handed_over=Progress(**progress), **params)


def test_admit_and_release_check_the_slot_and_the_generation():
    state = admitted(num_slots=2)
    for slot, generation, id, complaint in (
        (0, 2, "other", r"slot 0 is taken by request 'r' \(running\)"),
        (1, 1, "r", "request id 'r' holds another slot"),
        (2, 1, "other", "slot 2 does not exist"),
        (1, 2**32, "other", "generation = 4294967296 must be"),
    ):
        with pytest.raises(ProcessorError, match=complaint):
            admit(state, slot, generation, request(id))
    state = release(state, 0)
    assert release(state, 0) is state  # a free slot stays free
    for used in (1, 0):
        with pytest.raises(ProcessorError, match="has had generation 1"):
            admit(state, 0, used, request("other"))
    admit(state, 0, 2, request("other"))


def test_generations_are_on_the_circle_of_32_bits():
    assert [is_newer(*pair) for pair in ((1, 0), (0, 2**32 - 1), (2**31 - 1, 0))] == [True] * 3
    assert not any(is_newer(*pair) for pair in ((2**31, 0), (0, 2**31), (5, 5), (2**32 - 1, 0)))
    state = admit(ProcessorState.empty(1), 0, 2**32 - 1, request("old"))
    with pytest.raises(ProcessorError, match="about generation 0, but the last one admitted is"):
        step(state, target(0, tokens(5, generation=0)))
    state = admit(release(state, 0), 0, 0, request("new"))
    for n, late in enumerate((2**32 - 1, 2**32 - 2, 2**31 + 1)):
        state, records = step(state, target(n, tokens(5, generation=late)))
        assert (len(records), state.counters.late_slots) == (0, n + 1)
    state, (record,) = step(state, target(3, tokens(5, generation=0)))
    assert (record.request_id, record.token_ids.tolist()) == ("new", [5])
    for used in (0, 2**32 - 1, 2**31):
        with pytest.raises(ProcessorError, match="is used up"):
            admit(release(state, 0), 0, used, request("another"))


def parts(records):
    """Place, ids and logprobs of each record's part of the prompt."""
    return [
        (r.prompt.start, r.prompt.token_ids.tolist(), r.prompt.logprobs[:, 0].tolist())
        for r in records
    ]


def test_chosen_ids_and_modes_are_those_of_the_request():
    params = {"logprobs": 0, "extra_token_ids": (3, 1), "logprobs_mode": LogprobsMode.SCALED}
    good = {"chosen": 2, "mode": LogprobsMode.SCALED}
    _, (record,) = step(scored(**params), chunk(4, 7, 7, 2, **good))
    assert record.prompt.logprobs.shape == record.prompt.chosen_logprobs.shape == (4, 2)
    np.testing.assert_allclose(record.prompt.chosen_logprobs[0], [-5 / 24, -5 / 32])
    for wrong in ({"columns": 3}, {"chosen": 1}, {"mode": LogprobsMode.RAW}, {"columns": 1}):
        with pytest.raises(ProcessorError, match="asked for prompt logprobs with K = 1, 2 chosen"):
            step(scored(**params), chunk(4, 7, **good | wrong))


def test_one_of_two_prompts_in_a_message_can_be_taken():
    state = admit(scored(), 1, 5, asking("s", (3, 8, 4)))
    state, _ = step(state, chunk(8, slot=1, generation=5))
    slots = [tokens(4, 7, columns=2, drafts=0), tokens(4, generation=5, columns=2, drafts=0)]
    _, records = step(state, decode(encode(Kind.PROMPT, 1, slots)))
    whole = parts(records)
    assert [part[:2] for part in whole] == [(1, [4, 7]), (2, [4])]
    (batch,) = records.batches
    one_by_one = [parts(Records((batch.take(np.array([n])),))) for n in (0, 1)]
    assert one_by_one == [[one] for one in whole]
