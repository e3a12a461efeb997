"""The tokenizer in a GGUF file is that of the tokenizer.json that it was made from."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import pre_tokenizers

from jax_specdec.checkpoint.model_config import CheckpointError, ModelConfig
from jax_specdec.text.tokenizer import Tokenizer
from tests.support import gguf_files
from tests.support.tokenizer_files import CHAT, CORPUS, byte_level
from tests.support.tokenizer_kinds import by_words

CONFIG = ModelConfig.tiny(40, num_mtp_layers=0)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
SPLITS = {
    "gpt-2": BYTES,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTES]),
    "llama-bpe": by_words(),
}


def made(ignore_merges=False):
    """A tokenizer in which pairs of digits are tokens, where a split lets them stand together."""
    rules = json.loads(byte_level().to_str())
    rules["model"]["vocab"]["11"] = len(rules["model"]["vocab"])
    rules["added_tokens"][-1]["id"] += 1  # which stand behind the vocabulary
    rules["model"]["merges"].append(["1", "1"])
    rules["model"]["ignore_merges"] = ignore_merges
    return Library.from_str(json.dumps(rules))


def write(path, **changes):
    fields = gguf_files.tokenizer_fields(made(), bos_token_id=0) | changes
    return gguf_files.write(path, CONFIG, tokenizer=fields, chat=CHAT)


@pytest.fixture(scope="module", params=SPLITS)
def pair(request, tmp_path_factory):
    """The library's tokenizer, and ours from a file."""
    library = made(ignore_merges=request.param == "llama-bpe")
    library.pre_tokenizer = SPLITS[request.param]
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    write(path, pre=request.param, add_bos_token=False)
    return library, Tokenizer(path, library.get_vocab_size() + 3)


@settings(max_examples=200)
@given(text=st.text(max_size=40) | st.sampled_from(CORPUS) | st.text("11 2a²'<", max_size=12))
def test_ids_are_the_librarys(pair, text):
    library, ours = pair
    assert list(ours.encode(text)) == library.encode(text).ids


def test_bytes_special_tokens_and_conversations(pair):
    library, ours = pair
    text = f"<s>{CORPUS[1]}<tool>é"
    ids = ours.encode(text)
    assert ours.special[ids[0]] == "<s>"
    assert b"".join(ours.token_bytes[id] for id in ids[1:]) == text[3:].encode()
    shown = "<s><|user|>Hello</s>\n<|assistant|>"
    assert list(ours.encode_chat([{"role": "user", "content": "Hello"}])) == (
        library.encode(shown).ids
    )


def test_a_first_token_that_no_field_names(tmp_path):
    """Where the file says that there is one, that is an error; Llama's files need not say so."""
    fields = gguf_files.tokenizer_fields(made())
    for pre in ("llama-bpe", "gpt-2"):
        path = gguf_files.write(
            tmp_path / f"{pre}.gguf", CONFIG, tokenizer=fields | {"pre": pre, "add_bos_token": True}
        )
        said = "add_bos_token = True puts.*and tokenizer.ggml.bos_token_id, which says which"
        with pytest.raises(CheckpointError, match=said):
            Tokenizer(path)
    path = gguf_files.write(tmp_path / "m.gguf", CONFIG, tokenizer=fields | {"pre": "llama-bpe"})
    assert Tokenizer(path).encode("a") == Tokenizer(path).encode("aa")[:1]


def test_several_chat_templates(tmp_path):
    fields = gguf_files.tokenizer_fields(made())
    path = gguf_files.write(
        tmp_path / "m.gguf", CONFIG, tokenizer=fields,
        chat=[{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}],
    )  # fmt: skip
    ours = Tokenizer(path)
    texts = [ours.encode_chat([{"role": "user"}], some) for some in ((), [{"name": "f"}])]
    assert [ours.table().decode(ids) for ids in texts] == ["plain", "tools"]


def test_a_first_token_is_added_where_the_file_says_so(tmp_path):
    ids = [
        Tokenizer(write(tmp_path / f"{adds}.gguf", add_bos_token=adds)).encode("a")
        for adds in (False, True)
    ]
    assert ids[1] == (0, *ids[0])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "llama"}, "'llama', 'gpt-2' is not supported; supported is 'gpt2' with gpt-2"),
        ({"pre": "tekken"}, "of kind 'gpt2', 'tekken' is not supported"),
        ({"token_type": [1, 1]}, "and 2 kinds of tokens: the file is damaged"),
        ({"merges": ["zz zz"]}, "model.gguf is not a tokenizer"),
        ({"bos_token_id": 999, "add_bos_token": True}, "bos_token_id = 999, but the tokenizer has"),
        ({"eos_token_id": 999}, "eos_token_id = 999, but the tokenizer has"),
        ({"bos_token_id": "<s>"}, "bos_token_id = '<s>', but the tokenizer has"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_named(changes, said, tmp_path):
    with pytest.raises(CheckpointError, match=said):
        Tokenizer(write(tmp_path / "model.gguf", **changes))


def test_a_file_without_a_tokenizer_and_one_with_too_many_tokens(tmp_path):
    path = gguf_files.write(tmp_path / "model.gguf", CONFIG)
    with pytest.raises(CheckpointError, match=r"it lacks tokenizer\.ggml\.model"):
        Tokenizer(path)
    ours = Tokenizer(write(tmp_path / "other.gguf"), 40)
    with pytest.raises(CheckpointError, match="and the model has ids below 40"):
        ours.encode("zz")
