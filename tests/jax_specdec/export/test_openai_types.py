"""The `openai` package's own types and client read what we write, whole and streamed."""

import json

import httpx
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import ValidationError

from jax_specdec.export.openai import ChatStream, CompletionStream, chat_completion, completion
from tests.support.openai_records import MADE, TABLE, records_of, snowman, two_steps
from tests.support.processor_messages import target, tokens


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


def client_of(body, kind="application/json"):
    """A client of the openai package, which gets `body` for an answer."""
    answer = httpx.Response(200, content=body, headers={"content-type": kind})
    http = httpx.Client(transport=httpx.MockTransport(lambda _: answer))
    return openai.OpenAI(api_key="none", base_url="http://127.0.0.1/v1", http_client=http)


@pytest.mark.parametrize("make", [snowman, plain, with_top])
def test_responses_and_chunks_are_of_the_types(make):
    records = make()
    asked = records[0].request
    for model, whole in ((Completion, completion), (ChatCompletion, chat_completion)):
        response = whole(asked, records, TABLE, **MADE)
        found = strict(model, response)
        assert found.usage.completion_tokens == sum(record.num_tokens for record in records)
        assert found.model_dump(mode="json", exclude_unset=True) == json.loads(json.dumps(response))
    live = ChatStream(asked, TABLE, **MADE)
    for chunk in [*map(live.chunk, records), live.usage()]:
        strict(ChatCompletionChunk, chunk)
    live = CompletionStream(asked, TABLE, **MADE)
    chunks = [*map(live.chunk, records), live.usage()]
    for chunk in chunks[-2:]:  # the type lacks the null reason that the API sends
        strict(Completion, chunk)


def test_an_invalid_row_is_null_which_only_the_client_takes():
    """JSON has no NaN, and the types have no null: the client reads the null of the contract."""
    records = two_steps(max_tokens=3)
    response = chat_completion(records[0].request, records, TABLE, **MADE)
    with pytest.raises(ValidationError, match="logprob"):
        strict(ChatCompletion, response)
    with client_of(json.dumps(response).encode()) as client:
        read = client.chat.completions.create(model="m", messages=[], logprobs=True)
    assert [entry.logprob for entry in read.choices[0].logprobs.content] == [-0.5, -2.0, None]
