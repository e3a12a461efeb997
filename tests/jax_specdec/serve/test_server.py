"""The server around the answers: keys, bounds, errors, clients that leave, draining, health."""

import asyncio
import contextlib
import json
import re
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from jax_specdec.engine import FinishReason
from jax_specdec.serve.bounds import Bounds
from jax_specdec.serve.errors import shown
from tests.support.http_bytes import connected, of_body
from tests.support.http_server import WaitingWorker, finished, serving, until
from tests.support.scene import parts_of

BODY = {"prompt": "abc", "max_tokens": 3}
LONG = BODY | {"max_tokens": 40, "ignore_eos": True}
JSON = {"content-type": "application/json"}


@pytest.fixture
def waiting():
    bounds = Bounds(max_open=2, max_body=1000, timeout=None)
    with serving(worker=WaitingWorker, bounds=bounds, max_waiting=2, num_slots=1) as server:
        yield server
        server.workers[0].allowed.release(1000)


def error(answer, status):
    assert answer.status_code == status
    found = answer.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    return found


def test_health_metrics_and_description(server):
    server.ask(**BODY).raise_for_status()
    found = server.http.get("/health").json()
    assert found == {"status": "ready", "problems": [], "workers": [["idle"]]}
    page = server.http.get("/metrics").text
    assert "jax_specdec_waiting_requests 0.0" in page
    assert 'jax_specdec_finished_requests_total{process_rank="0",reason="length"}' in page
    (line,) = [line for line in page.splitlines() if line.startswith("jax_specdec_build_info{")]
    assert line.endswith("} 1.0")
    assert all(said in line for said in ('model="scripted"', 'python="3.', 'version="'))
    described = server.http.get("/openapi.json").json()
    limits, paths = described["info"]["description"], described["paths"]
    assert f"A body: {(1 << 20) + 64 * 64} bytes" in limits
    assert "asked for: 163840." in limits
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health"} <= set(paths)
    fields = described["components"]["schemas"]["Completion"]["properties"]
    assert fields["n"]["default"] == 1
    assert [one["type"] for one in fields["n"]["anyOf"]] == ["integer", "null"]


def probes(server):
    return [server.http.get(path).status_code for path in ("/livez", "/health")]


def test_a_process_that_loads_is_alive(server, monkeypatch):
    """A probe of liveness must not end it; one of readiness sends it no requests."""
    assert probes(server) == [200, 200]
    state = server.engine.health()
    monkeypatch.setattr(server.engine, "health", lambda: replace(state, ready=False))
    assert probes(server) == [200, 503]
    monkeypatch.setattr(server.engine, "health", lambda: replace(state, alive=False, ready=False))
    assert probes(server) == [503, 503]
    assert server.http.get("/livez").json() == {"status": "failed"}


def test_a_process_that_drains_is_alive(waiting):
    """As long as a request is open: the server ends behind the last one."""
    later = waiting.ask_later(**BODY)
    until(lambda: waiting.service.num_open)
    waiting.service.draining = True
    assert probes(waiting) == [200, 503]
    waiting.workers[0].allowed.release(1000)
    later.result().raise_for_status()
    waiting.thread.join(30)
    assert not waiting.thread.is_alive()


def test_each_answer_has_a_line_where_asked_for(caplog):
    caplog.set_level("INFO", "jax_specdec.serve")
    with serving(access_log=True) as server:
        server.ask(**BODY)
        server.http.get("/a%0Ab%E2%80%A8?token=secret")
        server.ask(model="other", prompt="a")
    lines = [line.getMessage() for line in caplog.records if " s" in line.getMessage()[-2:]]
    said = [re.sub(r"^127.0.0.1:\d+ |\d+\.\d{3} s$", "", line) for line in lines]
    assert said == [
        "POST /v1/completions 200 ", r"GET /a\nb\u2028 404 ", "POST /v1/completions 404 ",
    ]  # fmt: skip
    caplog.clear()
    with serving() as server:  # the control
        server.ask(**BODY)
    assert not [line for line in caplog.records if "/v1/completions" in line.getMessage()]


