"""OpenAI-style responses: formats, extension, what JSON cannot carry, the package's types."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from ipc.wire import KEPT_MANY
from jax_specdec.export import openai
from jax_specdec.export.openai import chat_completion, completion
from jax_specdec.export.openai_extension import speculation, token_kinds
from jax_specdec.kept_sets import KeptSets
from jax_specdec.records.batch import FinishReason, PromptRows
from jax_specdec.records.output_processor import abort
from jax_specdec.text.detokenize import TextStream, TokenTable
from tests.support.openai_records import MADE, SNOWMAN, TABLE, records_of, snowman, two_steps
from tests.support.processor_messages import admitted, draft, drafts, run, silent, target, tokens


def test_completions_format():
    assert openai.completion_logprobs(two_steps(), TABLE) == {
        "tokens": [" a", "b", r"bytes:\xe2"],
        "token_logprobs": [-0.5, -2.0, None],
        # An emitted token outside the top K follows them: there are up to K + 1 entries.
        "top_logprobs": [{" a": -0.5, r"bytes:\xe2": -1.5}, {r"bytes:\x98": -0.25, "b": -2.0}, {}],
        "text_offset": [0, 2, 3],
    }


def test_chat_format():
    logprobs = openai.chat_logprobs(two_steps(), TABLE)
    assert logprobs["refusal"] is None
    first, second, third = logprobs["content"]
    own = {"token": " a", "logprob": -0.5, "bytes": (32, 97)}
    other = {"token": r"\xe2", "logprob": -1.5, "bytes": (0xE2,)}
    assert first == own | {"top_logprobs": [own, other]}
    assert len(second["top_logprobs"]) == 1
    assert (third["logprob"], third["top_logprobs"]) == (None, [])


def test_tokens_that_are_parts_of_a_character():
    records = snowman()
    response = chat_completion(records[0].request, records, TABLE, **MADE)
    (choice,) = response["choices"]
    content = choice["logprobs"]["content"]
    raw = b"".join(bytes(token["bytes"]) for token in content if token["bytes"] is not None)
    assert raw == choice["message"]["content"].encode() == b" a" + SNOWMAN + b" a"
    assert (content[-1]["token"], content[-1]["bytes"]) == ("</s>", None)
    response = completion(records[0].request, records, TABLE, **MADE)
    assert response["usage"] == {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}
    assert (response["id"], response["model"], response["created"]) == ("r", "m", 17)
    (choice,) = response["choices"]
    assert choice["text"] == " a\N{SNOWMAN} a"
    assert choice["logprobs"]["text_offset"] == [0, 2, 2, 2, 3, 5]
    parts = [r"bytes:\xe2", r"bytes:\x98", r"bytes:\x83"]
    assert choice["logprobs"]["tokens"] == [" a", *parts, " a", "</s>"]


def plain():
    """Records of a request without logprobs."""
    return records_of(target(0, tokens(3)), target(1, tokens(3, 4)), max_tokens=3)


def with_top():
    slot = tokens(3, 4, columns=3, logprobs=[[-0.5, -0.5, -1.5], [-2.0, -0.25, -1.0]])
    slot.topk_ids[:] = [[3, 0], [1, 3]]
    return records_of(target(0, slot), logprobs=2, max_tokens=2)


@pytest.mark.parametrize(
    ("whole", "type"), [(completion, Completion), (chat_completion, ChatCompletion)]
)
@pytest.mark.parametrize("make", [snowman, plain, with_top])
def test_whole_responses_are_of_the_packages_own_types(whole, type, make):
    """As JSON, without conversions such as int to float."""
    records = make()
    text = json.dumps(whole(records[0].request, records, TABLE, **MADE), allow_nan=False)
    found = type.model_validate_json(text, strict=True)
    assert found.model_dump(mode="json", exclude_unset=True) == json.loads(text)


def test_logprobs_record_by_record_are_those_of_all():
    records, stream = snowman(), TextStream(TABLE)
    parts = [openai.completion_logprobs([one], TABLE, stream=stream) for one in records]
    for name, values in openai.completion_logprobs(records, TABLE).items():
        assert [value for part in parts for value in part[name]] == values


def test_a_text_that_ends_inside_a_character_says_so_at_its_end():
    records = records_of(target(0, tokens(3, 0)), max_tokens=2)
    response = completion(records[0].request, records, TABLE, **MADE)
    assert response["choices"][0]["text"] == " a\ufffd"


def test_json_has_no_infinities_and_no_nan():
    slot = tokens(3, columns=3, logprobs=[[-math.inf, -math.inf, -0.5]])
    slot.topk_ids[:] = [[4, 3]]
    records = [*records_of(target(0, slot), logprobs=2), *two_steps()]
    for build in (completion, chat_completion):
        text = json.dumps(build(records[0].request, records, TABLE, **MADE), allow_nan=False)
        assert "-9999.0" in text
        assert "null" in text
    below = records_of(target(0, tokens(3, columns=1, logprobs=[[-20000.0]])), logprobs=0)
    assert openai.completion_logprobs(below, TABLE)["token_logprobs"] == [-20000.0]


def test_equal_texts_keep_the_more_likely_token():
    table = TokenTable([b"x", b"x", b" a"])
    slot = tokens(2, columns=3, logprobs=[[-1.0, -0.25, -0.5]])
    slot.topk_ids[:] = [[0, 1]]
    logprobs = openai.completion_logprobs(records_of(target(0, slot), logprobs=2), table)
    assert logprobs["top_logprobs"] == [{"x": -0.25, " a": -1.0}]


def test_without_logprobs_there_is_no_object():
    records = records_of(target(0, tokens(3)))
    assert openai.completion_logprobs(records, TABLE) is None
    assert openai.chat_logprobs(records, TABLE) is None
    found = speculation(records, TABLE)
    assert "token_ranks" not in found
    assert found["tokens"] == [" a"]  # the strings have no other place
    assert "tokens" not in speculation(two_steps(), TABLE)


def test_finish_reasons_in_the_words_of_the_api():
    words = {None: None, "STOP_TOKEN": "stop", "STOP_SEQUENCE": "stop", "LENGTH": "length",
             "WORKER_LOST": "worker_lost"}  # fmt: skip
    for name, word in words.items():
        assert openai.finish_reason(name and FinishReason[name]) == word


def test_a_request_that_got_nothing_is_an_empty_response():
    state, _ = run(admitted(logprobs=1), target(0, silent()))
    _, (record,) = abort(state, "r")
    response = completion(record.request, [record], TABLE, **MADE)
    (choice,) = response["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "abort")
    assert choice["logprobs"]["tokens"] == response["speculation"]["by_step"] == []
    assert completion(record.request, [], TABLE, **MADE)["choices"][0]["finish_reason"] is None


def test_what_each_token_was_to_verification():
    for ids, num_drafts, kinds in (
        ((3,), 0, ["plain"]),
        ((3, 4), 1, ["accepted", "bonus"]),
        ((3, 4), 3, ["accepted", "recovered"]),
        ((3,), 2, ["recovered"]),
    ):
        (record,) = records_of(target(0, tokens(*ids, drafts=num_drafts)))
        assert token_kinds(record) == kinds
    # A stop cuts the kinds with the tokens.
    (record,) = records_of(target(0, tokens(3, 5, 4)), stop_token_ids=(5,))
    assert token_kinds(record) == ["accepted", "accepted"]
    assert speculation([record], TABLE)["by_step"] == [
        {"step": 0, "weights_version": 0, "num_tokens": 2, "num_drafts": 2, "num_accepted": 2}
    ]


def test_drafts_and_chosen_ids_are_extensions():
    asked = {"logprobs": 1, "extra_token_ids": (0, 4), "draft_logprobs": True, "max_tokens": 2}
    rows = [[-0.5, -0.25, -3.0, -math.inf], [-1.0, -1.0, -2.0, -4.0]]
    slot = tokens(3, 4, drafts=2, columns=2, chosen=2, logprobs=rows, ranks=[2, 1])
    guess = drafts(3, 1, columns=2, chosen=2)
    guess.logprobs[:] = [[-0.125, -0.125, -5.0, -6.0], [-0.75, -math.inf, -math.inf, -7.0]]
    guess.topk_ids[:] = [[3], [-1]]
    (record,) = records_of(target(0, slot, draft_follows=True), draft(0, guess), **asked)
    response = completion(record.request, [record], TABLE, **MADE)
    expected = {
        "extra_token_ids": [0, 4],
        "chosen_logprobs": [[-3.0, -9999.0], [-2.0, -4.0]],
        "token_ids": [3, 4],
        "token_ranks": [2, 1],
        "topk_ids": [[3], [4]],
        "token_kinds": ["accepted", "recovered"],
        "by_step": [{
            "step": 0, "weights_version": 0, "num_tokens": 2, "num_drafts": 2,
            "num_accepted": 1, "draft_token_ids": [3, 1], "draft_tokens": [" a", r"bytes:\x98"],
            "draft_logprobs": [-0.125, -0.75], "draft_token_ranks": [4, 2],
            "draft_topk_ids": [[3], []], "draft_topk_logprobs": [[-0.125], []],
            "draft_chosen_logprobs": [[-5.0, -6.0], [-9999.0, -7.0]],
        }],
        "logprobs_mode": "raw", "steps": 1, "drafts": 2, "accepted": 1,
    }  # fmt: skip
    assert {name: response["speculation"][name] for name in expected} == expected
    json.dumps(response, allow_nan=False)


def test_kept_sets_are_an_extension():
    sets = KeptSets.of(np.int32([2, KEPT_MANY]), np.float32([-0.5, -np.inf]), np.int32([3, 4]))
    for fields, params in (({}, {}), ({"columns": 1}, {"logprobs": 0})):
        slot = replace(tokens(3, 4, **fields), kept=sets)
        found = speculation(records_of(target(0, slot), kept_token_ids=True, **params), TABLE)
        assert found["kept_counts"] == [2, KEPT_MANY]
        assert found["kept_token_ids"] == [[3, 4], []]
        assert found["log_kept"] == [-0.5, -9999.0]
        assert ("tokens" in found) == (not params)
        json.dumps(found, allow_nan=False)
    assert "kept_token_ids" not in speculation(records_of(target(0, tokens(3))), TABLE)


def test_prompt_logprobs_are_an_extension():
    rows = PromptRows(
        1, np.int32([3, 0]), np.float32([[-0.5, -0.25], [math.nan, math.nan]]),
        np.empty((2, 0), np.float32), np.int32([2, 0]), np.int32([[4], [-1]]),
    )  # fmt: skip
    expected = [
        None,  # nothing predicts a prompt's first token
        {"token": " a", "logprob": -0.5, "bytes": (32, 97),
         "top_logprobs": [{"token": "b", "logprob": -0.25, "bytes": (98,)}]},
        {"token": r"\xe2", "logprob": None, "bytes": (0xE2,), "top_logprobs": []},
    ]  # fmt: skip
    assert openai.prompt_logprobs(rows, TABLE) == expected
    records = snowman()
    for build in (completion, chat_completion):
        response = build(records[0].request, records, TABLE, prompt=rows, **MADE)
        assert response["speculation"]["prompt_logprobs"] == expected
        assert "prompt_logprobs_start" not in response["speculation"]
        late = build(records[0].request, records, TABLE, prompt=replace(rows, start=9), **MADE)[
            "speculation"
        ]
        assert late["prompt_logprobs"] == expected[1:]
        assert late["prompt_logprobs_start"] == 9
        without = build(records[0].request, records, TABLE, **MADE)
        assert "prompt_logprobs" not in without["speculation"]
