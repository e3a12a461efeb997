"""What usual clients send beside what is served: nulls, neutral values, what they got before."""

import gzip
import json

import openai
import pytest
from openai.types.chat import ChatCompletionMessage

from tests.support.http_server import serving

CHAT = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 3}
TEXT = {"prompt": "ab", "max_tokens": 3}


@pytest.fixture(scope="module")
def server():
    with serving() as made:
        yield made


def asked(server, body):
    return server.ask("chat/completions" if "messages" in body else "completions", **body)


NEUTRAL = [
    {"service_tier": "auto"}, {"service_tier": "default"}, {"skip_special_tokens": True},
    {"use_beam_search": False}, {"spaces_between_special_tokens": True}, {"length_penalty": 1.0},
    {"early_stopping": False}, {"best_of": 1}, {"suffix": ""}, {"store": False}, {"metadata": {}},
    {"safety_identifier": "a"}, {"prompt_cache_key": "a"}, {"user": "a"},
    {"stream": True, "stream_options": {"include_obfuscation": False}},
    {"stream": True, "stream_options": {"continuous_usage_stats": False}},
    {"guided_json": None, "no_such_field": None, "prediction": None},
]  # fmt: skip
OF_CHATS = [
    {"modalities": ["text"]}, {"tool_choice": "auto"}, {"tool_choice": "none"}, {"tools": []},
    {"tool_choice": "auto", "tools": []}, {"top_logprobs": 0},
    {"top_logprobs": 0, "logprobs": False}, {"add_generation_prompt": True},
    {"continue_final_message": False}, {"verbosity": "medium"}, {"functions": []},
    {"function_call": "none"}, {"parallel_tool_calls": True}, {"reasoning_effort": "low"},
    {"reasoning_effort": None},
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "more"),
    [*((TEXT, more) for more in NEUTRAL), *((CHAT, more) for more in NEUTRAL + OF_CHATS)],
    ids=str,
)
def test_values_that_change_nothing_are_taken(body, more, server):
    answer = asked(server, body | more)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"store": True}, "store = true is not served yet: leave it out (or give false)"),
        ({"metadata": {"a": "b"}}, "(or give {})"),
        ({"service_tier": "flex"}, '(or give "auto")'),
        ({"modalities": ["text", "audio"]}, '(or give ["text"])'),
        ({"use_beam_search": True}, "(or give false)"),
        ({"skip_special_tokens": False}, "(or give true)"),
        ({"add_generation_prompt": False}, "(or give true)"),
        ({"annotations": []}, "'annotations' is not served"),  # of a message only
    ],
)
def test_other_values_of_them_are_refused(more, said, server):
    answer = asked(server, CHAT | more)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"annotations": []},
        {"tool_calls": []},
        {"reasoning_content": None, "provider_specific_fields": None},
    ],
)
def test_a_message_that_a_client_got_may_be_sent_back(more, server):
    """As `message.model_dump()` of openai writes it: with nulls for what is not there."""
    got = ChatCompletionMessage(role="assistant", content="b").model_dump() | more
    assert None in got.values()
    messages = [*CHAT["messages"], got, {"role": "user", "content": "c", "name": None}]
    assert asked(server, CHAT | {"messages": messages}).status_code == 200


def test_answers_of_the_openai_client_go_back_whole(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        messages = list(CHAT["messages"])
        for _ in range(3):
            made = client.chat.completions.create(
                model="scripted", messages=messages, max_completion_tokens=2, store=False,
                metadata={}, service_tier="auto", modalities=["text"], reasoning_effort="low",
            )  # fmt: skip
            messages += [made.choices[0].message.model_dump(), {"role": "user", "content": "x"}]
    assert len(messages) == 7


def test_effort_is_said_to_have_no_effect(server, caplog):
    caplog.set_level("INFO", "jax_specdec.serve")
    asked(server, CHAT)
    assert not [line for line in caplog.messages if "effort" in line]
    asked(server, CHAT | {"reasoning_effort": "high"})
    assert 'reasoning_effort = "high" has no effect here' in caplog.messages


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_an_unknown_field_is_named_shortly(path, server):
    body = CHAT if "chat" in path else TEXT
    said = server.ask(path, **body, zzz_zzz=1).json()["error"]["message"]
    assert said == "'zzz_zzz' is not served; the fields that are stand in /openapi.json"
    error = server.ask(path, **body, temperatur=1).json()["error"]
    assert error["message"] == "'temperatur' is not served; did you mean 'temperature'?"
    assert error["code"] == "unknown_parameter"


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "GZIP", "identity, gzip"])
def test_compressed_bodies_are_not_json(coding, server):
    content = gzip.compress(json.dumps(TEXT).encode())
    headers = {"content-type": "application/json", "content-encoding": coding}
    answer = server.http.post("/v1/completions", content=content, headers=headers)
    assert answer.status_code == 415
    assert "send the body as it is" in answer.json()["error"]["message"]


def test_a_body_as_it_is_may_say_so(server):
    headers = {"content-encoding": "identity"}
    assert server.ask("completions", headers=headers, **TEXT).status_code == 200