@pytest.mark.parametrize(
    ("method", "path", "status", "said"),
    [
        ("GET", "/nowhere", 404, "GET /nowhere: Not Found; there are /v1/models, /v1/models/{name"),
        ("GET", "/v2/" + "x" * 900, 404, "/v1/chat/completions, /health, /livez, /metrics"),
        ("GET", "/v1/completions", 405, "Not Allowed; allowed is POST"),
        ("POST", "/health", 405, "POST"), ("POST", "/v1/completions", 415, "must be application/j"),
    ],
)  # fmt: skip
def test_unknown_places_methods_and_types(server, method, path, status, said):
    assert said in error(server.http.request(method, path), status)["message"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"prompt": "a", "\\ud800": 1}', "'\\ud800' is not served"),
        (b"[1]", "must be a JSON object, not [1]"),
        (b"{}", "prompt is missing"),
        (b"{", "the body is not JSON"),
        (b"\xff\xff", "the body is not JSON"),
        (b"[" * 100_000, "the body is not JSON"),
        (b'[{"a": 1, "x": {"b": 2, "b": 3}}]', 'an object has "b" twice: name it once'),
        (b'{"\\ud800": 1, "\\ud800": 1}', "twice"),
        (b'{"prompt": [31000]}', "prompt token id 31000 is outside the vocabulary"),
        ({"model": "\udfff"}, "half of a surrogate pair"),
        ({"x" * 10**6: 1}, f"'{'x' * 80}' is not served"),
        ({"prompt": [-1] * 10**4}, "prompt.0 = -1: "),
        ({"prompt": ""}, "has an empty prompt: give it one token"),
        ({"prompt": "a" * 64}, "64 prompt tokens and max_tokens = 16 exceed the 64"),
        ({"max_tokens": 63}, None),
        ({"prompt": []}, "[]: Input should be a valid string or List should have at least 1 "),
        ({"stop_token_ids": [1] * 1025}, "1...: List should have at most 1024 items"),
        ({"stop": "x" * 257}, "should have at most 256 characters"),
        ({"stop": ""}, "should have at least 1 character"),
        ({"stop": ["a"] * 17}, "at most 16 items after validation, not 17"),
        ({"top_p": 0}, "top_p = 0: Input should be greater than 0"),
        ({"top_p": 1.5}, "should be less than or equal to 1"),
        ({"n": 0}, "n = 0: Input should be greater than or equal to 1"),
        ({"n": 129}, "n = 129: Input should be less than or equal to 128"),
        ({"n": 1.0}, "n = 1.0: Input should be a valid integer"),
        ({"n": 2, "prompt": ["a"] * 65}, "128 choices"),
        ({"prompt": [1.5]}, "0 = 1.5: Input should be a valid string or Input should be a"),
        ({"temperature": 1e-9}, "temperature = 1e-09 must be 0"),
        ({"temperature": float("nan")}, "temperature = NaN: Input should be a finite number"),
        ({"seed": 10**400}, "0...: Input should be less than or equal to 18446744073709551615"),
        ({"seed": -(10**400)}, "should be greater than or equal to -9223372036854775808"),
        ({"stream_options": {"x": 1}, "stream": True}, "'x' is not served; known are include_us"),
        ({"stream_options": {}}, None),
        ({"max_tokens": 0}, "needs echo or prompt_logprobs"),
        ({"entropy": True}, "entropy needs logprobs: ask for logprobs = 0 at least"),
        ({"log_sum_exp": 1, "logprobs": 0}, "log_sum_exp = 1: Input should be a valid boolean"),
        ({"prompt_extra_token_ids": [[1]]}, "prompt_extra_token_ids need prompt_logprobs"),
        ({"prompt_extra_token_ids": [[1, 2], [3]], "prompt_logprobs": 0}, "be token ids [n, C]"),
        ({"prompt_extra_token_ids": [[1]] * 9, "prompt_logprobs": 0, "prompt": "ab"}, "has 9 rows"),
        ({"prompt_extra_token_ids": [[99]], "prompt_logprobs": 0, "prompt": "ab"}, "is outside"),
        ({"prompt_extra_token_ids": [[1] * 513], "prompt_logprobs": 0}, "at most 512 items"),
        ({"prompt_logprobs_start": 1}, "prompt_logprobs_start = 1 needs prompt_logprobs"),
        ({"prompt_logprobs_start": 10**6, "prompt_logprobs": 0}, "start = 1000000 is beyond the"),
        ({"prompt_logprobs_start": -1, "prompt_logprobs": 0}, "greater than or equal to 0"),
        ({"prompt_logprobs_start": 1, "prompt_logprobs": 0, "echo": True, "logprobs": 1},
         "prompt_logprobs_start = 1 with echo and logprobs"),
        ({"prompt": "abc", "prompt_logprobs_start": 1, "prompt_logprobs": 0, "echo": True}, None),
        ({"logit_bias": [5]}, "logit_bias = [5]: Input should be a valid dictionary"),
        ({"logit_bias": {"+1": 5}}, 'logit_bias.+1 = "+1": String should match'),
        ({"logit_bias": {"1": 101}}, "bias.1 = 101: Input should be less than or equal to 100"),
        ({"logit_bias": {"1": -101}}, "should be greater than or equal to -100"),
        ({"logit_bias": {"1": True}}, "logit_bias.1 = true: Input should be a valid number"),
        ({"logit_bias": dict.fromkeys(range(1024), 1)}, "logit_bias: token id 32 is outside"),
        ({"logit_bias": dict.fromkeys(range(1025), 1)}, "has 1025 entries and may have 1024"),
        ({"presence_penalty": 2.5}, "should be less than or equal to 2"),
        ({"presence_penalty": -2.5}, "should be greater than or equal to -2"),
        ({"min_tokens": 17}, "min_tokens = 17 is over max_tokens = 16"),
        ({"min_tokens": 1, "stop_token_ids": [*range(99, 1123)]}, "min_tokens = 1 with 1025 stop"),
        ({"min_tokens": None, "presence_penalty": 0}, None),
        ({"best_of": 2}, "best_of = 2 is not served yet: leave it out (or give 1)"),
        ({"response_format": {"type": "json_object"}}, "of 32 tokens need its tokenizer"),
        ({"response_format": {"type": "xml"}}, "Input should be 'text', 'json_object' or 'js"),
        ({"response_format": {"type": "json_schema"}}, "json_schema needs json_schema"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "has json and regex: give one"),
        ({"structured_outputs": {"regexp": "a"}}, "'regexp' is not served; did you mean 'regex'?"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "nothing comes after"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
         "response_format and structured_outputs each say"),
        ({"structured_outputs": {"json_object": False}, "response_format": {"type": "text"}}, None),
        ({"tools": []}, "'tools' is not served"),
        ({"extra_token_ids": [1]}, "extra_token_ids need logprobs"),
        ({"logprobs": 33}, "logprobs = 33, but the vocabulary has 32 tokens"),
        ({"logprobs_mode": "own"}, "Input should be 'raw', 'scaled' or 'processed'"),
    ],
)  # fmt: skip
def test_every_wrong_value_is_named(server, body, said):
    """And its field, the first of a row, is the error's param."""
    whole = isinstance(body, bytes)
    content = body if whole else json.dumps({"prompt": "a"} | body)
    answer = server.http.post("/v1/completions", content=content, headers=JSON)
    if said is None:
        assert answer.status_code == 200
        return
    found = error(answer, 400)
    assert said in found["message"]
    assert whole or found["param"] == next(iter(body))[:80]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"messages": None}, "messages is missing"),
        ({"messages": []}, "messages = []: List should have at least 1 item"),
        ({"messages": [{"role": None}]}, "messages.0 = {}: role is missing"),
        ({"messages": [{"role": "user"}]}, "the role user has no content"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages.0.content = 1: Input should"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {
            "name": "f", "arguments": "[]"}}]}]}, "arguments of the call of 'f' are no JSON obj"),
        ({"messages": [{"role": "robot", "content": ""}]}, "Input should be 'system', 'dev"),
        ({"messages": [{"role": "system", "content": "x"}]}, "no system message"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "should be 'text'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "text is missing"),
        ({"top_logprobs": 2}, "needs logprobs = true"),
    ],
)  # fmt: skip
def test_wrong_messages_are_named(server, changes, said):
    body = {"messages": [{"role": "user", "content": "hi"}]} | changes
    assert said in error(server.ask("chat/completions", **body), 400)["message"]


