"""Conversations become the text that transformers makes of them, and other roles find a place."""

import json

import pytest

from jax_specdec.checkpoint.model_config import CheckpointError
from jax_specdec.text import chat_template
from jax_specdec.text.chat_template import ChatTemplate, with_functions
from jax_specdec.text.tokenizer import Tokenizer
from jax_specdec.text.transformers_library import read_directory
from tests.support import chat_templates as templates
from tests.support.tokenizer_files import CHAT, byte_level
from tests.support.tokenizer_files import write as write_old
from tests.support.tokenizer_kinds import KINDS, of_transformers, write

USER = {"role": "user", "content": "Hi, ½ \U0001f642 'there'"}
ANSWER = {"role": "assistant", "content": "Ho"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {
    "role": "assistant", "content": "",
    "tool_calls": [{"id": "abcdefghi", "type": "function",
                    "function": {"name": "paint", "arguments": {"color": "röd", "n": [1, 2]}}}],
}  # fmt: skip
RESULT = {"role": "tool", "content": "it is red", "tool_call_id": "abcdefghi"}
FUNCTIONS = [
    {"name": "paint", "description": "Zwölf <x> & 'y'", "parameters": {"type": "object", "b": 1}},
    {"name": "stop"},
]


@pytest.mark.parametrize(
    ("kind", "template", "messages", "functions", "options"),
    [
        ("qwen", "CHATML", [SYSTEM, USER, ANSWER, USER], [], {}),
        ("qwen", "TRL", [SYSTEM, USER, ANSWER, USER], [], {}),
        ("qwen", "QWEN", [SYSTEM, USER, CALL, RESULT, ANSWER, USER], FUNCTIONS, {}),
        ("qwen", "QWEN", [USER, ANSWER | {"reasoning": "Hm."}, USER], [], {}),
        ("qwen", "QWEN", [USER, ANSWER | {"tool_calls": None, "name": None}], [], {}),
        ("qwen", "QWEN", [USER], [], {"enable_thinking": False}),
        ("qwen", "GLM", [SYSTEM, USER], FUNCTIONS[:1], {}),
        ("gemma", "GEMMA", [USER, ANSWER, USER], [], {}),
        ("mistral", "MISTRAL", [USER, CALL, RESULT], FUNCTIONS, {}),
        ("llama2", "SILENT", [USER, ANSWER, USER], [], {}),
        ("llama3", "CHATML", [SYSTEM, USER], [], {}),
    ],
)  # fmt: skip
def test_ids_are_those_of_transformers(kind, template, messages, functions, options, tmp_path):
    ends = {"gemma": ("<bos>", "<eos>")}.get(kind, ("<s>", "</s>"))
    special = {} if kind in ("qwen", "llama3") else {"bos_token": ends[0], "eos_token": ends[1]}
    write(tmp_path, KINDS[kind](), getattr(templates, template), **special)
    want = of_transformers(read_directory(tmp_path), messages, functions, **options)
    assert list(Tokenizer(tmp_path).encode_chat(messages, functions, options)) == want


def test_fields_that_are_none_are_left_out(tmp_path):
    write(tmp_path, KINDS["qwen"](), "{% for m in messages %}{{ m | list }}{% endfor %}")
    messages = [USER | {"name": None, "tool_calls": None}]
    want = of_transformers(read_directory(tmp_path), messages)
    assert list(Tokenizer(tmp_path).encode_chat(messages)) == want
    assert want == list(Tokenizer(tmp_path).encode_chat([USER]))


def test_a_template_for_tools_is_taken_where_there_are_some(tmp_path):
    write(tmp_path, KINDS["qwen"]())
    several = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | length }} tools"},
    ]
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"chat_template": several}))
    ours = Tokenizer(tmp_path)
    texts = [ours.table().decode(ours.encode_chat([USER], some)) for some in ([], FUNCTIONS)]
    assert texts == ["plain", "2 tools"]
    path.write_text(json.dumps({"chat_template": several[1:]}))
    said = "has chat templates tool_use, but none named default"
    with pytest.raises(CheckpointError, match=said):
        Tokenizer(tmp_path).encode_chat([USER])


def test_where_the_template_stands(tmp_path):
    write(tmp_path, KINDS["qwen"]())
    with pytest.raises(CheckpointError, match=r"has no chat template \(chat_template.jinja"):
        Tokenizer(tmp_path).encode_chat([USER])
    config = {"chat_template": "one"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer(tmp_path).encode_chat([USER]) == Tokenizer(tmp_path).encode("one")
    (tmp_path / "chat_template.jinja").write_text("{{ messages | length }}")
    assert Tokenizer(tmp_path).encode_chat([USER]) == Tokenizer(tmp_path).encode("1")


def test_special_tokens_are_the_templates_and_none_is_added(tmp_path):
    special = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}
    ours = Tokenizer(write_old(tmp_path, byte_level(), {"chat_template": CHAT, **special}), 500)
    ids = ours.encode_chat([{"role": "user", "content": "Hi"}])
    assert [ours.special[id] for id in ids if id in ours.special] == [
        "<s>", "<|user|>", "</s>", "<|assistant|>"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", "is not valid Jinja"),
        ("{{ 1 | no_such_filter }}", "is not valid Jinja: No filter named"),
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alt"),
        ("{{ messages[0].__class__.__mro__ }}", "refuses these messages"),
        ("{{ messages.append(1) }}", "refuses these messages"),
        ("{{ messages[7].content.strip() }}", "refuses these messages"),
        ("{{ 1 / (messages | length - 1) }}", "refuses these messages: division by zero"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "messages: maximum recursion"),
        ("{% for a in range(10 ** 9) %}{% endfor %}", "refuses these messages: Range too big"),
        ("{{ messages[0].content | int | pprint | wordwrap('a') }}", "refuses these messages"),
        ("{{ [].pop() }}", "refuses these messages"),
        ("{{ 'a'.encode('no-such') }}", "refuses these messages: unknown encoding"),
    ],
)
def test_whatever_a_template_raises_is_its_refusal(template, message):
    with pytest.raises(CheckpointError, match=message):
        ChatTemplate(template, {}).render([USER])


