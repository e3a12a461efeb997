"""The page of a file of responses: the shapes that are read, what is refused by its place, and that
data stays data.
"""

import base64
import dataclasses
import hashlib
import html
import itertools
import json
import math
import re

import numpy as np
import pytest

from jax_specdec.export import html_page, response_files
from jax_specdec.export.openai import chat_completion, completion
from jax_specdec.export.response_files import ViewError
from jax_specdec.export.shown import CODES_OF_KINDS, NO_LOGPROB, PROMPT, UNKNOWN, Strings
from jax_specdec.records.batch import PromptRows
from tests.support.hostile_responses import HOSTILE, hostile_response, line
from tests.support.openai_records import MADE, TABLE, records_of, snowman, two_steps
from tests.support.page_blocks import blocks
from tests.support.processor_messages import request, target, tokens


def elements(document):
    """The names of all elements, in order; no "<" of a script is followed by a letter."""
    return re.findall(r"<([a-z]\w*)", document)


def shown_in(*lines):
    """What is shown of the responses in some lines, and their strings in order."""
    view = html_page.read(lines)
    return view.files[0], [*view.strings]


def words(shown, strings):
    return [strings[number] for number in shown.tokens]


def tops(shown, strings):
    """Each token's top K as (string, logprob)."""
    texts = [strings[number] for number in shown.top.ids]
    pairs = list(zip(texts, shown.top.logprobs.tolist(), strict=True))
    return [pairs[begin:end] for begin, end in itertools.pairwise(shown.top.offsets.tolist())]


def names(shown):
    by_number = {number: name for name, number in CODES_OF_KINDS.items()} | {PROMPT: "prompt"}
    return [by_number.get(kind) for kind in shown.kinds.tolist()]


@pytest.mark.parametrize("build", [completion, chat_completion])
def test_both_formats_are_read(build):
    (shown,), strings = shown_in(line(snowman(), build), "\n")
    prefix = "bytes:" if build is completion else ""
    parts = [rf"{prefix}\x{byte}" for byte in ("e2", "98", "83")]
    assert words(shown, strings) == [" a", *parts, " a", "</s>"]
    assert shown.logprobs.tolist() == [-0.5, -0.125, -0.25, -0.375, -0.5, -0.75]
    assert names(shown) == ["accepted", "bonus", "plain", "accepted", "accepted", "bonus"]
    assert shown.steps.tolist() == [[0, 2, 1, 1], [1, 1, 0, 0], [2, 3, 2, 2]]
    assert (shown.id, shown.finish_reason, shown.mode) == ("r", "stop", "raw")
    assert shown.num_prompt == 0


def test_invalid_rows_minus_infinity_and_no_logprobs():
    (asked, plain), strings = shown_in(line(two_steps()), line(records_of(target(0, tokens(3, 4)))))
    np.testing.assert_array_equal(asked.logprobs, np.float32([-0.5, -2.0, np.nan]))
    assert asked.ranks.tolist() == [4, 5, 0]
    assert tops(asked, strings)[1:] == [[(r"bytes:\x98", -0.25), ("b", -2.0)], []]
    assert (plain.logprobs == NO_LOGPROB).all()
    assert words(plain, strings) == [" a", "b"]  # from the extension
    assert plain.ids.tolist() == [3, 4]
    assert plain.ranks.tolist() == [UNKNOWN] * 2
    (empty,), _ = shown_in(json.dumps(completion(request(logprobs=1), [], TABLE, **MADE)))
    assert len(empty.tokens) == len(empty.logprobs) == len(empty.ids) == 0


def test_a_response_of_another_server_is_shown():
    choices = [{"message": {"content": text}, "logprobs": None, "finish_reason": reason}
               for text, reason in (("hello", "stop"), ("bye", None))]  # fmt: skip
    (first, second), strings = shown_in(json.dumps({"id": "x", "choices": choices}))
    assert words(first, strings) == ["hello"]
    assert (first.logprobs == NO_LOGPROB).all()
    assert (names(first), len(first.steps)) == ([None], 0)
    assert (first.id, second.id) == ("x #0", "x #1")


PROMPT_ROWS = PromptRows(
    1, np.int32([3, 4]), np.float32([[-0.5, -0.25], [-3.0, -0.125]]), np.empty((2, 0), np.float32),
    np.int32([2, 2]), np.int32([[4], [3]]),
)  # fmt: skip


