"""A text's place in its grammar: masks along drafts, and structures that cannot be served."""

import json
import sys

import numpy as np
import pytest

from jax_specdec.requests import Request, RequestError, SamplingParams, Structured
from jax_specdec.structured.checks import StructureChecks
from jax_specdec.structured.grammar import WHITE_SPACE, with_white_space
from jax_specdec.structured.matcher import Matcher
from jax_specdec.structured.vocabulary import read_vocabulary
from jax_specdec.text import byte_tokens
from jax_specdec.text.tokenizer import Tokenizer
from tests.support import letters, tokenizer_files, tokenizer_kinds
from tests.support.letters import END, LETTERS, OTHER, WORDS, WORDS_PATTERN, beginnings, text_of

VOCAB = len(LETTERS) + 2


def filled(matcher, drafts, rows=None):
    """The tokens that each row allows, and how many drafts may come."""
    masks = np.zeros((rows or len(drafts) + 1, 1), np.int32)
    legal = matcher.fill(masks, drafts)
    bits = masks.view(np.uint32) >> np.arange(VOCAB, dtype=np.uint32) & 1
    return [set(np.flatnonzero(row).tolist()) for row in bits], legal


def test_masks_along_drafts_leave_the_text_where_it_was():
    """At every place of some words: drafts that are right, wrong at each place, or end early."""
    every = {*range(VOCAB)}
    for word in WORDS[::29]:
        matcher, ids = Matcher(letters.vocabulary(), WORDS_PATTERN, (END, 3)), []
        for letter in [*map(LETTERS.index, word), END]:
            right = [*map(LETTERS.index, word[len(ids) :]), END][:3]
            drafts = [right, [OTHER, *right][:3], [*right[:1], 29, *right[1:]][:3], [END, 0, 0]]
            for given in drafts:
                expected, before, legal = [], [*ids], 0
                for draft in [*given, None]:
                    open_ = legal == len(expected) and END not in before
                    allowed = beginnings()[text_of(before)] if open_ else every
                    expected.append(allowed)
                    if open_ and draft in allowed:
                        before.append(draft)
                        legal += 1
                legal = len(given) if END in before else legal
                assert filled(matcher, given) == (expected, legal)
            matcher.take([letter])
            ids.append(letter)
        assert filled(matcher, [5, 6]) == ([every] * 3, 2)  # what comes behind the end is nobody's


@pytest.mark.parametrize("behind", [[0], [OTHER], [END], [END, 0], [5, 6, 7]])
@pytest.mark.parametrize("at_once", [True, False])
def test_what_is_taken_behind_the_end_changes_nothing(behind, at_once):
    word = [*map(LETTERS.index, "ab3"), END]
    matcher = Matcher(letters.vocabulary(), WORDS_PATTERN, (END,))
    for ids in [word + behind] if at_once else [word, *([id] for id in behind)]:
        matcher.take(ids)
        for drafts in ([], [END], [OTHER, 5]):
            assert filled(matcher, drafts) == ([{*range(VOCAB)}] * (len(drafts) + 1), len(drafts))
    assert matcher.num_tokens == len(word + behind)
    continued = Matcher(letters.vocabulary(), WORDS_PATTERN, (END,), word + behind)
    assert filled(continued, [5])[1] == 1


def test_ends_are_the_requests_stop_tokens_that_are_no_text():
    for stops, ends in (((END,), {END}), ((OTHER, 7), {OTHER}), ((END, OTHER), {END, OTHER})):
        matcher = Matcher(letters.vocabulary(), Structured("choice", '["a"]'), stops, [0])
        assert filled(matcher, []) == ([ends], 0)
    with pytest.raises(RequestError, match=r"stop_token_ids = \[7, 40\] has none"):
        Matcher(letters.vocabulary(), WORDS_PATTERN, (7, 40))


def test_a_text_goes_on_behind_its_beginning():
    for count in range(6):
        word = [*map(LETTERS.index, "abcdef03")]
        matcher = Matcher(letters.vocabulary(), WORDS_PATTERN, (END,), word[:count])
        assert matcher.num_tokens == count
        assert filled(matcher, [])[0] == [beginnings()["abcdef03"[:count]]]
    with pytest.raises(RequestError, match="the regex cannot be served"):
        Matcher(letters.vocabulary(), WORDS_PATTERN, (END,), [1])