def test_a_template_that_does_not_end_is_stopped(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.1)
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(CheckpointError, match=r"messages: it takes longer than 0\.1 seconds"):
        ChatTemplate(loops, {}).render([USER])


def test_what_templates_may_use():
    template = ChatTemplate(
        "{% for m in messages %}\n    {%- if loop.index > 1 %}{% break %}{% endif %}\n"
        "{{ m | tojson }}\n{% endfor %}\n{{ strftime_now('%Y') | int > 2000 }}"
        "{% if tools is not none or documents is not none %} tools{% endif %}",
        {},
    )
    rendered = template.render([{"role": "ü"}, {"role": "b"}])
    assert rendered.split() == ['{"role":', '"ü"}', "True"]


# Roles that a template does not know -----------------------------------------------------------

DEVELOPER = {"role": "developer", "content": "Be brief."}


@pytest.mark.parametrize("name", ["CHATML", "TRL", "QWEN", "GLM", "MISTRAL", "GPT_OSS"])
def test_a_developer_is_the_system_where_the_template_names_none(name):
    template = ChatTemplate(getattr(templates, name), {"bos_token": "<s>", "eos_token": "</s>"})
    text = template.render([DEVELOPER, USER])
    if name == "MISTRAL":  # which leaves a system message out, too
        assert text == template.render([SYSTEM, USER])
        return
    assert "Be brief." in text
    assert ("developer" in text) == (name == "GPT_OSS")
    if name != "GPT_OSS":
        assert text == template.render([SYSTEM, USER])


def test_a_word_of_a_template_does_not_name_the_developer():
    said = "{{ 'You help a developer.' }}{% for m in messages %}{{ m.role }} {% endfor %}"
    assert ChatTemplate(said, {}).render([DEVELOPER]) == "You help a developer.system "


def test_a_template_that_names_the_developer_has_the_role():
    text = "{% for m in messages %}{{ 'dev' if m.role == 'developer' else m.role }}{% endfor %}"
    assert ChatTemplate(text, {}).render([DEVELOPER]) == "dev"


def test_calls_reach_templates_that_know_no_tools():
    rows = "{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}"
    said = ChatTemplate(rows, {}).render([SYSTEM, CALL, RESULT], FUNCTIONS)
    assert said.startswith("system: Be brief.\n\nYou can call one of the functions below.")
    assert json.dumps(FUNCTIONS[0], ensure_ascii=False) in said
    arguments = json.dumps(CALL["tool_calls"][0]["function"]["arguments"], ensure_ascii=False)
    call = f'<tool_call>\n{{"name": "paint", "arguments": {arguments}}}\n</tool_call>'
    assert said.endswith(f"|assistant: {call}|tool: it is red|")
    alone = ChatTemplate(rows, {}).render([USER], FUNCTIONS)
    assert alone.startswith("system: You can call")
    assert ChatTemplate(rows, {}).render([USER]) == f"user: {USER['content']}|"


@pytest.mark.parametrize("name", ["GEMMA", "SILENT"])
def test_tools_work_without_roles_for_system_and_tool(name):
    """In templates that refuse these roles, and in those that leave them out."""
    special = {"bos_token": "<bos>", "eos_token": "<eos>"}
    template = ChatTemplate(getattr(templates, name), special)
    plain = template.render([USER, ANSWER, USER])
    for messages in (
        [USER], [USER, CALL, RESULT], [USER, CALL, RESULT, RESULT, ANSWER, USER],
        [USER, CALL, RESULT, USER],
    ):  # fmt: skip
        text = template.render(messages, FUNCTIONS)
        assert text.count("You can call one of the functions below") == 1
        assert text.index('"name": "stop"') < text.index(USER["content"])
        assert text.count("<tool_response>\nit is red\n</tool_response>") == messages.count(RESULT)
        assert text.count('<tool_call>\n{"name": "paint"') == messages.count(CALL)
        assert text.count(USER["content"]) == messages.count(USER)
    assert template.render([USER, ANSWER, USER]) == plain  # without tools nothing changes


def test_functions_find_a_place_without_any_user():
    said = with_functions([ANSWER], FUNCTIONS, system=False)
    assert [one["role"] for one in said] == ["user", "assistant"]


def test_an_error_that_the_servers_words_bring_about_says_so():
    """A template that takes no calls in the words of others is not the client's fault."""
    refuses = (
        "{% for m in messages %}{% if 'You can call' in m.content and messages | length > 1 %}"
        "{{ raise_exception('too much') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    template = ChatTemplate(refuses, {})
    said = "it knows of no functions, so the server said them.*and it refuses that: too much"
    with pytest.raises(CheckpointError, match=said):
        template.render([USER, ANSWER, USER], FUNCTIONS)
    never = ChatTemplate("{{ raise_exception('never') }}", {})
    with pytest.raises(CheckpointError, match=r"refuses these messages: never$"):
        never.render([USER], FUNCTIONS)
