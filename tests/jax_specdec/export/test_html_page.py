"""The page of a file of responses: what it reads and refuses, and that data stays data."""

import base64
import hashlib
import json
import os
import re
from html.parser import HTMLParser

import pytest

from jax_specdec.cli.main import main
from jax_specdec.export import html_page
from jax_specdec.export.openai import chat_completion, completion
from tests.jax_specdec.export.test_openai import MADE, TABLE, records_of, snowman, two_steps
from tests.support.processor_messages import request, target, tokens

pytestmark = pytest.mark.fast

HOSTILE = [
    "</script><script>alert(1)</script>", "<!--<script>", "]]>", "<img src=x onerror=alert(1)>",
    "{{script}}", "</script x", "&lt;b&gt;", "\u2028\u2029",
    '"\'`', "\x00\x1b[31m", "</style>", "\ud800",
]  # fmt: skip


def line(records, build=completion):
    return json.dumps(build(records[0].request, records, TABLE, **MADE))


def hostile_response():
    return {
        "id": HOSTILE[0],
        "choices": [
            {
                "text": "".join(HOSTILE),
                "finish_reason": HOSTILE[3],
                "logprobs": {
                    "tokens": HOSTILE,
                    "token_logprobs": [-0.5] * len(HOSTILE),
                    "top_logprobs": [dict.fromkeys(HOSTILE, -1.0)] * len(HOSTILE),
                    "text_offset": [0] * len(HOSTILE),
                },
            }
        ],
        "model": HOSTILE[0],
        "speculation": {"prompt": HOSTILE[0], "logprobs_mode": HOSTILE[0]},
    }


class Elements(HTMLParser):
    """Every element of a document, and the content of its scripts and styles."""

    def __init__(self, document):
        super().__init__()
        self.names, self.attributes, self.inside = [], [], []
        self._open = None
        self.feed(document)

    def handle_starttag(self, tag, attributes):
        self.names.append(tag)
        self.attributes += attributes
        self._open = tag
        if tag in ("script", "style"):
            self.inside.append("")

    def handle_data(self, data):
        if self._open in ("script", "style"):
            self.inside[-1] += data

    def handle_endtag(self, tag):
        self._open = None


@pytest.mark.parametrize("build", [completion, chat_completion])
def test_both_formats_are_read(build):
    (shown,) = html_page.read([line(snowman(), build), "\n"])
    prefix = "bytes:" if build is completion else ""
    assert shown.tokens == [
        " a",
        *(rf"{prefix}\x{byte}" for byte in ("e2", "98", "83")),
        " a",
        "</s>",
    ]
    assert shown.logprobs == pytest.approx([-0.5, -0.125, -0.25, -0.375, -0.5, -0.75])
    assert shown.kinds == ["accepted", "bonus", "plain", "accepted", "accepted", "bonus"]
    assert [step.num_tokens for step in shown.steps] == [2, 1, 3]
    assert [step.num_drafts for step in shown.steps] == [1, 0, 2]
    assert (shown.id, shown.finish_reason, shown.mode) == ("r", "stop", "raw")


def test_invalid_rows_minus_infinity_and_no_logprobs():
    shown = html_page.read([line(two_steps()), line(records_of(target(0, tokens(3, 4))))])
    assert shown[0].logprobs == [-0.5, -2.0, None]
    assert shown[0].ranks == [4, 5, 0]
    assert shown[0].top[1] == [(r"bytes:\x98", -0.25), ("b", -2.0)]
    assert shown[1].logprobs is None
    assert shown[1].tokens == [" a", "b"]  # from the extension
    assert shown[1].ids == [3, 4]
    (empty,) = html_page.read([json.dumps(completion(request(logprobs=1), [], TABLE, **MADE))])
    assert (empty.tokens, empty.logprobs, empty.ids) == ([], None, [])


def test_a_response_of_another_server_is_shown_without_what_it_lacks():
    response = {
        "id": "x",
        "choices": [
            {"message": {"content": "hello"}, "logprobs": None, "finish_reason": "stop"},
            {"message": {"content": "bye"}, "logprobs": None, "finish_reason": None},
        ],
    }
    first, second = html_page.read([json.dumps(response)])
    assert (first.tokens, first.logprobs, first.kinds, first.steps) == (["hello"], None, None, [])
    assert (first.id, second.id) == ("x #0", "x #1")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: r.pop("choices"), "'choices' is missing"),
        (lambda r: r["choices"][0].pop("text"), "'text' is missing"),
        (lambda r: r["speculation"]["token_ranks"].pop(), "token_ranks has length 2 for 3 tokens"),
        (lambda r: r["speculation"]["token_kinds"].append("x"), "token_kinds has length 4 for 3"),
        (lambda r: r["speculation"].update(token_kinds=["x"] * 3), "token_kinds has 'x'; known"),
        (lambda r: r["speculation"]["by_step"].pop(), "by_step does not add up to 3 tokens"),
        (
            lambda r: r["choices"][0]["logprobs"]["token_logprobs"].pop(),
            "token_logprobs has length 2",
        ),
        (lambda r: r["choices"][0]["logprobs"]["top_logprobs"].pop(), "top_logprobs has length 2"),
        (lambda r: r["choices"][0]["logprobs"].update(token_logprobs=["x"] * 3), "'x'"),
    ],
)
def test_a_line_that_is_not_a_response_is_refused_by_its_number(change, said):
    response = json.loads(line(two_steps()))
    if said.startswith("'text'"):
        response["choices"][0]["logprobs"] = None
    change(response)
    with pytest.raises(html_page.ViewError, match=re.escape(said)) as caught:
        html_page.read(["", json.dumps(response)])
    assert str(caught.value).startswith("line 2 ")


