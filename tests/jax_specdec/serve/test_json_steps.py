"""JSON in steps: the same values and the same text as the standard library's, made elsewhere."""

import asyncio
import dataclasses
import json
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_specdec.serve import json_steps
from jax_specdec.serve.bounds import Bounds
from jax_specdec.serve.errors import ApiError, shown
from jax_specdec.serve.json_steps import PART, SMALL, Writer, parsed, pieces
from tests.support.http_server import MAX_LENGTH, MODEL, Encoder, serving

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3).filter(
        lambda name: name.isascii()), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip
PADDING = b" " * (SMALL + 1)  # which makes a body large


@given(VALUES)
@settings(max_examples=100)
def test_what_is_read_and_written_is_what_the_standard_library_does(value):
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    assert parsed(text.encode(), 0) == value
    assert json_steps._InSteps(10_000).decode(text) == value
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


def test_values_are_counted_before_they_are_made():
    """Else the end of the body, which is no JSON, would be seen first."""
    with pytest.raises(ApiError, match="holds more than 100 values") as found:
        parsed(b'{"prompt": [' + b"{}," * SMALL + b"!", 100)
    assert found.value.status == 413
    ones = b"[" + b"1," * SMALL + b"1]"
    assert parsed(ones, SMALL + 1) == [1] * (SMALL + 1)
    with pytest.raises(ApiError, match="values"):
        parsed(ones, SMALL)


def test_the_beginning_of_a_value_is_shown_and_the_rest_is_not_written():
    class Counted(list):
        def __iter__(self):
            for item in super().__iter__():
                read.append(item)
                yield item

    read = []
    assert shown([1, 2]) == "[1, 2]"
    assert shown("x" * 78) == '"' + "x" * 78 + '"'
    assert shown("x" * 79) == shown("x" * 10**6) == '"' + "x" * 79 + "..."
    assert shown(Counted(range(10**6))).startswith("[0, 1, 2")
    assert len(read) < 100


class SeenWriter(Writer):
    """Keeps the parts that it makes, and the threads in which it does."""

    def __init__(self):
        super().__init__()
        self.made, self.threads = [], set()

    async def parts(self, texts):
        def seen():
            for text in texts:
                self.threads.add(threading.current_thread().name)
                yield text

        async for part in super().parts(seen()):
            self.made.append(part)
            yield part


def test_parts_are_made_one_at_a_time_each_when_it_is_asked_for():
    taken = []

    async def main():
        parts, found = Writer().parts(taken.append(n) or "x" * (PART // 2) for n in range(10)), []
        async for part in parts:
            found.append(len(part))
            assert len(taken) <= 2 * len(found)
        return found

    assert asyncio.run(main()) == [PART] * 5 + [0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_large_answers_are_made_in_parts_outside_the_event_loop(path, stream):
    asked = {"max_tokens": 1, "prompt_logprobs": 20, "n": 8, "stream": stream, "seed": 1}
    message = {"role": "user", "content": "a" * 60}
    asked |= {"prompt": "a" * 60} if path == "completions" else {"messages": [message]}
    with serving() as server:
        server.service._writer = writer = SeenWriter()
        answer = server.ask(path, **asked)
        assert writer.threads
        assert writer.threads.isdisjoint({server.thread.name, threading.current_thread().name})
    written = b"".join(writer.made)
    assert max(map(len, writer.made)) < 2 * PART
    if stream:
        events = [line for line in answer.content.split(b"\n\n") if b"prompt_logprobs" in line]
        assert written == b"".join(event + b"\n\n" for event in events)
        assert len(events) == 8
    else:
        assert written == answer.content
        assert len(written) > 60 * 100


class SeenEncoder(Encoder):
    """Notes the threads in which bodies are read, and refuses two at once."""

    def __init__(self):
        self.threads, self.running = [], threading.Semaphore(1)

    def encode(self, text):
        assert self.running.acquire(blocking=False), "two are read at once"
        self.threads.append(threading.current_thread().name)
        threading.Event().wait(0.01)  # others would come meanwhile
        self.running.release()
        return super().encode(text)


def test_large_bodies_are_read_outside_the_event_loop_one_after_the_other():
    seen = dataclasses.replace(MODEL, encoder=SeenEncoder())
    with serving(bounds=Bounds(max_body=1 << 20), model=seen) as server:
        body = {"prompt": "abc", "max_tokens": 1, "user": "x" * (2 * SMALL)}
        answers = [server.ask_later(**body) for _ in range(8)]
        assert [one.result(60).status_code for one in answers] == [200] * 8
        assert len(seen.encoder.threads) == 8
        assert server.thread.name not in seen.encoder.threads
        answer = server.ask(prompt=[1000] * (128 * MAX_LENGTH + (1 << 14) + 1))
        assert answer.status_code == 413
        assert "send several requests" in answer.json()["error"]["message"]
