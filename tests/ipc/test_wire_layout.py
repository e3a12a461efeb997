"""The layout of a message as numbers, which only another version of it may change."""

import struct
from dataclasses import replace

import pytest

from ipc import wire
from ipc.wire import Kind, LogprobsMode, SlotState
from jax_specdec.records.decode import MessageError, decode
from jax_specdec.records.encode import SlotContents, encode
from tests.support.processor_messages import drafts


def test_one_message_byte_by_byte():
    """The layout as numbers: whoever changes it has to change the version too."""
    slots = [
        SlotContents(
            generation=2**32 - 1, mode=LogprobsMode.SCALED, num_drafts=3, columns=2, num_chosen=1,
            token_ids=[5, 6], token_ranks=[1, 4], topk_ids=[[5], [9]],
            logprobs=[[-0.5, -0.5, -3], [-2, -0.25, -4]],
        ),
        SlotContents(state=SlotState.RECOVERY_STOP, generation=7),
        SlotContents(generation=8, token_ids=[1]),
    ]  # fmt: skip
    data = encode(
        Kind.TARGET, (9 << 32) + 4, slots, running=True, draft_follows=True, process_rank=2,
        weights_version=2**32 - 6, digest=0xABCD,
    )  # fmt: skip
    header = [0x4C53 << 16 | 3, 3 | 1 << 8, 1 | 2 | 0xABCD << 16, 3, 34, 4, 9, 2, 2**32 - 6]
    slot_words = [
        *(0 | 1 << 8 | 2 << 16, 2 | 2 << 16, 3 | 1 << 16, 2**32 - 1),
        *(4, 0, 0, 7),
        *(0, 1, 0, 8),
    ]
    payload = struct.pack("<3i2i6f2i", 5, 6, 1, 1, 4, -0.5, -0.5, -3, -2, -0.25, -4, 5, 9)
    assert data == struct.pack("<21I", *header, *slot_words) + payload
    assert wire.VERSION == 3
    assert (decode(data).weights_version, decode(data).digest) == (2**32 - 6, 0xABCD)


def test_kinds_states_and_modes_have_their_numbers():
    assert {kind.name: int(kind) for kind in Kind} == {"TARGET": 3, "DRAFT": 4, "PROMPT": 5}
    assert [mode.name for mode in sorted(LogprobsMode)] == ["RAW", "SCALED", "PROCESSED"]
    assert [state.name for state in sorted(SlotState)] == [
        "TOKENS", "NOTHING", "STOPPED", "PREEMPTED", "RECOVERY_STOP", "PREFILL_FIRST_TOKEN",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_drafts", 65536), ("num_chosen", 65536), ("columns", 65536), ("generation", 2**32),
     ("generation", -1), ("state", 256), ("mode", 256)],
)  # fmt: skip
def test_a_slot_value_that_does_not_fit_is_refused_where_it_is_made(field, value):
    contents = SlotContents(state=SlotState.STOPPED)
    encode(Kind.TARGET, 0, [contents])
    with pytest.raises(wire.WireError, match=rf"{field} = {value} does not fit"):
        encode(Kind.TARGET, 0, [replace(contents, **{field: value})], max_num_logprobs=0)


def test_a_draft_message_has_all_the_drafts_of_its_step_or_none():
    whole = drafts(7, 8, 9, columns=2)
    assert decode(encode(Kind.DRAFT, 4, [whole])).num_tokens.tolist() == [3]
    assert decode(encode(Kind.DRAFT, 4, [SlotContents(num_drafts=3)])).num_tokens.tolist() == [0]
    for ids in ((7, 8), (7, 8, 9, 10)):
        with pytest.raises(MessageError, match=f"num_tokens = {len(ids)}"):
            decode(encode(Kind.DRAFT, 4, [SlotContents(num_drafts=3, token_ids=ids)]))
