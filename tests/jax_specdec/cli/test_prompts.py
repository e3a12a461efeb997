"""Files of prompts, and the output file that an interrupted run continues."""

import dataclasses
import io
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from ipc.wire import LogprobsMode
from jax_specdec.cli.prompts import Prompt, read_prompts, sampling_params
from jax_specdec.cli.resumable import JsonlOutput, OutputError, append_bytes
from jax_specdec.requests import Request, RequestError, SamplingParams
from tests.support.http_server import Encoder

encode = Encoder().encode


def read(path, text, **defaults):
    path.write_bytes(text.encode())
    return read_prompts(path, Encoder(), SamplingParams(**defaults))


# Prompts ---------------------------------------------------------------------------------------


def test_a_line_is_a_prompt(tmp_path):
    text = "\ufeffone\n\n  two\\nlines \\t\\\\n \\x\r\nthree\u2028four\n"
    prompts = read(tmp_path / "p.txt", text, seed=5, top_k=3)
    assert prompts == [
        Prompt(Request(id=id, prompt_token_ids=encode(line),
                       params=SamplingParams(seed=seed, top_k=3)), chat=False)
        for id, line, seed in (
            ("1", "one", 6), ("3", "  two\nlines \t\\n \\x", 8), ("4", "three\u2028four", 9))
    ]  # fmt: skip


def test_a_line_of_jsonl_has_parameters_of_its_own(tmp_path):
    lines = [
        {"prompt": "a\\n", "max_tokens": 3, "temperature": 1, "top_p": 0.5, "seed": 7},
        {"id": "x", "messages": [{"role": "user", "content": "hi"}], "logprobs": True,
         "top_logprobs": 4},
        {"id": 12, "prompt_token_ids": [1, 2], "logprobs": 2, "logprobs_mode": "processed",
         "stop_token_ids": [], "extra_token_ids": [3], "stop_sequences": [[4, 5]],
         "draft_logprobs": True, "kept_token_ids": True},
        {"prompt": "b", "logprobs": False},
        {"prompt": "c", "logprobs": None},
    ]  # fmt: skip
    text = "\n".join(map(json.dumps, lines))
    found = read(tmp_path / "p.jsonl", text, logprobs=9, stop_token_ids=(2,), max_tokens=50)
    others = {"max_tokens": 50, "stop_token_ids": (2,)}
    expected = [
        ("1", encode("a\\n"), False, others | {
            "max_tokens": 3, "temperature": 1.0, "top_p": 0.5, "seed": 7, "logprobs": 9}),
        ("x", encode("hi"), True, others | {"logprobs": 4, "seed": 2}),
        ("12", (1, 2), False, others | {
            "stop_token_ids": (), "logprobs": 2, "logprobs_mode": LogprobsMode.PROCESSED,
            "extra_token_ids": (3,), "stop_sequences": ((4, 5),), "draft_logprobs": True,
            "seed": 3, "kept_token_ids": True}),
        ("4", encode("b"), False, others | {"seed": 4}),
        ("5", encode("c"), False, others | {"seed": 5}),
    ]  # fmt: skip
    assert found == [
        Prompt(Request(id=id, prompt_token_ids=ids, params=SamplingParams(**params)), chat)
        for id, ids, chat, params in expected
    ]
    assert type(found[0].request.params.temperature) is float


@pytest.mark.parametrize(("line", "message"), [
    ("{", "line 1: Expecting property name"), ("[1]", "line 1: a list, not an object such as"),
    ("{}", "line 1: a line has one of prompt, messages, prompt_token_ids; this one has none"),
    ('{"prompt": "a", "messages": []}', r"this one has \['prompt', 'messages'\]"),
    ('{"prompt": 3}', "prompt = 3 must be of type str"),
    ('{"prompt": ""}', "request '1' has an empty prompt"),
    ('{"messages": []}', "messages must be a list of objects with a role"),
    ('{"messages": [{"role": "system"}]}', "line 1: the chat template refuses these messages"),
    ('{"prompt": "a", "id": null}', "id = None must be a string or an integer"),
    ('{"prompt": "a", "stop": ["x", ""]}', r"stop = \['x', ''\] must be a string or strings,"),
    ('{"prompt": "a", "zzz": 1}', "'zzz' is not known; known are id, prompt, .*seed"),
    ('{"prompt": "a", "max_token": 1}', r"is not known; did you mean max_tokens\? Known are"),
    ('{"id": 1, "logprobs": true, "top_logprobs": 2}', "this one has none"),
    ('{"prompt": "a", "max_completion_tokens": 1}', "write max_tokens"),
    ('{"prompt": "a", "top_logprobs": 1}', 'write "logprobs": true beside it'),
    ('{"prompt": "a", "temperature": "hot"}', "temperature = 'hot' must be a Python number"),
    ('{"prompt": "a", "logprobs_mode": "cooked"}', "must be one of raw, scaled, processed"),
    ('{"prompt": "a", "logprobs_mode": []}', "must be one of raw, scaled, processed"),
    ('{"prompt": "a", "stop": 1}', "stop = 1 must be a string or strings"),
    ('{"prompt": "a", "temperature": 1%s}' % ("0" * 400), "temperature = inf must be 0"),
    ('{"prompt": "a", "draft_logprobs": 1}', "draft_logprobs = 1 must be True or False"),
    (r'{"prompt": "a\ud83d"}', r"line 1: \\ud83d is half of a surrogate pair"),
    ('{"prompt": "a"}\n{"prompt": "b", "id": 1}', "line 2: line 1 has the id .1. too"),
    ("\n\n", "holds no prompts"),
])  # fmt: skip
def test_lines_that_are_not_prompts_are_named(line, message, tmp_path):
    with pytest.raises(RequestError, match=message) as caught:
        read(tmp_path / "p.jsonl", line)
    assert str(tmp_path / "p.jsonl") in str(caught.value)


