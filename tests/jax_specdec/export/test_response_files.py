"""Files of responses in every shape that is read, and what is refused, by its place."""

import json
import re

import pytest

from jax_specdec.export import response_files
from jax_specdec.export.openai import chat_completion
from jax_specdec.export.response_files import ViewError
from jax_specdec.export.shown import Strings
from tests.support.hostile_responses import line
from tests.support.openai_records import snowman, two_steps


def read(text):
    return response_files.read(text.splitlines(keepends=True), Strings())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: r.pop("choices"), "'choices' is missing"),
        (lambda r: r["choices"][0].pop("text"), "'text' is missing"),
        (lambda r: r["speculation"]["token_ranks"].pop(), "token_ranks has length 2 for 3 tokens"),
        (lambda r: r["speculation"]["token_kinds"].append("x"), "token_kinds has length 4 for 3"),
        (lambda r: r["speculation"].update(token_kinds=["x"] * 3), "token_kinds has 'x'; known"),
        (lambda r: r["speculation"]["by_step"].pop(), "by_step does not add up to 3 tokens"),
        *[(lambda r, name=name: r["choices"][0]["logprobs"][name].pop(), f"{name} has length 2")
          for name in ("token_logprobs", "top_logprobs")],
        (lambda r: r["choices"][0]["logprobs"].update(token_logprobs=["x"] * 3), "'x'"),
    ],
)  # fmt: skip
def test_a_line_that_is_not_a_response_is_refused_by_its_number(change, said):
    found = json.loads(line(two_steps()))
    if said.startswith("'text'"):
        found["choices"][0]["logprobs"] = None
    change(found)
    with pytest.raises(ViewError, match=re.escape(said)) as caught:
        read("\n" + json.dumps(found))
    assert str(caught.value).startswith("line 2 ")


BOTH = [json.loads(line(two_steps())), json.loads(line(snowman(), chat_completion))]


@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_of_responses_is_read(indent):
    for value in (BOTH, {"object": "list", "data": BOTH}):
        text = "\n" + json.dumps(value, indent=indent)
        assert [len(one.tokens) for one in read(text)] == [3, 6]
    (shown,) = read(json.dumps(BOTH[1], indent=indent))
    assert len(shown.tokens) == 6


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1]", "element 1 of the array is not a completion"),
        ('{"data": [1]}', "element 1 of the array is not a completion"),
        ('{"data": 1}', "line 1 is not a completion"),
        ("[", "line 1 is not JSON: Expecting value (column 2)"),
        ("\n[\n1,\n!]", "line 4 is not JSON"),
        ("[]", "there is no response in it"),
        ('{"id": 1}\n{', "line 1 is not a completion"),
        ('{"id": "a", "cho', "line 1 is not JSON: Unterminated string"),
        *[(text, "line 1 is no") for text in ("{", "3", "null", '"choices"')],
        ("\n", "there is no response in it"),
        (json.dumps(BOTH[0]) + "\n" + json.dumps(BOTH[0])[:-5], "line 2 is not JSON"),
    ],
)
def test_what_is_wrong_in_an_array_or_between_lines_is_named(text, said):
    with pytest.raises(ViewError, match=re.escape(said)):
        read(text)


def batch_line(name, body=None, status=200, error=None):
    answer = None if body is None else {"status_code": status, "request_id": "q", "body": body}
    return json.dumps({"id": "batch_req_1", "custom_id": name, "response": answer, "error": error})


def test_the_output_of_a_batch_is_read():
    """https://platform.openai.com/docs/guides/batch has this form."""
    refused = {"error": {"message": "no such model", "code": "x"}}
    for text, tokens, reason in (
        (batch_line("a", BOTH[0]), 3, None),
        (batch_line("a", error={"code": "expired", "message": "too late"}), 0, "error: too late"),
        (batch_line("a", refused, status=404), 0, "error: no such model"),
        (batch_line("a", {}, status=500), 0, "error: status 500"),
    ):
        (one,) = read(text)
        assert (one.id, len(one.tokens), one.finish_reason) == ("a", tokens, reason)


def test_the_input_of_a_batch_is_told_from_its_output():
    asked = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    with pytest.raises(ViewError, match="it is a batch's input: the output that the batch gave"):
        read(json.dumps(asked))