WRONG = {
    "a(": ("regex", "a(", "unclosed group"),
    "nothing": ("regex", r"[^\s\S]", "no token may come next"),
    "look-ahead": ("regex", "(?=a)b", "look-ahead"),
    "no JSON": ("json_schema", "{", "Expecting property name"),
    "no schema": ("json_schema", "3", "schema must be an object or boolean"),
    "deep": ("json_schema", "[" * 60000, "recursion"),
    "impossible": ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "greater"),
    "unknown word": ("json_schema", '{"not": {}}', 'Unimplemented keys: ."not"'),
    "elsewhere": ("json_schema", '{"$ref": "http://x.y/z"}', "not present in a registry"),
    "endless": ("json_schema", '{"$ref": "#"}', "no token may come next"),
    "blank": ("grammar", "\n" * 65536, "No 'root' rule"),
    "no choice": ("choice", "[]", "list of strings, one at least"),
    "a number": ("choice", "[1]", "list of strings"),
    "no list": ("choice", "{", "Expecting property name"),
    "no start": ("grammar", 'a: "b"', "Expected ::="),
    "no rule": ("grammar", "root ::= b", "b"),
    "half a character": ("regex", "\ud800", "surrogates not allowed"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_structure_that_cannot_be_served_is_refused_by_name(name):
    kind, text, why = WRONG[name]
    params = SamplingParams(structured=Structured(kind, text), stop_token_ids=(byte_tokens.EOS_ID,))
    request = Request(id="r", prompt_token_ids=(1,), params=params)
    with pytest.raises(RequestError, match=rf"^request 'r': structured: the {kind} .*{why}"):
        StructureChecks("", byte_tokens.VOCAB_SIZE).check(request)


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("choice", json.dumps(["é\n\"'", "/a/", "<|eos|>"]), ["é\n\"'", "/a/", "<|eos|>"]),
        ("grammar", 'root ::= "a" root | "b"', ["aab", "b"]),
        ("grammar", 'start: "a" start | "b"', ["aab", "b"]),
        ("json_schema", '{"enum": [1, "x"]}', ["1", '"x"']),
        ("regex", "(?i)yes|no", ["YeS", "no"]),
    ],
)
def test_words_of_each_kind(kind, text, words):
    vocabulary, end = read_vocabulary("", byte_tokens.VOCAB_SIZE), byte_tokens.EOS_ID
    for word in words:
        ids = byte_tokens.encode(word).tolist()
        masks = np.zeros((len(ids) + 2, vocabulary.num_words), np.int32)
        matcher = Matcher(vocabulary, Structured(kind, text), (end,))
        assert matcher.fill(masks, [*ids, end]) == len(ids) + 1
        assert matcher.fill(masks, [*ids[:-1], end, end]) < len(ids) + 1


def test_a_vocabulary_that_does_not_fit_is_refused(tmp_path):
    with pytest.raises(RequestError, match="a model of 300 tokens need its tokenizer"):
        read_vocabulary("weights.safetensors", 300)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(RequestError, match=r"the tokenizer does not fit"):
        read_vocabulary(str(tmp_path), 300)


@pytest.mark.parametrize("kind", ["gpt2", "mistral", "gemma"])
def test_a_tokenizer_has_the_bytes_that_texts_are_made_of(kind, tmp_path):
    """And special tokens, among them ids that the model has and the tokenizer lacks.

    The byte 0xFF, which is in no text, is taken for one of them.
    """
    tokenizer_kinds.write(tmp_path, tokenizer_kinds.KINDS[kind]())
    size = len(Tokenizer(tmp_path).token_bytes) + 3
    ours, theirs = Tokenizer(tmp_path, size), read_vocabulary(str(tmp_path), size).tokenizer
    for id, raw in enumerate(ours.token_bytes):
        assert theirs.is_special_token(id) == (id in ours.special or raw == b"\xff")
        assert theirs.is_special_token(id) or theirs.decode_bytes([id]) == raw


def test_tokens_beyond_the_model_are_no_words_of_a_grammar(tmp_path):
    library = tokenizer_files.byte_level()
    size = library.get_vocab_size()
    library.add_special_tokens(["<image>"])
    library.save(str(tmp_path / "tokenizer.json"))
    vocabulary = read_vocabulary(str(tmp_path), size)
    assert vocabulary.size == size
    end = Tokenizer(tmp_path, size).encode("</s>")[-1]
    matcher = Matcher(vocabulary, Structured("choice", '["<image>"]'), (end,))
    mask = np.zeros((1, vocabulary.num_words), np.int32)
    matcher.fill(mask, ())
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    assert allowed.size
    assert allowed.max() < size


def test_a_schemas_own_white_space_stays():
    own = {"x-guidance": {"whitespace_pattern": "", "item_separator": ","}}
    assert with_white_space({"type": "null"} | own) == {"type": "null"} | own
    assert with_white_space({}) == {"x-guidance": {"whitespace_pattern": WHITE_SPACE}}
    assert with_white_space(True) is True


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("llguidance", r"need llguidance: pip install 'llguidance"),
        ("transformers", "transformers: pip"),
    ],
)
def test_a_missing_library_is_named_and_not_the_tokenizer(missing, said, tmp_path, monkeypatch):
    tokenizer_files.byte_level().save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(RequestError, match=said) as raised:
        read_vocabulary(str(tmp_path), 500)
    assert "does not fit" not in str(raised.value)
