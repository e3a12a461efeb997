"""The message layout: every field over its whole range, as numbers; bad bytes are refused."""

import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc import wire
from ipc.wire import Kind, LogprobsMode, SlotState
from jax_specdec.declaration import EVERYTHING, USUAL, Serves
from jax_specdec.kept_sets import KeptSets
from jax_specdec.records.decode import MessageError, decode
from jax_specdec.records.encode import SlotContents, encode


def whole_range(fields):
    """Draws a value for each field from its whole range, often at either end."""

    def values(most):
        return st.sampled_from([0, 1, most - 1, most]) | st.integers(0, most)

    return st.fixed_dictionaries({name: values(field.maximum) for name, field in fields.items()})


@pytest.mark.parametrize(
    ("fields", "num_words"), [(wire.HEADER, wire.HEADER_WORDS), (wire.SLOT, wire.SLOT_WORDS)]
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
    together = len(encode(Kind.TARGET, 0, [plain, k0, k2])) // 4
    assert together == sum(sizes) - 2 * wire.HEADER_WORDS
    assert together == wire.words_bound([3, 1, 1], [0, 1, 3], [0, 0, 0])


def widest(num_tokens, vocab_size, values=0, **fields):
    """A slot with as many tokens, and all that a request may ask for."""
    k = min(wire.MAX_TOP_K, vocab_size)
    return SlotContents(
        columns=k + 1, num_chosen=wire.MAX_CHOSEN, token_ids=np.zeros(num_tokens),
        token_ranks=np.ones(num_tokens), topk_ids=np.zeros((num_tokens, k)),
        logprobs=np.zeros((num_tokens, k + 1 + wire.MAX_CHOSEN + values.bit_count())),
        values=values, **fields,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("num_slots", "positions", "prompt_tokens", "vocab_size", "longest"),
    [
        (2, 3, 5, 7, "step"),
        (1, 1, 64, 7, "chunk"),
        (3, 2, 300, 40, "chunk"),
        (1, 4, 500, 600, "limit"),  # the chunk alone would be longer
        (4, 65, 64, 600, "step"),  # of more words than a chunk may have
        (4, 65, 500, 600, "step"),
    ],
)
def test_the_bound_is_the_longest_message_of_a_worker(
    num_slots, positions, prompt_tokens, vocab_size, longest
):
    most_kept = min(wire.MAX_KEPT, vocab_size)
    ids = np.tile(np.arange(most_kept, dtype=np.int32), positions)
    full = KeptSets.of(np.full(positions, most_kept, np.int32), np.zeros(positions), ids)
    slots = [widest(positions, vocab_size, 3, num_drafts=positions - 1, kept=full)] * num_slots
    empty = [SlotContents()] * (num_slots - 1)
    words = {
        "step": len(encode(Kind.TARGET, 0, slots)) // wire.WORD_BYTES,
        "chunk": len(encode(Kind.PROMPT, 0, [widest(prompt_tokens, vocab_size), *empty])) // 4,
        "limit": wire.PROMPT_WORDS,
    }
    assert max(words["step"], min(words["chunk"], words["limit"])) == words[longest]
    k = min(wire.MAX_TOP_K, vocab_size)
    most = wire.Limits(
        columns=k + 1, more=wire.MAX_CHOSEN + 2, kept=most_kept, prompt_columns=k + 1,
        prompt_chosen=wire.MAX_CHOSEN,
    )  # fmt: skip
    assert wire.message_bound(num_slots, positions, prompt_tokens, most) == words[longest]


def test_the_bound_follows_what_is_declared():
    """A step of 64 slots: a few KB where no logprobs are served, 2.2 MB where everything is."""
    sizes = 64, 4, 64
    bounds = {
        name: 4 * wire.message_bound(*sizes, serves.limits(151_936))
        for name, serves in {
            "nothing": Serves.of([]),
            "usual": USUAL,
            "rows": replace(USUAL, max_extra_token_ids_of_prompts=512),
            "everything": EVERYTHING,
        }.items()
    }
    assert bounds["nothing"] == 4 * (wire.HEADER_WORDS + 64 * (wire.SLOT_WORDS + 4))
    assert bounds["usual"] < 70_000 < bounds["rows"] < 150_000
    assert 2_000_000 < bounds["everything"] < 2_400_000


def test_kind_and_k_share_a_word_and_are_never_truncated():
    assert wire.HEADER["kind"].word == wire.HEADER["max_num_logprobs"].word
    words = np.frombuffer(encode(255, 0, [], max_num_logprobs=65535), np.uint32)
    assert wire.HEADER["kind"].get(words) == 255
    assert wire.HEADER["max_num_logprobs"].get(words) == 65535
    for kind, k, said in (
        (256, 0, r"kind = 256 .*0 to 255"),
        (3, 65536, r"max_num_logprobs = 65536 .*0 to 65535"),
        (-1, 0, "kind = -1"),
    ):
        with pytest.raises(wire.WireError, match=said):
            encode(kind, 0, [], max_num_logprobs=k)


def good_message():
    asked = SlotContents(columns=1, token_ids=[7], token_ranks=[1], logprobs=[[-0.5]])
    return encode(Kind.TARGET, 7, [asked, SlotContents(state=SlotState.STOPPED)])


@pytest.mark.parametrize(("word", "value", "complaint"), [
    (0, 0x12340001, "magic 0x1234"),
    *[(0, wire.MAGIC << 16 | n, f"version {n};") for n in (0, 3, 5, 65535)],
    *[(1, n, f"kind {n} is none of") for n in (0, 2, 6, 255)],
    (1, 3 | 513 << 8, "max_num_logprobs 513 is over the limit 512"), (2, 4, "checks failed"),
    (2, 1 << 8, "SLOT_COUNTS"), (3, 3, "slots"), (3, 2**32 - 1, "slots"),
    (4, 5, "counts 5 words"), (wire.HEADER_WORDS, 6 | 1 << 16, "state = 6"),
    (wire.HEADER_WORDS, 3 << 8 | 1 << 16, "mode = 3"),
    (wire.HEADER_WORDS, 9 << 16, "columns = 9"),
    (wire.HEADER_WORDS + 1, 2 | 1 << 16, "num_tokens = 2"),
    (wire.HEADER_WORDS + 1, 0, "num_tokens = 0"), (wire.HEADER_WORDS + 1, 1, "num_rows = 0"),
    (wire.HEADER_WORDS + 2, 129 << 16, "num_chosen = 129"),
    (wire.HEADER_WORDS + 2, 1 << 16, "counts make"),
    (wire.HEADER_WORDS + wire.SLOT_WORDS + 1, 1, "slot 1: num_tokens = 1"),
])  # fmt: skip
def test_a_wrong_value_is_named(word, value, complaint):
    words = np.frombuffer(good_message(), np.uint32).copy()
    decode(words)  # the message is good before the change
    words[word] = value
    with pytest.raises(MessageError, match=complaint):
        decode(words)


@pytest.mark.parametrize("size", [0, 3, 28, 31, 33])
def test_a_fragment_is_refused(size):
    with pytest.raises(MessageError, match="words"):
        decode(good_message()[:size])


def test_one_message_byte_by_byte():
    """The layout as numbers: whoever changes it has to change the version too."""
    slots = [
        SlotContents(
            generation=2**32 - 1, mode=LogprobsMode.SCALED, num_drafts=3, values=1, columns=2,
            num_chosen=1,
            token_ids=[5, 6], token_ranks=[1, 4], topk_ids=[[5], [9]],
            logprobs=[[-0.5, -0.5, -3, 1.5], [-2, -0.25, -4, 0.75]],
        ),
        SlotContents(state=SlotState.RECOVERY_STOP, generation=7),
        SlotContents(generation=8, token_ids=[1]),
    ]  # fmt: skip
    data = encode(
        Kind.TARGET, (9 << 32) + 4, slots, running=True, draft_follows=True, process_rank=2,
        weights_version=2**32 - 6, digest=0xABCD,
    )  # fmt: skip
    header = [0x4C53 << 16 | 4, 3 | 1 << 8, 1 | 2 | 0xABCD << 16, 3, 36, 4, 9, 2, 2**32 - 6]
    slot_words = [
        *(0 | 1 << 8 | 2 << 16, 2 | 2 << 16, 3 | 1 << 8 | 1 << 16, 2**32 - 1),
        *(4, 0, 0, 7),
        *(0, 1, 0, 8),
    ]
    rows = -0.5, -0.5, -3, 1.5, -2, -0.25, -4, 0.75
    payload = struct.pack("<3i2i8f2i", 5, 6, 1, 1, 4, *rows, 5, 9)
    assert data == struct.pack("<21I", *header, *slot_words) + payload
    assert wire.VERSION == 4
    assert decode(data).slot(0).row_values.tolist() == [[1.5], [0.75]]
    assert (decode(data).weights_version, decode(data).digest) == (2**32 - 6, 0xABCD)


def test_kinds_states_and_modes_have_their_numbers():
    assert {kind.name: int(kind) for kind in Kind} == {"TARGET": 3, "DRAFT": 4, "PROMPT": 5}
    assert [value.name for value in sorted(wire.RowValue)] == [
        "ENTROPY",
        "LOG_SUM_EXP",
        "DIGEST_LOW",
        "DIGEST_HIGH",
    ]
    assert [mode.name for mode in sorted(LogprobsMode)] == ["RAW", "SCALED", "PROCESSED"]
    assert [state.name for state in sorted(SlotState)] == [
        "TOKENS", "NOTHING", "STOPPED", "PREEMPTED", "RECOVERY_STOP", "PREFILL_FIRST_TOKEN",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_drafts", 256), ("values", 256), ("num_chosen", 65536), ("columns", 65536),
     ("generation", 2**32), ("generation", -1), ("state", 256), ("mode", 256)],
)  # fmt: skip
def test_a_slot_value_that_does_not_fit_is_refused(field, value):
    contents = SlotContents(state=SlotState.STOPPED)
    encode(Kind.TARGET, 0, [contents])
    with pytest.raises(wire.WireError, match=rf"{field} = {value} does not fit"):
        encode(Kind.TARGET, 0, [replace(contents, **{field: value})], max_num_logprobs=0)
