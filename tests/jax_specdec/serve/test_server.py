"""The server around the answers: keys, bounds, errors, clients that leave, draining, health."""

import asyncio
import contextlib
import json
import socket
import threading
from pathlib import Path

import httpx
import pytest

from jax_specdec.engine import FinishReason
from jax_specdec.serve.bounds import Bounds
from tests.support.http_server import VOCAB, WaitingWorker, finished, serving, until

pytestmark = pytest.mark.fast

BODY = {"prompt": "abc", "max_tokens": 3}


@pytest.fixture
def waiting():
    bounds = Bounds(max_open=2, max_body=1000, timeout=None)
    with (
        serving(worker=WaitingWorker, bounds=bounds, max_waiting=2, num_slots=1) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        yield server, http


def error(answer, status):
    assert answer.status_code == status
    found = answer.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    return found


def test_health_metrics_and_description(http, server):
    http.post("/v1/completions", json=BODY).raise_for_status()
    assert http.get("/health").json() == {"status": "ready", "problems": [], "workers": [["idle"]]}
    page = http.get("/metrics").text
    assert "jax_specdec_waiting_requests 0.0" in page
    assert 'jax_specdec_finished_requests_total{process_rank="0",reason="length"}' in page
    described = http.get("/openapi.json").json()
    limits = described["info"]["description"]
    assert f"A body: {(1 << 20) + 64 * 64} bytes" in limits
    assert "asked for: 163840." in limits
    paths = described["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health"} <= set(paths)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("GET", "/v1/completions", 405), ("POST", "/health", 405)],
)
def test_unknown_places_and_methods(http, method, path, status):
    error(http.request(method, path), status)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "the body is not JSON"),
        (b'{"prompt": "a", "prompt": "b"}', 'an object has "prompt" twice'),
        (b'{"prompt": "a", "\\ud800": 1}', "'\\ud800' is not served"),
        (b'{"prompt": "a", "model": "\\udfff"}', "half of a surrogate pair"),
        (json.dumps({"prompt": "a", "x" * 10**6: 1}), f"'{'x' * 80}' is not served"),
        (json.dumps({"prompt": [-1] * 10**4}), "prompt = [-1, -1, -1"),
        (json.dumps({"prompt": "a", "stop_token_ids": [1] * 1025}), "has 1025 items and must have"),
        (json.dumps({"prompt": "a", "stop": "x" * 257}), "has 257 characters and may have 256"),
        (b"[" * 100_000, "the body is not JSON"),
        (b"[1]", "must be a JSON object, not [1]"),
        (b"{}", "prompt is missing"),
        (json.dumps({"prompt": ""}), "has an empty prompt: give it one token"),
        (json.dumps({"prompt": "a" * 64}), "64 prompt tokens and max_tokens = 16 exceed the 64"),
        (json.dumps({"prompt": [1, -1]}), "prompt = [1, -1]"),
        (json.dumps({"prompt": [31_000]}), "prompt token id 31000 is outside the vocabulary"),
        (json.dumps({"prompt": []}), "has 0 items and must have 1 to 128"),
        (json.dumps({"prompt": "a", "top_p": 0}), "top_p = 0: must be above 0 and at most 1"),
        (json.dumps({"prompt": "\ud800"}), "half of a surrogate pair"),
        (json.dumps({"prompt": "a", "n": True}), "n = true: must be a whole number"),
        (json.dumps({"prompt": "a", "n": 129}), "must be from 1 to 128"),
        (json.dumps({"prompt": ["a"] * 100, "n": 2}), "128 choices"),
        (json.dumps({"prompt": "a", "temperature": 1e-9}), "temperature = 1e-09 must be 0"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature = NaN: must be from 0"),
        (b'{"prompt": "a", "seed": 1e400}', "seed = Infinity: must be a whole number"),
        (json.dumps({"prompt": "a", "seed": 10**400}), "must be from -922337203685477"),
        (json.dumps({"prompt": "a", "stop": ""}), "must not be empty"),
        (json.dumps({"prompt": "a", "stop": ["a"] * 17}), "has 17 items"),
        (json.dumps({"prompt": "a", "stream_options": {"x": 1}, "stream": True}), "'x' is not"),
        (json.dumps({"prompt": "a", "stream_options": {}}), None),
        (json.dumps({"prompt": "a", "max_tokens": 0}), "needs echo or prompt_logprobs"),
        (json.dumps({"prompt": "a", "logit_bias": [5]}), "logit_bias = [5]: must be an object"),
        (json.dumps({"prompt": "a", "logit_bias": {"+1": 5}}), "'+1' is no token id"),
        (json.dumps({"prompt": "a", "logit_bias": {"1\n": 5}}), "'1\\n' is no token id"),
        (json.dumps({"prompt": "a", "logit_bias": {"1": 101}}), "token 1 must be from -100.0 to"),
        (b'{"prompt": "a", "logit_bias": {"1": NaN}}', "token 1 must be from -100.0 to 100.0"),
        (json.dumps({"prompt": "a", "logit_bias": {"1": True}}), "token 1 must be a number"),
        (json.dumps({"prompt": "a", "logit_bias": {"9" * 10: 1}}), "token id 9999999999 is"),
        (json.dumps({"prompt": "a", "logit_bias": {str(VOCAB): 1}}), "logit_bias: token id 32 is"),
        (json.dumps({"prompt": "a", "logit_bias": dict.fromkeys(range(1025), 1)}),
         "has 1025 entries and may have 1024"),
        (json.dumps({"prompt": "a", "presence_penalty": 2.5}), "must be from -2.0 to 2.0"),
        (json.dumps({"prompt": "a", "frequency_penalty": -3}), "must be from -2.0 to 2.0"),
        (json.dumps({"prompt": "a", "repetition_penalty": 0}), "must be from 0.01 to 100.0"),
        (json.dumps({"prompt": "a", "min_tokens": 17}), "min_tokens = 17 is over max_tokens = 16"),
        (json.dumps({"prompt": "a", "min_tokens": -1}), "min_tokens = -1: must be from 0"),
        (json.dumps({"prompt": "a", "min_tokens": None, "presence_penalty": 0}), None),
        (json.dumps({"prompt": "a", "best_of": 2}), "best_of = 2 is not served yet"),
        (json.dumps({"prompt": "a", "response_format": {"type": "json_object"}}), "not served yet"),
        (json.dumps({"prompt": "a", "logprob": 1}), "did you mean 'logprobs'?"),
        (json.dumps({"prompt": "a", "extra_token_ids": [1]}), "extra_token_ids need logprobs"),
        (json.dumps({"prompt": "a", "logprobs_mode": "own"}), "must be one of raw, scaled"),
    ],
)  # fmt: skip
def test_every_wrong_value_is_named(http, body, said):
    answer = http.post(
        "/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    if said is None:
        assert answer.status_code == 200
    else:
        assert said in error(answer, 400)["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("logit_bias", {"9" * 10: 1}), ("logit_bias", {"32": 1}), ("repetition_penalty", 0),
     ("min_tokens", 99), ("presence_penalty", "1"), ("frequency_penalty", 2.1)],
)  # fmt: skip
def test_a_wrong_field_is_the_errors_param(http, field, value):
    # Fields whose names an error may say too stand before it.
    body = {"prompt": "a", "max_tokens": 9, "stop_token_ids": [1], field: value}
    assert error(http.post("/v1/completions", json=body), 400)["param"] == field


