"""Strings and bytes of tokens: exact bytes, text as it streams, offsets; each is made once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from jax_specdec.text.detokenize import TextStream, TokenTable, byte_level_bytes

SNOWMAN = "\N{SNOWMAN}".encode()  # three bytes


def test_the_writings_of_a_token():
    table = TokenTable([b" a", b" \xe2\x98", b"\\xe2", SNOWMAN, b""], special={7: "<|end|>"})
    for id, text, completion, raw in (
        (0, " a", " a", b" a"), (1, r" \xe2\x98", r"bytes: \xe2\x98", b" \xe2\x98"),
        (2, r"\xe2", r"\xe2", rb"\xe2"),  # these four characters are the text itself
        (3, "\N{SNOWMAN}", "\N{SNOWMAN}", SNOWMAN), (4, "", "", b""),
        (7, "<|end|>", "<|end|>", None),
    ):  # fmt: skip
        assert (table.text[id], table.completion_text[id], table.raw[id]) == (text, completion, raw)
        assert table.chat[id] == (text, None if raw is None else tuple(raw))
    assert table.decode([0, 7, 3]) == " a\N{SNOWMAN}"


@pytest.mark.parametrize("id", [-1, 2])
def test_an_id_that_the_tokenizer_lacks_is_refused(id):
    table = TokenTable([b"a", b"b"])
    for strings in (table.raw, table.completion_text, table.chat):
        with pytest.raises(ValueError, match=rf"token id {id} is outside 0\.\.1"):
            strings[id]


def test_each_token_is_looked_up_once_and_only_if_asked():
    asked = []

    def token_bytes(id):
        asked.append(id)
        return bytes([id])

    table = TokenTable(token_bytes)
    assert asked == []
    for _ in range(3):
        assert table.chat[65] == ("A", (65,))
        assert table.completion_text[65] == "A"
        assert TextStream(table).push([65, 66]) == "AB"
    assert asked == [65, 66]


def test_text_appears_with_the_last_byte_of_a_character():
    table = TokenTable([SNOWMAN[:1], SNOWMAN[1:], b"a", SNOWMAN + SNOWMAN[:2]])
    stream = TextStream(table)
    assert [stream.push([id]) for id in (0, 1, 3, 2)] == [
        "",
        "\N{SNOWMAN}",
        "\N{SNOWMAN}",
        "\ufffda",  # the first two bytes were no character
    ]
    assert stream.push([0]) == ""
    assert stream.finish() == "\ufffd"
    assert stream.length == 5


PIECES = [b"a", b"bc", *(SNOWMAN[n : n + 1] for n in range(3)), SNOWMAN, b"\xff", b"", b"\xf0\x9f"]


def text_begins(raw, at):
    """The offset of byte `at`'s character: the last one of the text that ends with this byte."""
    return len(raw[: at + 1].decode(errors="replace")) - 1


@given(st.lists(st.integers(0, len(PIECES)), max_size=12), st.integers(0, 12))
def test_pieces_join_to_the_text_of_all_bytes(ids, cut):
    table = TokenTable(PIECES, special={len(PIECES): "<s>"})
    raw = b"".join(table.text_bytes[id] for id in ids)
    plain, offset = TextStream(table), TextStream(table)
    text = plain.push(ids[:cut]) + plain.push(ids[cut:]) + plain.finish()
    assert text == raw.decode(errors="replace") == table.decode(ids)
    parts = [offset.push_with_offsets(part) for part in (ids[:cut], ids[cut:])]
    assert "".join(part for part, _ in parts) + offset.finish() == text
    at = 0
    for id, found in zip(ids, parts[0][1] + parts[1][1], strict=True):
        if table.text_bytes[id]:
            assert found == text_begins(raw, at)
        at += len(table.text_bytes[id])


def test_byte_level_bytes_are_those_of_the_tokenizers_library():
    with pytest.raises(ValueError, match="stands for no byte"):
        byte_level_bytes("<|end\N{SNOWMAN}|>")
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    every_byte = "".join(map(chr, range(128))) + "\u00ff\u0100\N{SNOWMAN}\U0001f600"
    for text in (*every_byte, every_byte):
        ((token, _),) = split.pre_tokenize_str(text)
        assert byte_level_bytes(token) == text.encode()