@pytest.mark.parametrize("text", ["{", "3", "null", "[1]", '"choices"'])
def test_a_line_that_is_not_a_json_object_is_refused(text):
    with pytest.raises(html_page.ViewError, match="line 1 is no"):
        html_page.read([text])


def test_an_empty_file_is_refused():
    with pytest.raises(html_page.ViewError, match="there is no response in it"):
        html_page.read(["\n", ""])


def test_nothing_that_a_token_says_becomes_markup():
    document = html_page.page(html_page.read([json.dumps(hostile_response())]), title=HOSTILE[0])
    harmless = html_page.page(html_page.read([line(two_steps())]), title="x")
    assert Elements(document).names == Elements(harmless).names
    # A browser ends a script in more places than Python's parser, but only at a "<".
    rest = document.partition('type="application/json">')[2]
    data = json.loads(rest.partition("<")[0])
    assert data["requests"][0]["prompt"] == HOSTILE[0]  # and nothing of it is lost
    assert {*HOSTILE} <= {*data["strings"]}
    # The check can fail: unescaped, the same data would add elements.
    naive = harmless.replace('"strings":[', f'"strings":["{HOSTILE[0]}",', 1)
    assert Elements(naive).names != Elements(harmless).names


def test_the_policy_allows_this_script_and_this_style_alone():
    found = Elements(html_page.page(html_page.read([line(two_steps())]), title="x"))
    style, data, script = found.inside
    assert json.loads(data)["requests"]
    (policy,) = [value for _, value in found.attributes if value and "default-src" in value]
    assert policy.startswith("default-src 'none'; ")
    for name, text in (("script", script), ("style", style)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy


def test_the_page_refers_to_nothing_outside():
    document = html_page.page(html_page.read([line(snowman())]), title="x")
    found = Elements(document)
    assert {"link", "img", "iframe", "base", "a", "form"} & {*found.names} == set()
    assert {name for name, _ in found.attributes} & {"src", "href", "onclick", "onload"} == set()
    for forbidden in ("http:", "https:", "url(", "@import", "innerHTML", "eval(", "fetch("):
        assert forbidden not in document


def test_the_command_writes_the_page_beside_the_file(tmp_path, capsys):
    source = tmp_path / "run.jsonl"
    source.write_text(line(snowman()) + "\n" + line(two_steps()) + "\n", encoding="utf-8")
    assert main(["view", str(source)]) == 0
    page = tmp_path / "run.html"
    assert capsys.readouterr().out == f"wrote 2 responses, 9 tokens to {page}\n"
    assert "<title>run.jsonl</title>" in page.read_text(encoding="utf-8")
    other = tmp_path / "other.html"
    assert main(["view", str(source), "--output", str(other), "--title", "A & B"]) == 0
    assert "<title>A &amp; B</title>" in other.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("run.html", b"{}", "the page would replace"),
        ("run.jsonl", b"{}", "run.jsonl: line 1 is not a completion"),
        ("run.jsonl", b"\xff\xfe", "'utf-8' codec can't decode"),
    ],
)
def test_the_command_refuses_in_one_line(tmp_path, capsys, name, content, said):
    source = tmp_path / name
    source.write_bytes(content)
    assert main(["view", str(source)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert source.read_bytes() == content
    assert len([*tmp_path.iterdir()]) == 1


def test_a_file_that_is_not_there(tmp_path, capsys):
    assert main(["view", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl" in capsys.readouterr().err


def test_a_file_name_that_is_not_text(tmp_path):
    source = tmp_path / os.fsdecode(b"run\xff.jsonl")
    source.write_text(line(snowman()), encoding="utf-8")
    assert main(["view", str(source)]) == 0
    assert "<title>run\\udcff.jsonl</title>" in source.with_suffix(".html").read_text("utf-8")


def test_a_page_that_does_not_fit_the_disk_is_named(tmp_path, capsys):
    (tmp_path / "run.jsonl").write_text(line(snowman()), encoding="utf-8")
    assert main(["view", str(tmp_path / "run.jsonl"), "--output", "/dev/full"]) == 2
    assert "No space left on device: '/dev/full'" in capsys.readouterr().err