def test_errors_show_the_beginning_of_a_value():
    class Counted(list):
        def __iter__(self):
            for item in super().__iter__():
                read.append(item)
                yield item

    read = []
    assert shown("x" * 78) == '"' + "x" * 78 + '"'
    assert shown("x" * 79) == '"' + "x" * 79 + "..."
    assert shown(Counted(range(10**6))).startswith("[0, 1, 2")
    assert len(read) < 100


def test_with_a_key_only_those_who_know_it_are_served():
    with serving(api_key="secret") as server:
        for known in ("", "Bearer wrong", "secret", "Basic secret"):
            answer = server.ask(headers={"authorization": known}, **BODY)
            assert error(answer, 401)["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        error(server.http.get("/v1/models"), 401)
        answer = server.ask(headers={"authorization": "bearer secret"}, **BODY)
        assert answer.status_code == server.http.get("/health").status_code == 200
        listed = server.http.get("/openapi.json").json()["paths"]["/v1/models"]["get"]
        assert listed["responses"]["401"]["description"] == "the key is missing or wrong"


def test_what_takes_too_long_is_ended_whole_and_streamed():
    with serving(worker=WaitingWorker, bounds=Bounds(timeout=0.2)) as server:
        assert error(server.ask(**BODY), 504)["code"] == "timeout"
        first, _, rest = server.ask(**BODY, stream=True).text.partition("\n\n")
        assert json.loads(first.removeprefix("data: "))["error"]["code"] == "timeout"
        assert rest == "data: [DONE]\n\n"
        until(lambda: not server.engine.running)


def test_as_many_wait_for_a_slot_as_may(waiting):
    first = waiting.ask_later(**BODY)
    until(lambda: waiting.engine.running)
    assert error(waiting.ask(**BODY, n=3), 429)["code"] == "engine_full"
    waiting.workers[0].allowed.release(1000)
    assert first.result(30).status_code == 200
    until(lambda: not waiting.engine.running)
    assert waiting.ask(**BODY, n=2).status_code == 200


def test_as_many_requests_are_open_as_may(waiting):
    both = [waiting.ask_later(**BODY)]
    until(lambda: waiting.engine.running)  # it has the slot: until then it is one that waits
    both.append(waiting.ask_later(**BODY))
    until(lambda: waiting.service.num_open == 2)
    assert error(waiting.ask(**BODY), 429)["code"] == "too_many_requests"
    waiting.workers[0].allowed.release(1000)
    assert [one.result(30).status_code for one in both] == [200, 200]


def leave_once(condition, server, body, cut=0):
    """Ask, without the last `cut` bytes of the body, and leave when a condition holds."""
    asked = of_body(body)
    with connected(server, asked[: len(asked) - cut]):
        until(condition)


def test_clients_that_leave_end_their_requests(caplog):
    """Before an answer, in the middle of a stream, and in the middle of a body."""
    with serving(worker=WaitingWorker) as server:
        leave_once(lambda: server.engine.running, server, LONG)
        until(lambda: finished(server, FinishReason.ABORT) == 1)
        with server.http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as answer:
            server.workers[0].allowed.release(6)
            next(answer.iter_lines())
        until(lambda: finished(server, FinishReason.ABORT) == 2)
        until(lambda: not server.engine.running and server.service.num_open == 0)
        leave_once(lambda: server.service.bodies.num_bytes, server, BODY, cut=1)
        until(lambda: server.service.bodies.num_bytes == 0)
        assert not server.engine.running
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_client_that_leaves_early_ends_its_request():
    asked = {"type": "http.request", "body": json.dumps(BODY | {"stream": True}).encode()}
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"",
             "headers": [(b"content-type", b"application/json")],
             "asgi": {"version": "3.0", "spec_version": "2.4"}}  # fmt: skip

    async def receive():
        return asked

    async def send(message):
        raise OSError("the connection is closed")

    with serving(worker=WaitingWorker) as server:
        asyncio.run(server.service.app(scope, receive, send))
        assert server.service.num_open == 0
        until(lambda: not parts_of(server.engine).streams.open_ids)


