"""The `openai` package's own types and client read what we write, whole and streamed."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import ValidationError

from jax_specdec.export import html_page, response_files
from jax_specdec.export.openai import (
    DONE,
    ChatStream,
    CompletionStream,
    chat_completion,
    completion,
    server_sent_event,
)
from jax_specdec.records import output_processor
from jax_specdec.requests import Request, SamplingParams
from jax_specdec.serve.model import tiny_model
from tests.support.openai_records import MADE, TABLE, records_of, snowman, two_steps
from tests.support.processor_messages import target, tokens

BYTES = tiny_model(name="tiny", created=0, max_length=99).table


def plain():
    """Records of a request without logprobs."""
    return records_of(target(0, tokens(3)), target(1, tokens(3, 4)), max_tokens=3)


def with_top():
    slot = tokens(3, 4, columns=3, logprobs=[[-0.5, -0.5, -1.5], [-2.0, -0.25, -1.0]])
    slot.topk_ids[:] = [[3, 0], [1, 3]]
    return records_of(target(0, slot), logprobs=2, max_tokens=2)


def strict(model, value):
    """Validate a value as JSON without conversions, such as int to float."""
    return model.model_validate_json(json.dumps(value, allow_nan=False), strict=True)


class Answers(BaseHTTPRequestHandler):
    """Handles every request of a server by sending the server's `body`."""

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", self.server.kind)
        self.send_header("content-length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def client_of(body, kind="application/json"):
    """Yield a client of the openai package, connected to a server that answers `body`."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        server.body, server.kind = body, kind
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        http = openai.DefaultHttpxClient(trust_env=False)  # past any proxy
        url = f"http://127.0.0.1:{server.server_port}/v1"
        try:
            with openai.OpenAI(api_key="none", base_url=url, http_client=http) as client:
                yield client
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("make", [snowman, plain, with_top])
@pytest.mark.parametrize(
    ("model", "whole"), [(Completion, completion), (ChatCompletion, chat_completion)]
)
def test_whole_responses_are_of_the_types(model, whole, make):
    records = make()
    response = whole(records[0].request, records, TABLE, **MADE)
    found = strict(model, response)
    assert found.usage.completion_tokens == sum(record.num_tokens for record in records)
    assert found.model_dump(mode="json", exclude_unset=True) == json.loads(json.dumps(response))


@pytest.mark.parametrize("make", [snowman, plain, with_top])
def test_chunks_are_of_the_types(make):
    records = make()
    live = ChatStream(records[0].request, TABLE, **MADE)
    for chunk in [*map(live.chunk, records), live.usage()]:
        strict(ChatCompletionChunk, chunk)
    live = CompletionStream(records[0].request, TABLE, **MADE)
    chunks = [*map(live.chunk, records), live.usage()]
    for chunk in chunks[-2:]:  # the type lacks the null reason that the API sends
        strict(Completion, chunk)


def test_the_demo_writes_the_type_and_the_page_reads_it(tmp_path):
    asked = Request(id="r", prompt_token_ids=(256, 65), params=SamplingParams(logprobs=1))
    state = output_processor.admit(output_processor.ProcessorState.empty(1), 0, 1, asked)
    message = target(0, tokens(0xC3, 0xA9, 256, columns=2))
    _, records = output_processor.step(state, message)
    with (tmp_path / "r.jsonl").open("w") as file:
        response_files.write(file, [completion(asked, [*records], BYTES, **MADE)])
    (line,) = (tmp_path / "r.jsonl").read_text().splitlines()
    response = json.loads(line)
    response["choices"][0]["finish_reason"] = "stop"  # it has not ended
    found = strict(Completion, response)
    assert found.choices[0].text == "\u00e9"  # the special token is no part of it
    view = html_page.read([line])
    assert [*view.strings][:3] == [r"bytes:\xc3", r"bytes:\xa9", "<|eos|>"]
    ((shown,),) = view.files
    assert shown.tokens.tolist() == [0, 1, 2]
    assert shown.prompt == "A"


def test_an_invalid_row_and_minus_infinity_survive_json(tmp_path):
    params = SamplingParams(max_tokens=2, logprobs=1)
    asked = Request(id="r", prompt_token_ids=(256, 65), params=params)
    state = output_processor.admit(output_processor.ProcessorState.empty(1), 0, 1, asked)
    values = [[float("nan"), float("nan")], [-float("inf"), -0.5]]
    _, records = output_processor.step(
        state, target(0, tokens(200, 66, columns=2, logprobs=values))
    )
    with (tmp_path / "r.jsonl").open("w") as file:
        response_files.write(file, [completion(asked, [*records], BYTES, **MADE)])
    record = json.loads((tmp_path / "r.jsonl").read_text())
    logprobs = record["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [None, -9999.0]
    assert logprobs["tokens"] == ["bytes:\\xc8", "B"]
    assert record["speculation"]["cumulative_logprob"] is None


def test_the_types_refuse_what_is_wrong():
    records = with_top()
    response = completion(records[0].request, records, TABLE, **MADE)
    del response["created"]
    with pytest.raises(ValidationError, match="created"):
        strict(Completion, response)
    response = chat_completion(records[0].request, records, TABLE, **MADE)
    response["choices"][0]["logprobs"]["content"][0]["bytes"] = " a"
    with pytest.raises(ValidationError, match="bytes"):
        strict(ChatCompletion, response)


def test_an_invalid_row_is_null_which_only_the_client_takes():
    """JSON has no NaN, and the types have no null: the client reads the null of the contract."""
    records = two_steps(max_tokens=3)
    response = chat_completion(records[0].request, records, TABLE, **MADE)
    with pytest.raises(ValidationError, match="logprob"):
        strict(ChatCompletion, response)
    with client_of(json.dumps(response).encode()) as client:
        read = client.chat.completions.create(model="m", messages=[], logprobs=True)
    assert [entry.logprob for entry in read.choices[0].logprobs.content] == [-0.5, -2.0, None]


def test_the_client_reads_whole_responses_and_the_extension():
    records = snowman()
    response = completion(records[0].request, records, TABLE, **MADE)
    with client_of(json.dumps(response).encode()) as client:
        read = client.completions.create(model="m", prompt="x", logprobs=0)
    assert read.choices[0].text == " a\N{SNOWMAN} a"
    assert read.choices[0].finish_reason == "stop"
    assert read.choices[0].logprobs.text_offset == [0, 2, 2, 2, 3, 5]
    assert read.speculation["token_kinds"][-1] == "bonus"


def test_the_client_reads_both_streams():
    records = snowman()
    for stream in (CompletionStream, ChatStream):
        live = stream(records[0].request, TABLE, **MADE)
        chunks = [*map(live.chunk, records), live.usage()]
        body = b"".join(map(server_sent_event, chunks)) + DONE
        with client_of(body, "text/event-stream") as client:
            if stream is ChatStream:
                read = list(client.chat.completions.create(model="m", messages=[], stream=True))
            else:
                read = list(client.completions.create(model="m", prompt="x", stream=True))
        choices = [chunk.choices[0] for chunk in read if chunk.choices]
        if stream is ChatStream:
            text = "".join(choice.delta.content for choice in choices)
            content = [token for choice in choices for token in choice.logprobs.content]
            assert b"".join(bytes(t.bytes) for t in content if t.bytes is not None) == text.encode()
        else:
            text = "".join(choice.text for choice in choices)
        assert text == " a\N{SNOWMAN} a"
        assert [choice.finish_reason for choice in choices] == [None, None, "stop"]
        assert read[-1].usage.total_tokens == 8
