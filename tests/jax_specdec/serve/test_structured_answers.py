"""Answers of a form: JSON, regular expressions, choices, and calls of functions.

The worker chooses among the tokens that the request's grammar allows, by a hash of the text.
"""

import json
import os
import re
import sys
import zlib

import numpy as np
import openai
import pytest

from jax_specdec.cli import serve_command
from jax_specdec.control import Admit, Evict
from jax_specdec.requests import RequestError
from jax_specdec.serve.model import tiny_model
from jax_specdec.serve.tools import CallReader
from jax_specdec.structured.matcher import Matcher
from jax_specdec.structured.vocabulary import read_vocabulary
from jax_specdec.text import byte_tokens
from tests.support.http_bytes import connected, of_body
from tests.support.http_server import serving, until
from tests.support.processes import children_of
from tests.support.scripted_worker import ScriptedWorker

VOCABULARY = read_vocabulary("", byte_tokens.VOCAB_SIZE)
COLORS = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green"]}, "n": {"type": "integer", "maximum": 99}},
    "required": ["color"],
    "additionalProperties": False,
}
FUNCTIONS = [{"name": "paint", "description": "Paint it", "parameters": COLORS}, {"name": "stop"}]
TOOLS = [{"type": "function", "function": one} for one in FUNCTIONS]
CALL = '<tool_call>\n{"name": "paint", "arguments": {"color":"red", "n": 7}}\n</tool_call>'
ASKED = [{"role": "user", "content": "paint"}]


class ObedientWorker(ScriptedWorker):
    """A worker that does what its last request says; some of its drafts are wrong."""

    def apply(self, command):
        super().apply(command)
        if isinstance(command, Admit):
            self.request = command.request

    def next_token(self, ids):
        params, prompt = self.request.params, self.request.prompt_token_ids
        try:
            text = Matcher(VOCABULARY, params.structured, params.stop_token_ids, ids[len(prompt) :])
        except RequestError:  # behind a wrong draft
            return 0
        mask = np.zeros((1, VOCABULARY.num_words), np.int32)
        text.fill(mask, ())
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        end = byte_tokens.EOS_ID
        # Texts without an end of their own end soon.
        if end in allowed and (allowed == [end] or len(ids) > len(prompt) + 20):
            return end
        return allowed[zlib.crc32(repr(ids).encode()) % len(allowed)]


def serving_by(worker):
    model = tiny_model(name="tiny", created=1, max_length=1000)
    sizes = {"vocab_size": byte_tokens.VOCAB_SIZE, "max_length": 1000}
    return serving(model=model, worker=worker, **sizes)


@pytest.fixture(scope="module")
def server():
    with serving_by(ObedientWorker) as found:
        yield found


def chat(client, messages=ASKED, **more):
    given = {"model": "tiny", "messages": messages, "max_tokens": 200, "seed": 1} | more
    return client.chat.completions.create(**given)


def is_colors(text):
    found = json.loads(text)
    assert found["color"] in ("red", "green")
    assert set(found) <= {"color", "n"}
    assert found.get("n", 0) <= 99
    return True


def outputs(**given):
    return {"extra_body": {"structured_outputs": given}}


def of_schema(schema):
    described = {"name": "colors", "schema": schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": described}}


@pytest.mark.parametrize(
    ("asked", "fits"),
    [
        (of_schema(COLORS), is_colors),
        (outputs(json=COLORS), is_colors),
        (outputs(json=json.dumps(COLORS)), is_colors),
        (outputs(regex="[ab]{3}-[0-9]+!"), re.compile("[ab]{3}-[0-9]+!").fullmatch),
        (outputs(choice=["yes", "nö"]), ("yes", "nö").__contains__),
        (outputs(grammar='root ::= "a" root | "b"'), re.compile("a*b").fullmatch),
    ],
)
def test_texts_are_of_the_form_that_was_asked_for(client, asked, fits):
    """Each of several choices is, and so is a completion."""
    answer = chat(client, n=2, **asked)
    assert [one.finish_reason for one in answer.choices] == ["stop", "stop"]
    assert all(fits(one.message.content) for one in answer.choices)
    if "extra_body" in asked:
        plain = client.completions.create(model="tiny", prompt="x", max_tokens=200, **asked)
        assert fits(plain.choices[0].text)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "stop"}}])
def test_a_call_that_is_required_comes_whole_and_in_parts(client, choice):
    whole = chat(client, tools=TOOLS, tool_choice=choice).choices[0]
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    (call,) = whole.message.tool_calls
    if choice == "required" and call.function.name == "paint":
        assert is_colors(call.function.arguments)
    else:
        assert (call.function.name, json.loads(call.function.arguments)) == ("stop", {})
    stream = chat(client, tools=TOOLS, tool_choice=choice, stream=True)
    choices = [one for chunk in stream for one in chunk.choices]
    parts = [part for one in choices for part in one.delta.tool_calls or ()]
    assert {part.index for part in parts} == {0}
    assert len({part.id for part in parts} - {None}) == 1
    assert "".join(part.function.name or "" for part in parts) == call.function.name
    assert "".join(part.function.arguments for part in parts) == call.function.arguments
    assert [one.finish_reason for one in choices if one.finish_reason] == ["tool_calls"]
    assert not any(one.delta.content for one in choices)


