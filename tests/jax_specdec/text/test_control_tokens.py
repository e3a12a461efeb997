"""Special tokens in messages are text, and everything else is as transformers has it."""

import functools
import json
import random
import re
import tempfile
from pathlib import Path

import pytest
from tokenizers import AddedToken, normalizers
from tokenizers import Tokenizer as Library

from jax_specdec.checkpoint.model_config import CheckpointError
from jax_specdec.text.control_tokens import Marks, any_of
from jax_specdec.text.tokenizer import Tokenizer
from jax_specdec.text.transformers_library import read_directory
from tests.support import chat_templates as templates
from tests.support.tokenizer_kinds import KINDS, TEXTS, of_transformers, write

FAMILIES = {  # a tokenizer, a template, what it may write, and what ends a turn of it
    "qwen": ("qwen", templates.QWEN, {}, "<|im_end|>"),
    "chatml": ("qwen", templates.CHATML, {}, "<|im_end|>"),
    "llama2": ("llama2", templates.SILENT, {"bos_token": "<s>", "eos_token": "</s>"}, "</s>"),
    "mistral": ("mistral", templates.MISTRAL, {"bos_token": "<s>", "eos_token": "</s>"}, "[/INST]"),
    "gemma": (
        "gemma", templates.GEMMA, {"bos_token": "<bos>", "eos_token": "<eos>"}, "<end_of_turn>",
    ),
    "unigram": ("unigram", templates.SILENT, {"bos_token": "", "eos_token": "</s>"}, "</s>"),
}  # fmt: skip
OTHER = "<|another-name|>"


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """transformers' tokenizer, ours, ours in the old way, and what ends a turn."""
    kind, template, special, end = FAMILIES[request.param]
    directory = write(tmp_path_factory.mktemp("model"), KINDS[kind](), template, **special)
    old = Tokenizer(directory, special_in_messages=True)
    return read_directory(directory), Tokenizer(directory), old, end


def users(*texts):
    roles = ("user", "assistant")
    return [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]


def test_without_special_tokens_ids_are_those_of_transformers(family):
    reference, ours, _, _ = family
    choose = random.Random(1)
    texts = [text.replace("<|im_start|>", "<|im") for text in TEXTS]
    for _ in range(40):
        count = choose.choice([1, 3])
        messages = users(
            *(choose.choice(texts)[choose.randrange(9) :] or "x" for _ in range(count))
        )
        assert list(ours.encode_chat(messages)) == of_transformers(reference, messages)


def test_special_tokens_in_messages_are_text(family):
    """As many special tokens come as without them, and the text is that of the message."""
    reference, ours, old, end = family
    if "/" not in reference.get_vocab() and "<0x2F>" not in reference.get_vocab():
        return  # letters that it lacks are a special token themselves
    plain = [id for id in ours.encode_chat(users("Hi")) if id in ours.special]
    added = reference.backend_tokenizer.get_added_tokens_decoder().values()
    for one in (end, *(name.content for name in added if name.special)):
        for text in (one, f"Hi {one}\n", f"{one}{one} Hi", f"a{one}b"):
            ids = ours.encode_chat(users(text))
            if "▁" not in text:
                assert [id for id in ids if id in ours.special] == plain
                assert text.strip() in ours.table().decode(ids).replace("⁇", "")
            taken = [id for id in old.encode_chat(users(text)) if id in ours.special]
            assert len(taken) == len(plain) + text.count(one)
            assert list(old.encode_chat(users(text))) == of_transformers(reference, users(text))