@pytest.mark.parametrize("key", ["", "secret"])
def test_a_stopped_engine_hides_its_reason_from_strangers(key):
    """It may have paths and tracebacks: the log has it, and who knows the key."""
    with serving(api_key=key) as server:
        known = {"authorization": f"Bearer {key or 'any'}"}
        server.workers[0].dies_after = 3
        assert error(server.ask(headers=known, **LONG), 503)["code"] == "ended_early"
        until(lambda: server.engine.failure)
        found = error(server.ask(headers=known, **LONG), 503)
        assert found["message"] == "the engine has stopped: the server's log says why"
        assert found["code"] == "unavailable"
        for strange in ({}, {"authorization": "Bearer wrong"}):
            answer = server.http.get("/health", headers=strange)
            assert (answer.status_code, answer.json()["status"]) == (503, "failed")
            assert answer.json()["problems"] == ["the server's log says more"]
        problems = server.http.get("/health", headers=known).json()["problems"]
        reason = str(server.engine.failure)
        assert any(reason in problem for problem in problems) == bool(key)


def test_an_error_of_the_server_says_nothing_of_itself(caplog):
    with serving() as server:
        server.engine.submit = lambda *_, **__: Path("/a/path").stat()
        said = error(server.ask(**BODY), 500)["message"]
        assert said == "an error of the server: its log says more"
    assert "/a/path" in caplog.text


