"""The message layout: every field over its whole range; bad bytes are refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc import wire
from ipc.wire import Kind, LogprobsMode, SlotState
from jax_specdec.records.decode import MessageError, decode
from jax_specdec.records.encode import SlotContents, encode

pytestmark = pytest.mark.fast


@st.composite
def target_slots(draw, max_k=wire.MAX_TOP_K):
    state = draw(st.sampled_from(SlotState))
    generation = draw(st.integers(0, 2**32 - 1))
    mode = draw(st.sampled_from(LogprobsMode))
    drafts = draw(st.integers(0, 5))
    columns = draw(st.integers(0, 4) | st.integers(0, max_k + 1))
    chosen = draw(st.integers(0, 3)) if columns else 0
    if state == SlotState.TOKENS:
        tokens = draw(st.integers(1, drafts + 1))
        rows = tokens if columns else 0
    elif state == SlotState.PREFILL_FIRST_TOKEN:
        tokens, rows = drafts + 1, min(columns, 1)
    else:
        tokens = rows = 0
    seed = draw(st.integers(0, 2**31))
    random = np.random.default_rng(seed)
    int32 = np.iinfo(np.int32)
    return SlotContents(
        state=state,
        generation=generation,
        mode=mode,
        num_drafts=drafts,
        columns=columns,
        num_chosen=chosen,
        token_ids=random.integers(int32.min, int32.max, tokens, dtype=np.int32),
        token_ranks=random.integers(int32.min, int32.max, rows, dtype=np.int32),
        logprobs=random.standard_normal((rows, columns + chosen)).astype(np.float32),
        topk_ids=random.integers(int32.min, int32.max, rows * max(columns - 1, 0), dtype=np.int32),
    )


@given(
    slots=st.lists(target_slots(), max_size=6),
    step=st.integers(0, 2**64 - 1),
    running=st.booleans(),
    draft_follows=st.booleans(),
    process_rank=st.integers(0, 2**32 - 1),
)
def test_every_field_survives_the_round_trip(slots, step, running, draft_follows, process_rank):
    data = encode(
        Kind.TARGET,
        step,
        slots,
        running=running,
        draft_follows=draft_follows,
        process_rank=process_rank,
    )
    message = decode(data)
    assert message.kind is Kind.TARGET
    assert (message.step, message.running, message.draft_follows) == (step, running, draft_follows)
    assert (message.process_rank, message.num_slots) == (process_rank, len(slots))
    assert message.num_bytes == len(data)
    for index, slot in enumerate(slots):
        view = message.slot(index)
        assert (view.state, view.generation) == (slot.state, slot.generation)
        assert message.mode[index] == slot.mode
        assert message.num_drafts[index] == slot.num_drafts
        assert message.columns[index] == slot.columns
        assert message.num_chosen[index] == slot.num_chosen
        np.testing.assert_array_equal(view.token_ids, slot.token_ids)
        np.testing.assert_array_equal(view.token_ranks, slot.token_ranks)
        if slot.columns:
            np.testing.assert_array_equal(view.logprobs, slot.logprobs)
        np.testing.assert_array_equal(view.topk_ids.reshape(-1), slot.topk_ids)


def whole_range(fields):
    """Draws a value for each field from its whole range, often at either end."""
    return st.fixed_dictionaries(
        {
            name: st.sampled_from([0, 1, field.maximum - 1, field.maximum])
            | st.integers(0, field.maximum)
            for name, field in fields.items()
        }
    )


@pytest.mark.parametrize(
    ("fields", "num_words"),
    [(wire.HEADER, wire.HEADER_WORDS), (wire.SLOT, wire.SLOT_WORDS)],
)
@settings(max_examples=50)
@given(data=st.data())
def test_every_field_keeps_its_value_over_its_whole_range(fields, num_words, data):
    values = data.draw(whole_range(fields))
    written = {name: np.uint32(value) for name, value in values.items()}
    words = wire.words_of(np, fields, num_words, written)
    assert words.dtype == np.uint32
    assert words.shape == (num_words,)
    assert {name: int(field.get(words)) for name, field in fields.items()} == values


@pytest.mark.parametrize("fields", [wire.HEADER, wire.SLOT])
def test_no_two_fields_share_a_bit(fields):
    taken = [
        (field.word, bit)
        for field in fields.values()
        for bit in range(field.shift, field.shift + field.bits)
    ]
    assert len(set(taken)) == len(taken)
    assert max(bit for _, bit in taken) < 32


def test_only_what_was_asked_for_travels():
    plain = SlotContents(num_drafts=2, token_ids=[1, 2, 3])
    k0 = SlotContents(columns=1, token_ids=[7], token_ranks=[1], logprobs=[[-0.5]])
    k2 = SlotContents(
        columns=3, token_ids=[7], token_ranks=[2], logprobs=[[-1, -0.5, -1]], topk_ids=[[5, 7]]
    )
    sizes = [len(encode(Kind.TARGET, 0, slots)) // 4 for slots in ([plain], [k0], [k2])]
    base = wire.HEADER_WORDS + wire.SLOT_WORDS
    assert sizes == [base + 3, base + 1 + 1 + 1, base + 1 + 1 + 3 + 2]
    # In one batch, no slot pays for the columns of another.
    assert len(encode(Kind.TARGET, 0, [plain, k0, k2])) // 4 == sum(sizes) - 2 * wire.HEADER_WORDS


def test_kind_and_k_share_a_word_and_are_never_truncated():
    assert wire.HEADER["kind"].word == wire.HEADER["max_num_logprobs"].word
    words = np.frombuffer(encode(255, 0, [], max_num_logprobs=65535), np.uint32)
    assert wire.HEADER["kind"].get(words) == 255
    assert wire.HEADER["max_num_logprobs"].get(words) == 65535
    with pytest.raises(wire.WireError, match=r"kind = 256 .*0 to 255"):
        encode(256, 0, [])
    with pytest.raises(wire.WireError, match=r"max_num_logprobs = 65536 .*0 to 65535"):
        encode(3, 0, [], max_num_logprobs=65536)
    with pytest.raises(wire.WireError, match="kind = -1"):
        encode(-1, 0, [])


def good_message():
    return encode(
        Kind.TARGET,
        7,
        [
            SlotContents(columns=1, token_ids=[7], token_ranks=[1], logprobs=[[-0.5]]),
            SlotContents(state=SlotState.STOPPED),
        ],
    )


@pytest.mark.parametrize(
    ("word", "value", "complaint"),
    [
        (0, 0x12340001, "magic 0x1234"),
        (0, wire.MAGIC << 16 | 9, "version 9"),
        (1, 77, "kind 77"),
        (1, 3 | 513 << 8, "max_num_logprobs 513 is over the limit 512"),
        (2, 4, "checks failed"),
        (2, 1 << 8, "SLOT_COUNTS"),
        (3, 3, "slots"),
        (3, 2**32 - 1, "slots"),
        (4, 5, "counts 5 words"),
        (wire.HEADER_WORDS, 6 | 1 << 16, "state = 6"),
        (wire.HEADER_WORDS, 3 << 8 | 1 << 16, "mode = 3"),
        (wire.HEADER_WORDS, 9 << 16, "columns = 9"),
        (wire.HEADER_WORDS + 1, 2 | 1 << 16, "num_tokens = 2"),
        (wire.HEADER_WORDS + 1, 0, "num_tokens = 0"),
        (wire.HEADER_WORDS + 1, 1, "num_rows = 0"),
        (wire.HEADER_WORDS + 2, 129 << 16, "num_chosen = 129"),
        (wire.HEADER_WORDS + 2, 1 << 16, "counts make"),
        (wire.HEADER_WORDS + wire.SLOT_WORDS + 1, 1, "slot 1: num_tokens = 1"),
    ],
)
def test_a_wrong_value_is_named(word, value, complaint):
    words = np.frombuffer(good_message(), np.uint32).copy()
    decode(words)  # the message is good before the change
    words[word] = value
    with pytest.raises(MessageError, match=complaint):
        decode(words)


@settings(max_examples=50)  # test_mutated_messages has 30,000
@given(data=st.data())
def test_mutated_bytes_are_decoded_equal_or_refused(data):
    slots = data.draw(st.lists(target_slots(max_k=4), min_size=1, max_size=4))
    good = np.frombuffer(encode(Kind.TARGET, 3, slots), np.uint8)
    words = good.copy()
    for _ in range(data.draw(st.integers(1, 4))):
        words[data.draw(st.integers(0, words.size - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.none() | st.integers(0, words.size))
    try:
        message = decode(words[:cut].tobytes())
    except MessageError:
        return
    # A message that was accepted is consistent: every view lies inside it.
    for index in range(message.num_slots):
        view = message.slot(index)
        assert view.token_ids.size == message.num_tokens[index]
        assert len(view.logprobs) == len(view.token_ranks) == message.num_rows[index]


@pytest.mark.parametrize("size", [0, 3, 28, 31, 33])
def test_a_fragment_is_refused(size):
    with pytest.raises(MessageError, match="words"):
        decode(good_message()[:size])


def test_views_share_the_buffer_and_are_read_only():
    message = decode(bytearray(good_message()))
    for array in (message.token_ids, message.logprobs, message.token_ranks, message.topk_ids):
        assert not array.flags.writeable
        assert array.size == 0 or array.base is not None


def test_host_bound_covers_the_message():
    slots = [
        SlotContents(
            num_drafts=2,
            columns=3,
            num_chosen=1,
            token_ids=[1, 2, 3],
            token_ranks=[1, 1, 1],
            logprobs=np.zeros((3, 4)),
            topk_ids=np.zeros((3, 2)),
        ),
        SlotContents(num_drafts=1, token_ids=[1, 2]),
    ]
    bound = wire.words_bound([3, 2], [3, 0], [1, 0])
    assert bound * 4 == len(encode(Kind.TARGET, 0, slots))
