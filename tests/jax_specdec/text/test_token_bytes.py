"""Texts of tokens are those of the library, for every token and every pair, of each family."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders

from jax_specdec.checkpoint.model_config import CheckpointError
from jax_specdec.text.token_bytes import bytes_of_tokens
from jax_specdec.text.tokenizer import Tokenizer
from jax_specdec.text.transformers_library import read_directory
from tests.support.tokenizer_kinds import (
    KINDS,
    TEXTS,
    WITH_BYTES,
    WITHOUT_FIRST_SPACE,
    gpt2,
    write,
)

HALF = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="module", params=KINDS)
def family(request, tmp_path_factory):
    """Its name, transformers' tokenizer, and ours."""
    directory = write(tmp_path_factory.mktemp(request.param), KINDS[request.param]())
    return request.param, read_directory(directory), Tokenizer(directory)


@settings(max_examples=60)
@given(text=st.text(max_size=40) | st.sampled_from(TEXTS))
def test_ids_are_those_of_transformers_and_bytes_the_texts(family, text):
    name, theirs, ours = family
    ids = ours.encode(text)
    assert list(ids) == theirs(text)["input_ids"]
    # A special token may begin with "<" or "[", and U+2581 is a space.
    if name in {"gpt2", "llama3", *WITH_BYTES} and not {*"<[▁"} & {*text}:
        raw = b"".join(ours.token_bytes[id] for id in ids)
        assert raw in (text.encode(), b" " + text.encode())


def equal(name, ours, theirs):
    """Whether two texts are the same, but for first spaces, which are their token's here.

    Where bytes are no characters, the library has U+FFFD for each byte of a run of them, and not
    for each beginning of a character.
    """
    if name in WITH_BYTES and HALF in ours:
        return HALF in theirs
    if name in WITHOUT_FIRST_SPACE:
        return ours.endswith(theirs) and ours.lstrip(" ") == theirs.lstrip(" ")
    return ours == theirs


def test_texts_of_all_tokens_and_pairs_are_the_librarys(family):
    name, theirs, ours = family
    table, size = ours.table(), len(ours.token_bytes)
    singles = [[id] for id in range(size)]
    pairs = [*map(list, itertools.product(range(size), repeat=2))]
    for some in (singles, pairs):
        want = theirs.backend_tokenizer.decode_batch(some, skip_special_tokens=True)
        wrong = [
            (ids, text, table.decode(ids))
            for ids, text in zip(some, want, strict=True)
            if not equal(name, table.decode(ids), text)
        ]
        assert wrong == []
    decode = theirs.decode  # which is that of its backend, as long as nothing is cleaned up
    for ids in pairs[:: len(pairs) // 50 + 1]:
        text = decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert equal(name, table.decode(ids), text)


def test_runs_of_spaces_that_are_added_tokens_are_spaces(tmp_path):
    ours = Tokenizer(write(tmp_path, KINDS["gemma"]()))
    ids = ours.encode("the     ox\n\n")
    assert ours.table().decode(ids) == "the     ox\n\n"
    assert b"     " in ours.token_bytes
    assert not any("▁".encode() in raw for raw in ours.token_bytes)


@pytest.mark.parametrize(
    ("decoder", "said"),
    [
        (decoders.BPEDecoder(), "'BPEDecoder' decoder, which is not supported"),
        (decoders.WordPiece(), "'WordPiece' decoder"),
        (decoders.CTC(), "'CTC' decoder"),
        (decoders.Strip(" ", 0, 1), "'Strip' decoder of what ends a text"),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace("the", "a")]),
         "'Replace' decoder of several characters at once"),
    ],
)  # fmt: skip
def test_texts_that_depend_on_neighbors_are_refused_by_name(decoder, said, tmp_path):
    made = KINDS["mistral"]()
    made.decoder = decoder
    with pytest.raises(CheckpointError, match=rf"tokenizer.json: the tokenizer has a {said}"):
        Tokenizer(write(tmp_path, made))


def test_every_byte_is_some_tokens():
    for make in (gpt2, KINDS["llama2"]):
        found = {*bytes_of_tokens(make()).values()}
        used = (byte for byte in range(0xF5) if not 0xC0 <= byte < 0xC2)
        assert {bytes([byte]) for byte in used} <= found


def test_a_vocabulary_without_plain_letters_has_its_bytes():
    made = Library.from_str(KINDS["words_alone"]().to_str())
    assert bytes_of_tokens(made)[1] == b" the"