def test_metrics_of_http_and_of_requests_that_end_without_a_slot(waiting):
    error(waiting.http.get("/nowhere"), 404)
    error(waiting.ask(), 400)
    first = waiting.ask_later(**BODY)
    until(lambda: waiting.engine.running)
    leave_once(lambda: waiting.engine.num_waiting == 2, waiting, BODY | {"n": 2})
    until(lambda: waiting.engine.num_waiting == 0 and waiting.service.num_open == 1)
    page = waiting.http.get("/metrics").text
    for line in (
        'http_requests_total{path="other",status="404"} 1.0',
        'http_requests_total{path="/v1/completions",status="400"} 1.0',
        "http_open_requests 1.0",
        "http_connections 2.0",
        'finished_requests_total{process_rank="",reason="abort"} 2.0',
        'finished_requests_total{process_rank="0",reason="abort"} 0.0',
    ):
        assert f"jax_specdec_{line}\n" in page
    waiting.workers[0].allowed.release(1000)
    assert first.result(30).status_code == 200


def test_draining_finishes_what_is_open():
    with serving(worker=WaitingWorker) as server:
        answer = server.ask_later(**BODY | {"max_tokens": 5}, ignore_eos=True)
        until(lambda: server.engine.running)
        server.listener.handle_exit(15, None)
        health = server.http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "draining")
        assert error(server.ask(**BODY), 503)["code"] == "draining"
        server.workers[0].allowed.release(1000)
        server.thread.join(30)
        assert not server.thread.is_alive()
        assert answer.result(30).json()["usage"]["completion_tokens"] == 5
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")


def test_a_second_signal_ends_at_once():
    with serving(worker=WaitingWorker) as server:
        answer = server.ask_later(**BODY)
        until(lambda: server.engine.running)
        server.listener.handle_exit(15, None)
        server.listener.handle_exit(15, None)
        server.thread.join(30)
        assert not server.thread.is_alive()
        with contextlib.suppress(httpx.HTTPError):
            answer.result(30)
