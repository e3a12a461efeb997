"""The memory and the work that any message can cost, in proportion to its bytes (docs/security.md).

Memory is the peak of what decoding and processing allocate; work is the number of lines of Python
that they run. Both are counted, so that no result depends on the machine.
"""

import struct

import numpy as np
import pytest

from ipc import wire
from ipc.wire import Kind, SlotState
from jax_specdec.records.decode import MessageError
from jax_specdec.records.encode import SlotContents, encode
from jax_specdec.records.output_processor import ProcessorError, ProcessorState
from tests.support.decoding_cost import allowed_memory, cost
from tests.support.processor_messages import all_admitted, request

LINES_PER_BYTE, LINES_PER_SEQUENCE, LINES = 2, 2, 2_000
B = 256
STOPS = {"stop_sequences": tuple((8, 8, 8, n, 7) for n in range(4)), "stop_token_ids": (9,)}


def served(num_slots=B, num_drafts=wire.MAX_DRAFTS, **params):
    """A state whose slots all have a request, of generation 1."""
    asked = [request(f"r{slot}", max_tokens=100_000, **params) for slot in range(num_slots)]
    return all_admitted(asked, num_drafts=num_drafts)


def check(data, state):
    memory, lines, error = cost(data, state)
    assert memory <= allowed_memory(data, state)
    sequences = max(len(asked.params.stop_sequences) for asked in state.admitted.requests)
    assert lines <= (LINES_PER_BYTE + LINES_PER_SEQUENCE * sequences) * len(data) + LINES
    return error


def slots(count, generation=1, **fields):
    return [SlotContents(generation=generation, **fields)] * count


@pytest.mark.parametrize("count", [1, B])
@pytest.mark.parametrize("drafts", [wire.MAX_DRAFTS + 1, 255])
def test_drafts_that_were_never_asked_for_cost_nothing(count, drafts):
    """5 KB of such slots once took 800 MB for the histograms of accepted drafts."""
    data = encode(Kind.TARGET, 0, slots(count, token_ids=[5], num_drafts=drafts))
    error = check(data, served(count))
    assert isinstance(error, MessageError)
    assert f"slot 0: num_drafts = {drafts} cannot be" in str(error)
    assert f"at most {wire.MAX_DRAFTS} drafts" in str(error)


@pytest.mark.parametrize("kind", [Kind.TARGET, Kind.DRAFT])
def test_more_drafts_than_were_to_be_proposed_are_refused(kind):
    state = served(2, num_drafts=3)
    said = [
        SlotContents(generation=1, token_ids=[5] * (n if kind is Kind.DRAFT else 3), num_drafts=n)
        for n in (3, 4)
    ]
    error = check(encode(kind, 0, said), state)
    assert isinstance(error, ProcessorError)
    assert "slot 1: 4 drafts; this state's worker proposes 3 at most" in str(error)
    assert check(encode(kind, 0, said[:1]), state) is None
    for wrong in (-1, wire.MAX_DRAFTS + 1):
        with pytest.raises(ProcessorError, match=f"num_drafts = {wrong} must be from 0 to"):
            ProcessorState.empty(1, num_drafts=wrong)


WIDE = {
    "columns": wire.MAX_TOP_K + 1, "num_chosen": wire.MAX_CHOSEN,
    "token_ids": [1], "token_ranks": [1],
    "logprobs": np.zeros((1, wire.MAX_TOP_K + 1 + wire.MAX_CHOSEN), np.float32),
    "topk_ids": np.zeros((1, wire.MAX_TOP_K), np.int32),
}  # fmt: skip
MANY = [7] * (wire.MAX_DRAFTS + 1)
FULL = {"token_ids": MANY, "num_drafts": wire.MAX_DRAFTS}
PROMPT = {"columns": 1, "token_ids": [5] * 60000, "token_ranks": [1] * 60000,
          "logprobs": np.zeros((60000, 1)), "topk_ids": np.zeros((60000, 0))}  # fmt: skip
HOSTILE = {
    "more slots than there are": (Kind.TARGET, slots(40 * B, state=SlotState.NOTHING), {}),
    "every slot as full as it can be": (Kind.TARGET, slots(B, **FULL), {}),
    "tokens that almost end stop sequences": (Kind.TARGET, slots(B, **FULL), STOPS),
    "stop tokens only": (Kind.TARGET, slots(B, **FULL | {"token_ids": [9] * 65}), STOPS),
    "generations that were never": (Kind.TARGET, slots(B, generation=7, token_ids=[5]), {}),
    "generations of the past": (Kind.TARGET, slots(B, generation=0, token_ids=[7]), STOPS),
    "the widest rows, which nobody asked for": (Kind.TARGET, slots(B, **WIDE), {}),
    "first tokens with drafts": (
        Kind.TARGET, slots(B, state=SlotState.PREFILL_FIRST_TOKEN, **FULL), {},
    ),
    "preemptions": (Kind.TARGET, slots(B, state=SlotState.PREEMPTED), {}),
    "drafts of no step": (Kind.DRAFT, slots(B, token_ids=MANY[:-1], num_drafts=64), {}),
    "wide drafts": (Kind.DRAFT, slots(B, num_drafts=1, **WIDE), {}),
    "a prompt that nobody asked for": (Kind.PROMPT, slots(2, token_ids=[5] * 65535), {}),
    "the wrong prompt": (Kind.PROMPT, slots(1, **PROMPT), {"prompt_logprobs": 0}),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_no_message_costs_more_than_its_bytes_allow(what):
    kind, said, params = HOSTILE[what]
    state = served(**params)
    check(encode(kind, 0, said, draft_follows=kind is Kind.TARGET), state)


@pytest.mark.parametrize("name", wire.SLOT)
def test_no_field_of_a_slot_at_its_largest_costs_more(name):
    good, field = encode(Kind.TARGET, 0, slots(B, token_ids=[5, 6], num_drafts=3)), wire.SLOT[name]
    words = np.frombuffer(good, np.uint32).copy()
    words[wire.HEADER_WORDS + field.word] |= field.maximum << field.shift
    for kind in (Kind.TARGET, Kind.DRAFT, Kind.PROMPT):
        data = bytearray(words.tobytes())
        data[4] = kind
        error = check(bytes(data), served())
        assert error is not None or name == "generation"


@pytest.mark.parametrize("name", wire.HEADER)
def test_no_field_of_the_header_at_its_largest_costs_more(name):
    field = wire.HEADER[name]
    for data in (encode(Kind.TARGET, 0, slots(B, token_ids=[5])), bytes(4 * wire.HEADER_WORDS)):
        words = np.frombuffer(data, np.uint32).copy()
        words[field.word] |= field.maximum << field.shift
        check(words.tobytes(), served())
    assert isinstance(check(struct.pack("<8I", *[2**32 - 1] * 8), served()), MessageError)
