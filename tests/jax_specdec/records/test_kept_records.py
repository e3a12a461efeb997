"""Kept sets from bytes to records: the layout twice, hostile values, cuts, hand-overs."""

import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc import wire
from ipc.wire import KEPT_ALL, KEPT_MANY, Kind
from jax_specdec.kept_sets import KeptSets
from jax_specdec.records.decode import MessageError, decode
from jax_specdec.records.encode import SlotContents, encode
from jax_specdec.records.output_processor import ProcessorError, step
from tests.support.decoding_cost import allowed_memory, cost
from tests.support.processor_messages import admitted, all_admitted, request, silent, target, tokens
from tests.support.random_kept import as_lists

FIXED = wire.HEADER_WORDS + wire.SLOT_WORDS  # of a message with one slot


def columns_of(rows):
    """Counts, masses and ids of rows: a list of ids, or a mark; row n has the mass -n / 8."""
    lists = [row if isinstance(row, list) else [] for row in rows]
    counts = [len(ids) or row for ids, row in zip(lists, rows, strict=True)]
    return counts, [-n / 8 for n in range(len(rows))], [id for ids in lists for id in ids]


def sets(*rows):
    counts, masses, ids = columns_of(rows)
    return KeptSets.of(np.int32(counts), np.float32(masses), np.int32(ids))


def kept(*ids, rows, **fields):
    """A slot with tokens and their kept sets."""
    return replace(tokens(*ids, **fields), kept=sets(*rows))


def by_hand(slots):
    """The message of slots (tokens, drafts, rows or None), written with `struct` alone."""
    head, ids, counts, masses, kept_ids = [], [], [], [], []
    for token_ids, num_drafts, rows in slots:
        head += [(rows is not None) << 15, len(token_ids), num_drafts, 1]
        ids += token_ids
        for column, more in zip((counts, masses, kept_ids), columns_of(rows or []), strict=True):
            column += more
    body = struct.pack(f"<{len(head)}I{len(ids) + len(counts)}i", *head, *ids, *counts)
    body += struct.pack(f"<{len(masses)}f{len(kept_ids)}i", *masses, *kept_ids)
    header = [0x4C53 << 16 | 4, 3, 1, len(slots), 9 + len(body) // 4, 0, 0, 0, 0]
    return struct.pack("<9I", *header) + body


a_set = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5, unique=True).map(sorted)
a_row = a_set | st.sampled_from([KEPT_ALL, KEPT_MANY])


@st.composite
def a_slot(draw):
    token_ids = draw(st.lists(st.integers(0, 99), min_size=1, max_size=4))
    n = len(token_ids)
    rows = draw(st.none() | st.lists(a_row, min_size=n, max_size=n))
    return token_ids, n - 1 + draw(st.integers(0, 2)), rows


@given(st.lists(a_slot(), max_size=5))
def test_the_layout_is_that_of_an_independent_encoder(slots):
    contents = []
    for ids, num_drafts, rows in slots:
        slot = SlotContents(generation=1, num_drafts=num_drafts, token_ids=ids)
        contents.append(slot if rows is None else replace(slot, kept=sets(*rows)))
    data = encode(Kind.TARGET, 0, contents)
    assert data == by_hand(slots)
    message = decode(data)
    for index, (ids, _, rows) in enumerate(slots):
        view = message.slot(index)
        assert view.token_ids.tolist() == ids
        assert as_lists(view.kept) == as_lists(contents[index].kept)
        if rows is not None:
            sizes = np.maximum(columns_of(rows)[0], 0)
            assert view.kept.offsets.tolist() == [0, *np.cumsum(sizes).tolist()]