def test_a_digest_tells_requests_apart(tmp_path):
    def digest(text="a", *settings, **defaults):
        return read(tmp_path / "p.txt", text, **defaults)[0].digest(*settings)

    assert digest() == digest()
    others = [digest("b"), digest("a", "model"), digest(seed=1), digest(logprobs=0), digest()]
    assert len(set(others)) == 5


def test_every_parameter_can_be_given():
    defaults = SamplingParams(logprobs=1)
    fields = dataclasses.asdict(defaults) | {"logprobs_mode": "raw", "logit_bias": {}}
    for name, value in json.loads(json.dumps(fields)).items():
        assert sampling_params({name: value}, defaults) == defaults


def test_a_logit_bias_has_openais_form():
    defaults = SamplingParams()
    given = sampling_params({"logit_bias": {"3": 1.5, "0": -2}}, defaults)
    assert given.logit_bias == ((3, 1.5), (0, -2.0))
    for wrong in ("-1", "03", "a", "1.0", "٣", "9" * 5000):
        with pytest.raises(RequestError, match=r"logit_bias names '.*', which is no token id"):
            sampling_params({"logit_bias": {wrong: 1}}, defaults)
    with pytest.raises(RequestError, match="logit_bias of token 3 = 101 must be from -100"):
        sampling_params({"logit_bias": {"3": 101}}, defaults)


# Output ----------------------------------------------------------------------------------------


def write(path, *ids):
    with JsonlOutput(path) as output:
        for id in ids:
            output.write(id, f"digest {id}", {"id": id, "text": "é\n" * 3})
        return output.done, output.cut


@pytest.mark.parametrize("keep", [1, 5, 8, 20, -1])
def test_a_half_written_line_is_cut_off(keep, tmp_path):
    path = tmp_path / "out.jsonl"
    assert write(path, "a", "b") == ({"a": "digest a", "b": "digest b"}, 0)
    whole = path.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    path.write_bytes(whole + last[:keep])
    assert write(path, "c") == ({id: f"digest {id}" for id in "abc"}, len(last[:keep]))
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["id"] for record in records] == ["a", "b", "c"]
    assert records[0]["text"] == "é\n" * 3


@pytest.mark.parametrize("content", ["my notes", '{"id": 3}\n', "\n", '{"prompt": 1'])
def test_a_file_of_something_else_is_left_alone(content, tmp_path):
    path = tmp_path / "notes"
    path.write_text(content)
    with pytest.raises(OutputError, match="line 1, is not of this command"):
        JsonlOutput(path)
    assert path.read_text() == content


def test_a_first_record_that_was_cut_off_a_lock_and_a_directory(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text('{"id": "a"')
    with JsonlOutput(path), pytest.raises(OutputError, match=r"another process writes .*out.jsonl"):
        JsonlOutput(path)
    JsonlOutput(path).close()
    assert path.read_text() == ""
    with pytest.raises(IsADirectoryError):
        JsonlOutput(tmp_path)


def test_a_pipe_is_only_written():
    out, into = os.pipe()
    with JsonlOutput(Path(f"/dev/fd/{into}")) as output:
        output.write("a", "d", {"x": 1})
    os.close(into)
    with os.fdopen(out) as found:
        assert json.load(found) == {"id": "a", "x": 1, "request_digest": "d"}


def test_a_write_that_is_short_goes_on():
    """To a file that takes ten bytes at a time, as one on a disk that fills up."""
    taken = io.BytesIO()
    append_bytes(SimpleNamespace(write=lambda data: taken.write(data[:10])), "a file", b"x" * 25)
    assert taken.getvalue() == b"x" * 25
