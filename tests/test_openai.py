"""OpenAI-style dictionaries: the formats, and what JSON cannot carry."""

import json
import math

import pytest

from jax_specdec.openai import chat_logprobs, completion_logprobs, finish_reason
from jax_specdec.output_processor import ProcessorState, admit, step
from jax_specdec.records import FinishReason
from tests.processor_messages import request, target, tokens

pytestmark = pytest.mark.fast

SNOWMAN = "\N{SNOWMAN}".encode()  # three bytes, as three tokens: 0, 1, 2
VOCABULARY = [SNOWMAN[:1], SNOWMAN[1:2], SNOWMAN[2:], b" a", b"b"]


def token_text(id):
    raw = VOCABULARY[id]
    return raw.decode("utf-8", errors="replace"), raw


def records_of(*messages, **params):
    state = admit(ProcessorState.empty(1), 0, 1, request(**params))
    records = []
    for message in messages:
        state, released = step(state, message)
        records += released
    return records


def two_steps():
    first = tokens(3, 4, columns=3, logprobs=[[-0.5, -0.5, -1.5], [-2.0, -0.25, -math.inf]])
    second = tokens(0, columns=3, logprobs=[[math.nan] * 3], ranks=[0])
    first.topk_ids[:] = [[3, 0], [1, -1]]
    second.topk_ids[:] = [[-1, -1]]
    return records_of(target(0, first), target(1, second), logprobs=2)


def test_completions_format():
    assert completion_logprobs(two_steps(), token_text) == {
        "tokens": [" a", "b", "\ufffd"],
        "token_logprobs": [-0.5, -2.0, None],
        "top_logprobs": [{" a": -0.5, "\ufffd": -1.5}, {"\ufffd": -0.25}, {}],
        "text_offset": [0, 2, 3],
    }


def test_chat_format():
    logprobs = chat_logprobs(two_steps(), token_text)
    assert logprobs["refusal"] is None
    assert logprobs["content"][0] == {
        "token": " a",
        "logprob": -0.5,
        "bytes": [32, 97],
        "top_logprobs": [
            {"token": " a", "logprob": -0.5, "bytes": [32, 97]},
            {"token": "\ufffd", "logprob": -1.5, "bytes": [0xE2]},
        ],
    }
    assert logprobs["content"][2]["logprob"] is None


def test_partial_utf8_keeps_its_true_bytes():
    records = records_of(target(0, tokens(0, 1, 2, columns=1)), logprobs=0)
    content = chat_logprobs(records, token_text)["content"]
    raw = bytes(byte for token in content for byte in token["bytes"])
    assert raw.decode() == "\N{SNOWMAN}"
    # The display texts alone could not tell.
    assert "".join(token["token"] for token in content) != "\N{SNOWMAN}"


def test_json_has_no_infinities_and_no_nan():
    rows = [[-math.inf, -math.inf, -0.5]]
    slot = tokens(3, columns=3, logprobs=rows)
    slot.topk_ids[:] = [[4, 3]]
    records = [*records_of(target(0, slot), logprobs=2), *two_steps()]
    for build in (completion_logprobs, chat_logprobs):
        text = json.dumps(build(records, token_text), allow_nan=False)
        assert "-9999.0" in text
        assert "null" in text
    with pytest.raises(ValueError, match="not JSON compliant"):  # the raw values would fail
        json.dumps(records[0].logprobs.tolist(), allow_nan=False)


def test_equal_texts_keep_the_more_likely_token():
    slot = tokens(3, columns=3, logprobs=[[-1.0, -0.25, -0.5]])
    slot.topk_ids[:] = [[0, 1]]  # both show as a replacement character
    logprobs = completion_logprobs(records_of(target(0, slot), logprobs=2), token_text)
    assert logprobs["top_logprobs"] == [{"\ufffd": -0.25}]


def test_without_logprobs_there_is_no_object():
    records = records_of(target(0, tokens(3)))
    assert completion_logprobs(records, token_text) is None
    assert chat_logprobs(records, token_text) is None


def test_finish_reasons_in_the_words_of_the_api():
    assert finish_reason(None) is None
    assert finish_reason(FinishReason.STOP_TOKEN) == "stop"
    assert finish_reason(FinishReason.STOP_SEQUENCE) == "stop"
    assert finish_reason(FinishReason.LENGTH) == "length"
    assert finish_reason(FinishReason.WORKER_LOST) == "worker_lost"