def test_only_what_was_asked_for_travels():
    plain = len(encode(Kind.TARGET, 0, [tokens(5, 6)]))
    for rows, words in (([[5], [6]], 6), ([[1, 5, 9], KEPT_ALL], 7), ([KEPT_MANY, KEPT_ALL], 4)):
        assert len(encode(Kind.TARGET, 0, [kept(5, 6, rows=rows)])) == plain + 4 * words
    bound = wire.words_bound([2], [0], [0], [3])
    assert 4 * bound == len(encode(Kind.TARGET, 0, [kept(5, 6, rows=[[1, 2, 3], [4, 5, 6]])]))
    with pytest.raises(MessageError, match="2 kept rows make"):
        decode(encode(Kind.TARGET, 0, [kept(5, 6, rows=[[5]])]))


@pytest.mark.parametrize(("word", "value", "complaint"), [
    (0, 0, "kept row 0: a count of 0 cannot be"),
    (1, 2**32 - 3, "kept row 1: a count of -3 cannot be"),
    (0, 1025, "kept row 0: a count of 1025 cannot be .1 to 1024, -1 .* -2 "),
    (0, 1024, "the kept counts make 1044 words; the message has 23"),
    (0, 2**32 - 1, "the kept counts make 20 words; the message has 23"),
    (4, 2**32 - 1, "kept row 0: token id -1 cannot be"),
    (5, 3, "kept row 0: token id 3 after 4 cannot be: ids ascend"),
    (5, 4, "kept row 0: token id 4 after 4 cannot be"),
    (6, 2, "kept row 0: token id 2 after 5 cannot be"),
    (7, 2**31, "kept row 1: token id -2147483648 cannot be"),
])  # fmt: skip
def test_a_wrong_value_is_named(word, value, complaint):
    """After two tokens: counts 3 and 1, two masses, the ids 4, 5, 9 and 0."""
    data = encode(Kind.TARGET, 0, [kept(5, 6, rows=[[4, 5, 9], [0]])])
    words = np.frombuffer(data, np.uint32).copy()
    decode(words)
    words[FIXED + 2 + word] = value
    with pytest.raises(MessageError, match=complaint):
        decode(words)


@pytest.mark.parametrize(("kind", "slot", "complaint"), [
    (Kind.TARGET, tokens(*[5] * 65), "65 kept rows make 208 words; the message has 78"),
    *((kind, silent(), "kept = 1 cannot be") for kind in (Kind.DRAFT, Kind.PROMPT)),
])  # fmt: skip
def test_only_target_messages_have_kept_sets(kind, slot, complaint):
    data = np.frombuffer(encode(kind, 0, [slot]), np.uint32).copy()
    decode(data)
    data[wire.HEADER_WORDS] |= 1 << 15
    with pytest.raises(MessageError, match=complaint):
        decode(data)


@pytest.mark.parametrize("ids", [[], [1024] * 65, [KEPT_MANY] * 65], ids=["none", "all", "marks"])
def test_no_kept_sets_cost_more_than_their_bytes_allow(ids):
    rows = [list(range(count)) if count > 0 else count for count in ids] or [KEPT_ALL] * 65
    data = encode(Kind.TARGET, 0, [kept(*[5] * 65, rows=rows)] * 8)
    asked = {"max_tokens": 100_000, "kept_token_ids": True}
    state = all_admitted([request(f"r{slot}", **asked) for slot in range(8)])
    memory, lines, error = cost(data, state)
    assert error is None
    assert memory <= allowed_memory(data, state)
    assert lines < 2_000
    # So does a message that is refused at its last id.
    words = np.frombuffer(data, np.uint32).copy()
    words[-1] = 2**31
    memory, lines, error = cost(words.tobytes(), state)
    assert memory <= allowed_memory(data, state)


def test_unrequested_and_missing_sets_are_refused():
    with pytest.raises(ProcessorError, match=r"asked for kept sets; .* has none"):
        step(admitted(kept_token_ids=True), target(0, tokens(5)))
    with pytest.raises(ProcessorError, match=r"asked for no kept sets; .* has some"):
        step(admitted(), target(0, kept(5, rows=[[5]])))