@pytest.mark.parametrize("build", [completion, chat_completion])
def test_a_prompts_tokens_with_logprobs_come_first(build):
    records = two_steps()
    asked = dataclasses.replace(records[0].request, prompt_token_ids=(4, 3, 4))
    response = build(asked, records, TABLE, prompt=PROMPT_ROWS, **MADE)
    (shown,), strings = shown_in(json.dumps(response))
    assert shown.num_prompt == 3
    assert words(shown, strings)[:4] == ["b", " a", "b", " a"]
    assert shown.logprobs[:4].tolist() == pytest.approx([np.nan, -0.5, -3.0, -0.5], nan_ok=True)
    assert shown.ids[:4].tolist() == [4, 3, 4, 3]
    assert shown.ranks.tolist() == [UNKNOWN] * 3 + [4, 5, 0]
    assert names(shown)[:4] == ["prompt"] * 3 + ["accepted"]
    assert tops(shown, strings)[:3] == [[], [("b", -0.25)], [(" a", -0.125)]]
    assert shown.prompt == ""  # its tokens are shown instead
    assert shown.steps[:, 1].sum() == 3


def test_what_stands_before_the_rows_of_a_prompt_is_one_token():
    records = two_steps()
    asked = dataclasses.replace(records[0].request, prompt_token_ids=(4, 3, 4, 3, 4))
    rows = dataclasses.replace(PROMPT_ROWS, start=3)
    response = completion(asked, records, TABLE, prompt=rows, **MADE)
    (shown,), strings = shown_in(json.dumps(response))
    assert shown.num_prompt == 3
    assert words(shown, strings)[:3] == ["b ab", " a", "b"]
    assert shown.logprobs[:3].tolist() == pytest.approx([np.nan, -0.5, -3.0], nan_ok=True)
    assert shown.ids[:3].tolist() == [UNKNOWN, 3, 4]


@pytest.mark.parametrize("where", ["choice", "response"])
def test_the_logprobs_of_a_prompt_in_the_manner_of_vllm(where):
    entry = {"7": {"logprob": -3.0, "rank": 9, "decoded_token": "x"},
             "5": {"logprob": -0.5, "rank": 1, "decoded_token": "y"}}  # fmt: skip
    choice = {"text": "hello", "logprobs": None, "finish_reason": "stop"}
    response = {"id": "v", "choices": [choice]}
    (choice if where == "choice" else response)["prompt_logprobs"] = [None, entry]
    (shown,), strings = shown_in(json.dumps(response))
    assert words(shown, strings) == ["", "x", "hello"]
    assert shown.ids.tolist() == [UNKNOWN, 7, UNKNOWN]
    assert shown.ranks.tolist() == [UNKNOWN, 9, UNKNOWN]
    assert shown.logprobs.tolist() == pytest.approx([np.nan, -3.0, np.inf], nan_ok=True)
    assert tops(shown, strings) == [[], [("y", -0.5), ("x", -3.0)], []]


@pytest.mark.parametrize(("used", "num_prompt"), [((2, 1), 2), ((9, 1), 0), (None, 0)])
def test_an_echoed_prompt_is_told_from_what_was_emitted(used, num_prompt):
    logprobs = {"tokens": ["a", "b", "c"], "token_logprobs": [None, -1.0, -2.0]}
    response = {"id": "e", "choices": [{"text": "abc", "logprobs": logprobs}]}
    if used:
        response["usage"] = dict(zip(("prompt_tokens", "completion_tokens"), used, strict=True))
    (shown,), _ = shown_in(json.dumps(response))
    assert shown.num_prompt == num_prompt
    assert names(shown) == ["prompt"] * num_prompt + [None] * (3 - num_prompt)


def test_nothing_that_a_token_says_becomes_markup():
    document = html_page.page(html_page.read([json.dumps(hostile_response())]), title=HOSTILE[0])
    harmless = html_page.page(html_page.read([line(two_steps())]), title="x")
    assert elements(document) == elements(harmless)
    drawn, _ = blocks(document)  # which have no "<", where alone a browser ends a script
    assert drawn["requests"][0]["prompt"] == HOSTILE[0]  # and nothing of it is lost
    assert {*HOSTILE} <= {*drawn["strings"]}
    # The check can fail: written as it is, the same data would add elements.
    naive = harmless.replace("<noscript>", f"<noscript>{HOSTILE[0]}", 1)
    assert elements(naive) != elements(harmless)


