"""Tokenizers and chat templates of a model directory; bytes of every id."""

import json
import re
import sys

import pytest

from jax_specdec.checkpoint.model_config import CheckpointError
from jax_specdec.text.tokenizer import MissingExtra
from jax_specdec.text.tokenizer import Tokenizer as OurTokenizer
from jax_specdec.text.transformers_library import INSTALL
from tests.support.tokenizer_files import CHAT, CORPUS, byte_level, write
from tests.support.tokenizer_kinds import KINDS
from tests.support.tokenizer_kinds import write as write_kind

# Ids and bytes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpt2", "mistral", "unigram"])
def test_every_id_has_bytes_or_a_name(kind, tmp_path):
    """Those that the model has and the tokenizer lacks, too."""
    library = KINDS[kind]()
    size, added = library.get_vocab_size(), library.get_added_tokens_decoder().values()
    ours = OurTokenizer(write_kind(tmp_path, library), size + 3)
    assert len(ours.token_bytes) == size + 3
    assert {token.content for token in added if token.special} <= set(ours.special.values())
    assert ours.special[size + 2] == f"[id {size + 2}]"
    for id in range(size + 3):
        assert (ours.token_bytes[id] == b"") == (id in ours.special)


def test_an_added_token_that_is_text_keeps_its_text(tmp_path):
    library = byte_level()
    library.add_tokens(["<fünf 5>", "<\uff5cUser\uff5c>"])
    ours = OurTokenizer(write(tmp_path, library), 500)
    for name in ("<tool>é", "<fünf 5>", "<\uff5cUser\uff5c>"):
        id = library.token_to_id(name)
        assert (ours.encode(f"a {name} b").count(id), ours.token_bytes[id]) == (1, name.encode())


# Files that are wrong --------------------------------------------------------------------------


def test_wrong_files_are_named(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"tokenizer.json is missing, and so is every other"
    ):
        OurTokenizer(tmp_path, 10)
    for text in ("{}", "{", "[]"):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"tokenizer.json is not a tokenizer: \S"):
            OurTokenizer(tmp_path, 10)


@pytest.mark.parametrize("library", ["transformers", "jinja2"])
def test_a_missing_library_is_said_with_the_command(library, tmp_path, monkeypatch):
    write(tmp_path, byte_level(), {"chat_template": CHAT})
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtra, match=f"{library}: {re.escape(INSTALL)}"):
        OurTokenizer(tmp_path, 500).encode_chat([{"role": "user", "content": "Hi"}])


def test_tokens_beyond_the_model_load_and_are_refused_in_prompts(tmp_path):
    """As the token of an image in Gemma 3, whose text models have no row for it."""
    library = byte_level()
    library.add_special_tokens(["<image>"])
    id, config = library.token_to_id("<image>"), {"chat_template": "{{ messages[0].content }}"}
    for special_in_messages in (False, True):
        ours = OurTokenizer(
            write(tmp_path, library, config), id, special_in_messages=special_in_messages
        )
        assert ours.beyond == {id: "<image>"}
        assert (len(ours.token_bytes), id in ours.special) == (id, False)
        said = rf"the prompt has the token '<image>' \(id {id}\), and the model has ids below {id}"
        with pytest.raises(CheckpointError, match=said):
            ours.encode("a <image> b")
        message = [{"role": "user", "content": "a <image>"}]
        if special_in_messages:
            with pytest.raises(CheckpointError, match=said):
                ours.encode_chat(message)
        else:
            assert ours.table().decode(ours.encode_chat(message)) == "a <image>"
    assert ours.encode("a")[1:]


def test_what_cuts_and_fills_up_texts_is_not_obeyed(tmp_path):
    library = byte_level()
    plain = OurTokenizer(write(tmp_path, library), 500).encode(CORPUS[0])
    library.enable_truncation(5)
    library.enable_padding(length=200, pad_id=1)
    template = {"chat_template": "{{ messages[0].content }}"}
    ours = OurTokenizer(write(tmp_path, library, template), 500)
    rules = json.loads(ours.to_json())  # before a text is read, which would set them aside
    assert (rules["truncation"], rules["padding"]) == (None, None)
    assert ours.encode(CORPUS[0]) == plain
    assert len(plain) > 5
    for text in (CORPUS[0], f"{CORPUS[0]}</s>"):
        message = {"role": "user", "content": text}
        assert ours.encode_chat([message])[: len(plain) - 1] == plain[1:]


@pytest.mark.parametrize("file", ["tokenizer_config.json", "added_tokens.json"])
def test_added_tokens_of_other_files_are_whole(file, tmp_path):
    """And those that are special there are so."""
    library, last = byte_level(), byte_level().get_vocab_size()
    names = ("<|turn|>", "<|tool|>")
    write(tmp_path, library)
    if file == "added_tokens.json":
        (tmp_path / file).write_text(json.dumps({one: last + n for n, one in enumerate(names)}))
        config = {"additional_special_tokens": [names[0]], "eos_token": names[0]}
    else:
        decoder = {
            str(last + n): {"content": one, "lstrip": False, "rstrip": False, "normalized": False,
                            "single_word": False, "special": n == 0}
            for n, one in enumerate(names)
        }  # fmt: skip
        config = {"added_tokens_decoder": decoder, "eos_token": names[0]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = OurTokenizer(tmp_path, 500)
    turn, tool = (ours.encode(one)[1:] for one in names)
    assert (len(turn), len(tool)) == (1, 1)
    assert (ours.special.get(turn[0]), ours.special.get(tool[0])) == (names[0], None)
    assert ours.token_bytes[tool[0]] == names[1].encode()
    assert ours.eos_token_ids == turn


def test_code_of_a_directory_is_not_run(tmp_path):
    (tmp_path / "own.py").write_text("raise SystemExit('it was run')")
    config = {"auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}, "tokenizer_class": "Own"}
    write(tmp_path, byte_level(), config)
    with pytest.raises(CheckpointError, match="custom code"):
        OurTokenizer(tmp_path, 500)