def test_without_need_there_may_be_text(client, server):
    """The grammar has both, and none at all where the choice is "none"; the prompt has all."""
    answer = chat(client, tools=TOOLS).choices[0]
    assert (answer.finish_reason, answer.message.tool_calls) == ("stop", None)
    assert len(answer.message.content) > 10
    request = server.workers[0].request
    prompt = bytes(one for one in request.prompt_token_ids if one < 256).decode()
    assert all(json.dumps(one) in prompt for one in FUNCTIONS)
    structured = request.params.structured
    for text, legal in ((CALL, True), ("See: " + CALL, True), ("<tool_call>x", False), ("", True),
                        (CALL + "x", False), (CALL.replace("red", "blue"), False)):  # fmt: skip
        ids = [*byte_tokens.encode(text).tolist(), byte_tokens.EOS_ID]
        masks = np.zeros((len(ids) + 1, VOCABULARY.num_words), np.int32)
        matcher = Matcher(VOCABULARY, structured, (byte_tokens.EOS_ID,))
        assert (matcher.fill(masks, ids) == len(ids)) == legal


@pytest.mark.parametrize(
    ("changes", "param", "said"),
    [
        ({"tool_choice": "required"}, "tool_choice", "'required' needs tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
         "tool_choice", "names 'f', and tools has paint, stop"),
        ({"tools": TOOLS * 2}, "tools", "a name comes twice"),
        ({"tools": TOOLS, **of_schema(COLORS)}, "tools", "each say what the text is"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "should match"),
        ({"tools": [*TOOLS, {"type": "function", "function": {
            "name": "f", "strict": True, "parameters": {"type": "object", "properties": {
                "a": {"type": "array", "items": {"not": {}}}}}}}]},
         "tools", r"tools: the function 'f', property 'a\[\]': the word 'not' cannot be served "
         r"\(Unimplemented keys: \[.*not.*\]\): leave it out, or leave out strict, without which"),
        (of_schema({"type": "integer", "minimum": 2, "maximum": 1}), "response_format", "greater"),
        (outputs(regex="("), "structured_outputs", "unclosed group"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_and_the_field_named(client, changes, param, said):
    with pytest.raises(openai.BadRequestError, match=said) as raised:
        chat(client, **changes)
    assert raised.value.param == param


class LostWorker(ObedientWorker):
    """A worker whose texts cannot go on behind their third token."""

    def slot_step(self, slot):
        if len(slot.ids) - len(slot.prompt) >= 3:
            slot.evicted = Evict(slot=0, generation=slot.generation, reschedule=False)
        return super().slot_step(slot)


def test_a_text_that_cannot_go_on_ends_with_an_error_of_its_own():
    with serving_by(LostWorker) as found:
        given = {"prompt": "x", "structured_outputs": {"regex": "a{50}"}, "max_tokens": 60}
        answer = found.ask(**given)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "structure_ended")


def test_a_missing_library_is_said_at_the_start_and_in_errors(monkeypatch, caplog):
    serve_command.say_what_is_missing()
    assert caplog.messages == []
    monkeypatch.setitem(sys.modules, "llguidance", None)
    serve_command.say_what_is_missing()
    said = "structured answers need llguidance: pip install 'llguidance>=1.9'"
    assert caplog.messages == [
        f"requests with tools, response_format or structured_outputs fail: {said}"
    ]
    with serving_by(ObedientWorker) as found:
        for given in (
            {"response_format": {"type": "json_object"}}, {"structured_outputs": {"regex": "a"}},
        ):  # fmt: skip
            answer = found.ask(prompt="x", max_tokens=2, **given)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, next(iter(given)))
            assert error["message"].endswith(said)


def test_a_call_is_told_from_the_text_wherever_it_is_cut():
    for text, said, arguments in (
        ("Well < then " + CALL, "Well < then ", '{"color":"red", "n": 7}'),
        (CALL, "", '{"color":"red", "n": 7}'),
        ("no <tool_cal", "no <tool_cal", ""),
        (CALL[:-15], "", '{"color":"red", "n": 7'),  # at the limit of tokens
    ):
        for size in (1, 2, 5, 13, 200):
            reader, places = CallReader(), range(0, len(text), size)
            parts = [reader.push(text[at : at + size], over=at == places[-1]) for at in places]
            assert "".join(more for more, _ in parts) == said
            assert reader.complete == text.endswith(CALL)
            calls = [call for _, call in parts if call]
            assert "".join(one["function"]["arguments"] for one in calls) == arguments
            for n, call in enumerate(calls):
                named = call["function"].get("name"), call.get("type"), call["index"], "id" in call
                assert named == ((None, None, 0, False) if n else ("paint", "function", 0, True))


def test_a_client_that_leaves_ends_the_compilation_for_it(server):
    """Meanwhile others are served; what takes seconds is compiled in another process."""
    keys = {f"k{n}": {"type": "integer", "multipleOf": n << 19} for n in range(1, 13, 2)}
    body = {"prompt": "a", "max_tokens": 2}
    large = {"structured_outputs": {"json": {"type": "object", "properties": keys}}}
    small = {"structured_outputs": {"regex": "[a-z]{2}"}}
    assert server.ask(**body, **small).is_success

    def copies():
        """Processes below those that this one has started, which compile for it."""
        return [copy for pid in children_of(os.getpid()) for copy in children_of(pid)]

    with connected(server, of_body(body | large)):
        until(copies)
        assert server.ask(**body, **small).is_success
        assert server.ask(**body, structured_outputs={"regex": "[0-9]{2}"}).is_success
    until(lambda: server.service.num_open == 0)
    until(lambda: not copies())