def test_wrong_messages_are_named(http):
    def said(**body):
        return error(http.post("/v1/chat/completions", json=body), 400)["message"]

    assert "messages is missing" in said()
    assert "has 0 items and must have at least 1" in said(messages=[])
    assert "content is missing" in said(messages=[{"role": "user"}])
    assert "must be one of system" in said(messages=[{"role": "robot", "content": ""}])
    assert "no system message" in said(messages=[{"role": "system", "content": "x"}])
    message = {"role": "user", "content": "hi"}
    assert "needs logprobs = true" in said(messages=[message], top_logprobs=2)
    image = {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}
    assert "type must be one of text" in said(messages=[image])
    assert "text is missing" in said(messages=[{"role": "user", "content": [{"type": "text"}]}])


def test_a_body_must_be_json_by_its_type(http):
    answer = http.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
    assert "must be application/json" in error(answer, 415)["message"]


def test_with_a_key_only_those_who_know_it_are_served():
    with serving(api_key="secret") as server, httpx.Client(base_url=server.url) as http:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            answer = http.post("/v1/completions", json=BODY, headers=headers)
            assert error(answer, 401)["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        error(http.get("/v1/models"), 401)
        known = {"authorization": "Bearer secret"}
        assert http.post("/v1/completions", json=BODY, headers=known).status_code == 200
        assert http.get("/health").status_code == 200


def test_a_body_that_is_too_large_is_refused(waiting):
    _, http = waiting
    answer = http.post("/v1/completions", json=BODY | {"user": "x" * 1000})
    assert "more than 1000 bytes" in error(answer, 413)["message"]


def test_what_takes_too_long_is_ended_whole_and_streamed():
    with (
        serving(worker=WaitingWorker, bounds=Bounds(timeout=1.0)) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        answer = http.post("/v1/completions", json=BODY)
        assert error(answer, 504)["code"] == "timeout"
        answer = http.post("/v1/completions", json=BODY | {"stream": True})
        events = [line for line in answer.text.splitlines() if line]
        assert json.loads(events[0].removeprefix("data: "))["error"]["code"] == "timeout"
        assert events[1:] == ["data: [DONE]"]
        until(lambda: not server.engine.running)


def test_as_many_wait_as_may(waiting):
    server, http = waiting
    first = threading.Thread(target=lambda: http.post("/v1/completions", json=BODY))
    first.start()
    until(lambda: server.engine.running)
    answer = http.post("/v1/completions", json=BODY | {"n": 3})
    assert error(answer, 429)["code"] == "engine_full"
    server.workers[0].allowed.release(1000)
    first.join(30)
    until(lambda: not server.engine.running)
    assert http.post("/v1/completions", json=BODY | {"n": 2}).status_code == 200


def test_as_many_requests_are_open_as_may(waiting):
    server, http = waiting
    threads = [
        threading.Thread(target=lambda: http.post("/v1/completions", json=BODY)) for _ in range(2)
    ]
    threads[0].start()
    until(lambda: server.engine.running)  # it has the slot: until then it is one that waits
    threads[1].start()
    until(lambda: server.service.num_open == 2)
    assert error(http.post("/v1/completions", json=BODY), 429)["code"] == "too_many_requests"
    server.workers[0].allowed.release(1000)
    for each in threads:
        each.join(30)


def leave_once(condition, http, body, cut=0):
    """Ask, without the last `cut` bytes of the body, and leave when a condition holds."""
    asked = http.build_request("POST", "/v1/completions", json=body)
    head = [f"POST {asked.url.path} HTTP/1.1", *(f"{k}: {v}" for k, v in asked.headers.items())]
    with socket.create_connection((asked.url.host, asked.url.port)) as connection:
        content = asked.content[: len(asked.content) - cut]
        connection.sendall("\r\n".join([*head, "", ""]).encode() + content)
        until(condition)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(stream):
    with serving(worker=WaitingWorker) as server:
        worker, before = server.workers[0], finished(server, FinishReason.ABORT)
        body = BODY | {"stream": stream, "max_tokens": 50, "ignore_eos": True}
        with httpx.Client(base_url=server.url, timeout=60) as http:
            if stream:
                with http.stream("POST", "/v1/completions", json=body) as answer:
                    worker.allowed.release(6)
                    next(answer.iter_lines())
            else:
                leave_once(lambda: server.engine.running, http, body)
        until(lambda: finished(server, FinishReason.ABORT) == before + 1)
        until(lambda: not server.engine.running and server.service.num_open == 0)


def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_error(caplog):
    with serving(worker=WaitingWorker) as server, httpx.Client(base_url=server.url) as http:
        leave_once(lambda: server.service._bodies._bytes, http, BODY, cut=1)
        until(lambda: server.service._bodies._bytes == 0)
        assert not server.engine.running
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_client_that_leaves_before_its_stream_begins_ends_its_request():
    content = json.dumps(BODY | {"stream": True}).encode()
    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "asgi": {"version": "3.0", "spec_version": "2.4"},
    }  # fmt: skip

    async def receive():
        return {"type": "http.request", "body": content, "more_body": False}

    async def send(message):
        raise OSError("the connection is closed")

    with serving(worker=WaitingWorker) as server:
        asyncio.run(server.service.app(scope, receive, send))
        assert server.service.num_open == 0
        until(lambda: not server.engine._streams.open_ids)


def test_a_lost_worker_is_replaced_and_clients_see_nothing():
    with (
        serving(on_worker_loss="restart", resume_lost=True, restart_delay=0.0) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        body = BODY | {"max_tokens": 40, "ignore_eos": True, "temperature": 0}
        whole = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        server.workers[0].dies_after = server.workers[0].sent + 5
        again = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        assert again == whole
        assert len(server.workers) == 2


def test_an_engine_that_has_stopped_answers_errors_and_is_not_healthy():
    with serving() as server, httpx.Client(base_url=server.url, timeout=60) as http:
        server.workers[0].dies_after = 3
        body = BODY | {"max_tokens": 40, "ignore_eos": True}
        assert error(http.post("/v1/completions", json=body), 503)["code"] == "ended_early"
        assert error(http.post("/v1/completions", json=body), 503)["code"] == "unavailable"
        health = http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")


@pytest.mark.parametrize("key", ["", "secret"])
def test_strangers_see_no_reason_of_a_loss(key):
    """It may have paths and tracebacks: the log has it, and who knows the key."""
    with serving(api_key=key) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        known = {"authorization": f"Bearer {key or 'any'}"}
        server.workers[0].dies_after = 3
        body = BODY | {"max_tokens": 40, "ignore_eos": True}
        error(http.post("/v1/completions", json=body, headers=known), 503)
        until(lambda: server.engine.failure)
        reason = str(server.engine.failure)
        again = http.post("/v1/completions", json=body, headers=known)
        assert error(again, 503)["message"] == "the engine has stopped: the server's log says why"
        for strange in ({}, {"authorization": "Bearer wrong"}):
            shown = http.get("/health", headers=strange).json()["problems"]
            assert shown == ["the server's log says more"]
        problems = http.get("/health", headers=known).json()["problems"]
        assert any(reason in problem for problem in problems) == bool(key)


def test_an_error_of_the_server_says_nothing_of_itself(monkeypatch, caplog):
    with serving() as server:
        monkeypatch.setattr(server.engine, "submit", lambda *_, **__: Path("/a/path").stat())
        answer = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=60)
        said = "an error of the server: its log says more"
        assert error(answer, 500)["message"] == said
    assert "/a/path" in caplog.text


def test_requests_that_end_without_a_slot_are_counted(waiting):
    server, http = waiting
    first = threading.Thread(target=lambda: http.post("/v1/completions", json=BODY))
    first.start()
    until(lambda: server.engine.running)
    leave_once(lambda: server.engine.num_waiting == 2, http, BODY | {"n": 2})
    until(lambda: server.engine.num_waiting == 0)
    server.workers[0].allowed.release(1000)
    first.join(30)
    page = http.get("/metrics").text
    name = "jax_specdec_finished_requests_total"
    assert f'{name}{{process_rank="",reason="abort"}} 2.0' in page
    assert f'{name}{{process_rank="0",reason="abort"}} 0.0' in page


def test_metrics_of_http(waiting):
    server, http = waiting
    error(http.get("/nowhere"), 404)
    error(http.post("/v1/completions", json={}), 400)
    first = threading.Thread(target=lambda: http.post("/v1/completions", json=BODY))
    first.start()
    until(lambda: server.service.num_open)
    page = http.get("/metrics").text
    for line in (
        'http_requests_total{path="other",status="404"} 1.0',
        'http_requests_total{path="/v1/completions",status="400"} 1.0',
        "http_open_requests 1.0",
        "http_connections 2.0",
    ):
        assert f"jax_specdec_{line}\n" in page
    server.workers[0].allowed.release(1000)
    first.join(30)


def test_draining_finishes_what_is_open():
    with serving(worker=WaitingWorker) as server:
        answers = []

        def ask():
            body = BODY | {"max_tokens": 5, "ignore_eos": True}
            answers.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=60))

        client = threading.Thread(target=ask)
        client.start()
        until(lambda: server.engine.running)
        server.listener.handle_exit(15, None)
        assert server.service.draining
        health = httpx.get(f"{server.url}/health", timeout=60)
        assert (health.status_code, health.json()["status"]) == (503, "draining")
        late = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=60)
        assert error(late, 503)["code"] == "draining"
        server.workers[0].allowed.release(1000)
        server.thread.join(30)
        client.join(30)
        assert not server.thread.is_alive()
        (answer,) = answers
        assert answer.json()["usage"]["completion_tokens"] == 5
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")


def test_a_second_signal_ends_at_once():
    with serving(worker=WaitingWorker) as server:

        def ask():
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=60)

        client = threading.Thread(target=ask)
        client.start()
        until(lambda: server.engine.running)
        server.listener.handle_exit(15, None)
        server.listener.handle_exit(15, None)
        server.thread.join(30)
        assert not server.thread.is_alive()
        client.join(30)
