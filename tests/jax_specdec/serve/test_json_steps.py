"""JSON in steps: the same values and the same text as the standard library's, made elsewhere."""

import asyncio
import json
import threading

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_specdec.serve import json_steps
from jax_specdec.serve.bounds import Bounds
from jax_specdec.serve.errors import ApiError, shown
from jax_specdec.serve.json_steps import PART, SMALL, Writer, parsed, pieces
from tests.support.http_server import MAX_LENGTH, serving

pytestmark = pytest.mark.fast

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3).filter(
        lambda name: name.isascii()), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip
PADDING = b" " * (SMALL + 1)  # which makes a body large


@given(VALUES)
@settings(max_examples=50)
def test_what_is_read_is_what_the_standard_library_reads(value):
    body = json.dumps(value).encode()
    assert parsed(body, 0) == value
    assert json_steps._InSteps(10_000).decode(body.decode()) == value


@given(VALUES)
@settings(max_examples=200)
def test_what_is_written_is_what_the_standard_library_writes(value):
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    for depth in (0, 1, 6):
        assert "".join(pieces(value, depth)) == text


def test_iterators_are_lists_and_functions_have_their_turn_when_they_are_written():
    made = []
    value = {"list": (made.append(n) or [n] for n in range(2)), "made": lambda: list(made)}
    assert "".join(pieces(value)) == '{"list":[[0],[1]],"made":[0,1]}'


@pytest.mark.parametrize("padding", [b"", PADDING])
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "the body is not JSON"),
        (b'{"a": 1, "b": 2, "a": 3}', 'an object has "a" twice'),
        (b'[{"a": {"x": 1, "x": 1}}]', 'an object has "x" twice'),
        (b'{"\\ud800": 1, "\\ud800": 1}', "twice"),
        (b"[" * 100_000, "the body is not JSON"),
        (b'{"a": 1 "b"}', "the body is not JSON"),
        (b"\xff\xff", "the body is not JSON"),
    ],
)
def test_what_is_wrong_is_named_in_small_and_in_large_bodies(body, padding, said):
    with pytest.raises(ApiError, match=said) as found:
        parsed(body + padding, 10_000)
    json.dumps(found.value.body, ensure_ascii=False).encode()


def test_values_are_counted_before_they_are_made(monkeypatch):
    made = []
    monkeypatch.setattr(json_steps, "_unique", lambda pairs: made.append(dict(pairs)) or made[-1])
    body = b'{"prompt": [' + b"{}," * SMALL + b"1]}"
    with pytest.raises(ApiError, match="holds more than 100 values") as found:
        parsed(body, 100)
    assert found.value.status == 413
    assert len(made) < 100
    assert parsed(b"[" + b"1," * SMALL + b"1]", SMALL + 1) == [1] * (SMALL + 1)


def test_the_beginning_of_a_value_is_shown_and_the_rest_is_not_written():
    class Counted(list):
        def __iter__(self):
            for item in super().__iter__():
                read.append(item)
                yield item

    read = []
    assert shown([1, 2]) == "[1, 2]"
    assert shown("x" * 10**6) == '"' + "x" * 79 + "..."
    assert shown(Counted(range(10**6))).startswith("[0, 1, 2")
    assert len(read) < 100


def test_parts_are_made_in_another_thread_one_at_a_time():
    made = []

    def texts():
        for _ in range(10):
            made.append(threading.current_thread())
            yield "x" * (PART // 2)

    async def main():
        found = []
        async for part in Writer().parts(texts()):
            found.append(part)
            assert len(made) <= 2 * len(found)  # no more than what was asked for
        return found

    found = asyncio.run(main())
    assert [len(part) for part in found] == [PART] * 5 + [0]
    assert threading.main_thread() not in made


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_large_answers_are_made_in_parts_outside_the_event_loop(monkeypatch, path, stream):
    made, part = [], json_steps._part

    def seen(texts):
        made.append((threading.current_thread().name, found := part(texts)))
        return found

    monkeypatch.setattr(json_steps, "_part", seen)
    asked = {"max_tokens": 1, "prompt_logprobs": 20, "n": 8, "stream": stream, "seed": 1}
    asked |= (
        {"prompt": "a" * 60}
        if path == "completions"
        else {"messages": [{"role": "user", "content": "a" * 60}]}
    )
    with serving() as server:
        answer = httpx.post(f"{server.url}/v1/{path}", json=asked, timeout=60)
        loop = server.thread.name
    written = b"".join(part for _, part in made)
    assert {name for name, _ in made}.isdisjoint({loop, threading.current_thread().name})
    assert max(len(part) for _, part in made) < 2 * PART
    if not stream:
        assert written == answer.content
        assert len(written) > 60 * 100
        return
    events = [line for line in answer.content.split(b"\n\n") if b"prompt_logprobs" in line]
    assert written == b"".join(event + b"\n\n" for event in events)
    assert len(events) == 8


def test_large_bodies_are_read_outside_the_event_loop_one_after_the_other(monkeypatch):
    made, read = [], json_steps._InSteps.decode
    running = threading.Semaphore(1)

    def seen(self, text):
        assert running.acquire(blocking=False), "two are read at once"
        try:
            made.append(threading.current_thread().name)
            return read(self, text)
        finally:
            running.release()

    monkeypatch.setattr(json_steps._InSteps, "decode", seen)
    body = {"prompt": "abc", "max_tokens": 1, "user": "x" * (2 * SMALL)}
    with serving(bounds=Bounds(max_body=1 << 20)) as server:

        def ask():
            answers.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=60))

        answers = []
        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        loop = server.thread.name
    assert [answer.status_code for answer in answers] == [200] * 8
    assert len(made) == 8
    assert loop not in made


def test_a_body_of_too_many_values_is_refused():
    with serving(bounds=Bounds(max_body=1 << 20)) as server:
        count = 128 * MAX_LENGTH + (1 << 14) + 1
        answer = httpx.post(
            f"{server.url}/v1/completions", json={"prompt": [1000] * count}, timeout=60
        )
        assert answer.status_code == 413
        assert "send several requests" in answer.json()["error"]["message"]