def test_columns_arrive_as_they_are():
    view = html_page.View()
    view.add([line(two_steps()), line(snowman())], "old")
    view.add([line(two_steps())], "new")
    assert (view.num_responses, view.num_tokens) == (3, 12)
    drawn, details = blocks(html_page.page(view, title="x"))
    assert drawn["files"] == [{"name": "old", "count": 2}, {"name": "new", "count": 1}]
    assert drawn["row_start"].tolist() == [0, 3, 9, 12]
    assert drawn["step_start"].tolist() == [0, 2, 5, 7]
    assert drawn["token"][:3].tolist() == drawn["token"][9:].tolist()  # one list of strings
    strings, shown = drawn["strings"], [one for file in view.files for one in file]
    assert strings == [*view.strings]
    for name in ("token", "logprob", "rank", "kind"):
        column = np.concatenate([getattr(one, name + "s") for one in shown])
        np.testing.assert_array_equal(drawn[name], column)
    assert drawn["step_tokens"].tolist() == [2, 1, 2, 1, 3, 2, 1]
    assert details["id"].tolist() == [3, 4, 0, 3, 0, 1, 2, 3, 5, 3, 4, 0]
    # snowman() asked for K = 0: each token's own logprob alone.
    assert details["top_start"].tolist() == [0, 2, 4, 4, 5, 6, 7, 8, 9, 10, 12, 14, 14]
    tops = [strings[n] for n in details["top_token"][:4]]
    assert tops == [" a", r"bytes:\xe2", r"bytes:\x98", "b"]
    assert details["top_logprob"][:4].tolist() == [-0.5, -1.5, -0.25, -2.0]
    assert details["draft_start"].tolist() == [0] * 8


def test_the_policy_allows_own_script_and_style_alone():
    document = html_page.page(html_page.read([line(two_steps())]), title="x")
    style, _, script, _ = re.findall(r"<(?:style|script).*?>(.*?)</", document, re.DOTALL)
    (policy,) = map(html.unescape, re.findall(r'"(default-src[^"]*)"', document))
    assert policy.startswith("default-src 'none'; ")
    for name, text in (("script", script), ("style", style)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy
    assert {"link", "img", "iframe", "base", "a", "form"}.isdisjoint(elements(document))
    assert not re.search(r"\s(src|href|onclick|onload)=", document)
    for forbidden in ("http:", "https:", "url(", "@import", "innerHTML", "eval(", "fetch("):
        assert forbidden not in document


def read(text):
    return response_files.read_responses(text.splitlines(keepends=True), Strings())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: r["choices"][0].pop("text"), "'text' is missing"),
        (lambda r: r["speculation"]["token_kinds"].append("x"), "token_kinds has length 4 for 3"),
        (lambda r: r["speculation"].update(token_kinds=["x"] * 3), "token_kinds has 'x'; known"),
        (lambda r: r["speculation"].update(temperature=math.nan), "temperature = nan must be"),
        (lambda r: r["speculation"]["by_step"].pop(), "by_step does not add up to 3 tokens"),
        *[(lambda r, name=name: r["choices"][0]["logprobs"][name].pop(), f"{name} has length 2")
          for name in ("token_logprobs", "top_logprobs")],
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


@pytest.mark.parametrize(("text", "said"), [
    ("[1]", "element 1 of the array is not a completion"),
    ("[", "line 1 is not JSON: Expecting value (column 2)"),
    ("\n[\n1,\n!]", "line 4 is not JSON"), ("[]", "there is no response in it"),
    *[(text, "line 1 is no") for text in ("{", "3", "null", '"choices"')],
    *[("\n" + text, "line 2 is not read: ") for text in ("[" * 9999, '{"":' * 9999, "9" * 5000)],
    ("\n", "there is no response in it"),
    (json.dumps(BOTH[0]) + "\n" + json.dumps(BOTH[0])[:-5], "line 2 is not JSON"),
    ('{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}',
     "it is a batch's input: the output that the batch gave"),
])  # fmt: skip
def test_what_is_wrong_in_an_array_or_between_lines_is_named(text, said):
    with pytest.raises(ViewError, match=re.escape(said)):
        read(text)


def batch_line(name, body=None, status=200, error=None):
    answer = None if body is None else {"status_code": status, "request_id": "q", "body": body}
    return json.dumps({"id": "batch_req_1", "custom_id": name, "response": answer, "error": error})


def test_the_output_of_a_batch_is_read():
    """https://platform.openai.com/docs/guides/batch has this form."""
    refused = {"error": {"message": "no such model", "code": "x"}}
    for text, count, reason in (
        (batch_line("a", BOTH[0]), 3, None),
        (batch_line("a", error={"code": "expired", "message": "too late"}), 0, "error: too late"),
        (batch_line("a", refused, status=404), 0, "error: no such model"),
        (batch_line("a", {}, status=500), 0, "error: status 500"),
    ):
        (one,) = read(text)
        assert (one.id, len(one.tokens), one.finish_reason) == ("a", count, reason)