@pytest.mark.parametrize("name", FAMILIES)
def test_all_else_is_encoded_in_one_piece(name, tmp_path):
    """As transformers does, by a tokenizer and a template that call the end of a turn otherwise."""
    kind, template, special, end = FAMILIES[name]
    rules = json.loads(KINDS[kind]().to_str())
    for one in rules["added_tokens"]:
        one["content"] = one["content"].replace(end, OTHER)
    model = rules["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {OTHER if k == end else k: id for k, id in model["vocab"].items()}
    else:
        model["vocab"] = [[OTHER if k == end else k, score] for k, score in model["vocab"]]
    others = {k: one.replace(end, OTHER) if one else one for k, one in special.items()}
    reference = read_directory(
        write(tmp_path, Library.from_str(json.dumps(rules)), template.replace(end, OTHER), **others)
    )
    (tmp_path / "ours").mkdir()
    ours = Tokenizer(write(tmp_path / "ours", KINDS[kind](), template, **special))
    for text in ("the {} fox", "{}ox", "the  {}", "{}", "a{0}{0}\n", "{}the", "▁{}"):
        for messages in (users(text.format(end)), users("the", text.format(end), "fox")):
            assert list(ours.encode_chat(messages)) == of_transformers(reference, messages)


def test_tokens_in_names_and_options_are_text_too():
    """Wherever a template shows them, as they are or as JSON with escapes."""
    template = (
        "{{ messages[0].content }}{{ tools | tojson }}{{ tools | tojson(ensure_ascii=true) }}"
        "{{ tools }}{{ messages[0] }}{{ x }}{{ messages[0].name | upper }}<|im_end|>"
    )
    ours = tokenizer_of("qwen", template)
    name = "<|im_end|>"
    message = {"role": "user", "content": name, "name": name, name: {name: [name]}}
    ids = ours.encode_chat([message], [{"name": "f", "description": name}], {"x": name})
    assert [ours.special[id] for id in ids if id in ours.special] == [name]
    text = ours.table().decode(ids)
    assert text.count(name) == 10
    assert "<|IM_END|>" in text
    assert "ꀀ" not in text
    assert r"\ua0" not in text


def test_marks_are_none_of_the_texts_own_letters():
    """A message cannot close what stands between marks, whichever letters it has."""
    every = "".join(map(chr, range(0xA000, 0xA48D - 2)))
    marks = Marks(iter([every]))
    assert {marks.begin, marks.end}.isdisjoint(every)
    ours = tokenizer_of("qwen", "{{ messages[0].content }}")
    text = every[:40] + "<|im_end|>" + every[:40] + r"\ua000"
    assert ours.table().decode(ours.encode_chat(users(text))) == text


def test_messages_without_a_free_letter_are_refused():
    ours = tokenizer_of("qwen", "{{ messages[0].content }}")
    for every in (
        map(chr, range(0xA000, 0xA48D)),
        (f"{code:04X}" for code in range(0xA000, 0xA48D)),
    ):
        text = " ".join(every)
        with pytest.raises(CheckpointError, match="every letter of Yi"):
            ours.encode_chat(users(f"<|im_end|>{text}"))
        assert ours.table().decode(ours.encode_chat(users(text))) == text


def test_a_templates_own_letters_are_no_marks():
    ours = tokenizer_of("qwen", "\ua000\ua001\ua002{{ messages[0].content }}\\ua003")
    ids = ours.encode_chat(users("<|im_end|>"))
    assert ours.table().decode(ids) == "\ua000\ua001\ua002<|im_end|>\\ua003"


def test_a_token_that_is_cut_in_two_stays_text():
    """By a template that takes a message apart: its halves do not grow together."""
    ours = tokenizer_of("qwen", "{{ messages[0].content.split('|') | join('|') }}<|im_end|>")
    ids = ours.encode_chat(users("<|im_end|>"))
    assert [ours.special[id] for id in ids if id in ours.special] == ["<|im_end|>"]
    assert ours.table().decode(ids) == "<|im_end|>"


def test_added_tokens_that_the_template_writes_are_its_own():
    """DeepSeek's roles are no special tokens. What the model itself wrote comes back as it was."""
    ours = tokenizer_of("qwen", templates.QWEN)
    id = ours.encode("<tool_call>")[0]
    by = {
        role: ours.encode_chat([*users("x"), {"role": role, "content": "<tool_call>"}]).count(id)
        for role in ("user", "assistant", "tool")
    }
    assert by == {"user": 0, "assistant": 1, "tool": 0}
    assert tokenizer_of("qwen", templates.CHATML).encode_chat(users("<tool_call>")).count(id) == 1


def test_texts_normalized_to_a_token_stay_text(tmp_path):
    made = KINDS["qwen"]()
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    made.add_special_tokens([AddedToken("<end>", special=True, normalized=True)])
    directory = write(tmp_path, made, "{{ messages[0].content }}<end>")
    ours, old = Tokenizer(directory), Tokenizer(directory, special_in_messages=True)
    for text in ("a<END>", "a\N{FULLWIDTH LESS-THAN SIGN}end>", "<end>"):
        counts = [
            sum(id in one.special for id in one.encode_chat(users(text))) for one in (ours, old)
        ]
        assert counts == [1, 2]


def test_tokens_are_found_as_a_tokenizer_finds_them():
    """The first one, and the longest there; and thousands of them as fast as a few."""
    choose = random.Random(0)
    for _ in range(500):
        names = {
            "".join(choose.choices("ab<", k=choose.randint(1, 4)))
            for _ in range(choose.randint(1, 6))
        }
        longest = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
        text = "".join(choose.choices("ab<", k=12))
        assert any_of([*names]).findall(text) == re.findall(longest, text)
    assert any_of([]).search("") is None
    some = any_of([f"<unused{n}>" for n in range(6000)])
    assert some.pattern.count("unused") == 1
    assert some.findall("<unused59><unused599><unused6000>") == ["<unused59>", "<unused599>"]


def test_prompts_have_special_tokens_by_their_texts():
    ours = tokenizer_of("qwen", templates.CHATML)
    assert ours.special[ours.encode("<|im_end|>")[0]] == "<|im_end|>"


@functools.cache
def tokenizer_of(kind, template):
    with tempfile.TemporaryDirectory() as directory:
        return Tokenizer(write(Path(directory), KINDS[kind](), template))
