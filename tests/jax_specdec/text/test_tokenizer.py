"""Tokenizers and chat templates of a model directory; bytes of every id."""

import json
import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from jax_specdec.checkpoint.model_config import CheckpointError
from jax_specdec.text.chat_template import MissingExtra, read_template
from jax_specdec.text.detokenize import TextStream
from jax_specdec.text.tokenizer import Pieces
from jax_specdec.text.tokenizer import Tokenizer as OurTokenizer
from tests.support.tokenizer_files import CHAT, CORPUS, KINDS, SPECIAL, byte_level, write


def is_byte_level(library):
    return type(library.decoder).__name__ == "ByteLevel"


# Ids and bytes ---------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    """The library's tokenizer, and ours from its file."""
    directory = write(tmp_path_factory.mktemp("model"), KINDS[request.param]())
    library = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return library, OurTokenizer(directory, library.get_vocab_size() + 3)


@settings(max_examples=60)
@given(text=st.text(max_size=40) | st.sampled_from(CORPUS))
def test_bytes_of_a_text_are_the_texts(pair, text):
    library, ours = pair
    ids = ours.encode(text)
    assert list(ids) == library.encode(text).ids
    assert ours.special[ids[0]] == "<s>"
    raw = b"".join(ours.token_bytes[id] for id in ids)
    if "<" not in text and "▁" not in text:  # "<" may begin a special token, and U+2581 is a space
        assert raw in (text.encode(), b" " + text.encode())


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6))
def test_any_ids_decode_as_the_library_decodes_them(pair, seed):
    library, ours = pair
    size = library.get_vocab_size()
    added = {library.token_to_id("<tool>é")}  # the library reads its é as a byte-level letter
    choose = random.Random(seed)
    fewer_bytes = 0 if is_byte_level(library) else 261
    ids = [choose.randrange(choose.choice([0, fewer_bytes]), size) for _ in range(6)]
    ids = [id for id in ids if id not in added]
    table = ours.table()
    want = library.decode(ids)  # without special tokens
    got = table.decode(ids)
    # The library writes one U+FFFD for each byte of half a character, Python one for all of them.
    if is_byte_level(library) or "\N{REPLACEMENT CHARACTER}" not in got:
        assert want in (got, got.removeprefix(" "))
    stream = TextStream(table)
    assert "".join([stream.push([id]) for id in ids]) + stream.finish() == got


def test_every_id_has_bytes_or_a_name_and_all_bytes_are_there(pair):
    library, ours = pair
    size = library.get_vocab_size()
    assert len(ours.token_bytes) == size + 3
    assert set(SPECIAL) <= set(ours.special.values())
    assert ours.special[size + 2] == f"[id {size + 2}]"
    for id in range(size + 3):
        assert (ours.token_bytes[id] == b"") == (id in ours.special)
    assert {bytes([byte]) for byte in range(0xF5) if not 0xC0 <= byte < 0xC2} <= set(
        ours.token_bytes
    )


def test_an_added_token_that_is_text_keeps_its_text(tmp_path):
    library = byte_level()
    ours, id = OurTokenizer(write(tmp_path, library), 500), library.token_to_id("<tool>é")
    assert (ours.encode("a <tool>é b").count(id), ours.token_bytes[id]) == (1, "<tool>é".encode())


def test_pieces_without_bytes_of_their_own_are_refused():
    with pytest.raises(CheckpointError, match="'WordPiece' decoder, which is not supported"):
        Pieces({"decoder": {"type": "WordPiece"}})
    with pytest.raises(CheckpointError, match="'Replace' decoder"):
        Pieces({"decoder": {"type": "Replace", "pattern": {"Regex": "a+"}, "content": ""}})
    for kind, piece, raw in (
        (None, "▁a<0x0A>", "▁a<0x0A>"), ("ByteLevel", "Ġa", " a"), ("ByteLevel", "日", "日"),
        ("ByteFallback", "<0x0A>", "\n"), ("Fuse", "<0x0A>", "<0x0A>"),
    ):  # fmt: skip
        assert Pieces({"decoder": kind and {"type": kind}}).raw(piece) == raw.encode()


# Files that are wrong --------------------------------------------------------------------------


def test_wrong_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer.json is missing; a tokenizer.model"):
        OurTokenizer(tmp_path, 10)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer.json is not a tokenizer"):
        OurTokenizer(tmp_path, 10)
    write(tmp_path, byte_level())
    with pytest.raises(CheckpointError, match=r"has id \d+, but the model has ids below 300"):
        OurTokenizer(tmp_path, 300)


@pytest.mark.parametrize("library", ["tokenizers", "jinja2"])
def test_a_missing_library_is_said_with_the_command(library, tmp_path, monkeypatch):
    write(tmp_path, byte_level(), {"chat_template": CHAT})
    monkeypatch.setitem(sys.modules, library, None)
    command = rf"{library}: pip install 'tokenizers>=0.20' 'jinja2>=3.1'"
    with pytest.raises(MissingExtra, match=command):
        OurTokenizer(tmp_path, 500).encode_chat([{"role": "user", "content": "Hi"}])


# Chat templates --------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "Hi <s>"}, {"role": "assistant", "content": "Ho"}]


def test_a_conversation_becomes_ids(tmp_path):
    library = byte_level()
    special = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}
    ours = OurTokenizer(write(tmp_path, library, {"chat_template": CHAT, **special}), 500)
    text = "<s><|user|>Hi <s></s>\n<|assistant|>Ho</s>\n<|assistant|>"
    assert read_template(tmp_path).render(MESSAGES) == text
    ids = ours.encode_chat(MESSAGES)
    assert list(ids) == library.encode(text, add_special_tokens=False).ids
    assert ids.count(library.token_to_id("<s>")) == 2  # by the template and the user; none is added


def test_where_the_template_stands(tmp_path):
    write(tmp_path, byte_level())
    assert read_template(tmp_path) is None
    with pytest.raises(CheckpointError, match=r"has no chat template \(chat_template.jinja"):
        OurTokenizer(tmp_path, 500).encode_chat(MESSAGES)
    path = tmp_path / "tokenizer_config.json"
    several = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    write(tmp_path, byte_level(), {"chat_template": several})
    assert read_template(tmp_path).render(MESSAGES) == "yes"
    path.write_text(json.dumps({"chat_template": several[:1]}))
    with pytest.raises(CheckpointError, match="has chat templates tools, but none named default"):
        read_template(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages | length }}")
    assert read_template(tmp_path).render(MESSAGES) == "2"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", "is not valid Jinja"),
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alt"),
        ("{{ messages[0].__class__.__mro__ }}", "refuses these messages"),
        ("{{ messages.append(1) }}", "refuses these messages"),
        ("{{ messages[7].content.strip() }}", "refuses these messages"),
    ],
)
def test_templates_that_refuse_or_reach_for_more(template, message, tmp_path):
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(CheckpointError, match=message):
        read_template(tmp_path).render(MESSAGES)


def test_special_tokens_of_an_older_file(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}")
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<a>", "eos_token": "<b>"}')
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<c>"}}')
    assert read_template(tmp_path).render(MESSAGES) == "<a><c>"


def test_what_templates_may_use(tmp_path):
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}\n    {%- if loop.index > 1 %}{% break %}{% endif %}\n"
        "{{ m | tojson }}\n{% endfor %}\n{{ strftime_now('%Y') | int > 2000 }}"
        "{% if tools is not none or documents is not none %} tools{% endif %}"
    )
    rendered = read_template(tmp_path).render([{"role": "ü"}, {"role": "b"}])
    assert rendered.split() == ['{"role":', '"ü"}', "True"]
