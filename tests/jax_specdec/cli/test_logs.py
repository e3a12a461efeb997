"""The log on stderr: who logs never waits for who reads, and what is said of the work."""

import io
import logging
import os
import sys
import threading
from types import SimpleNamespace

import pytest

from jax_specdec.cli import logs, serve_watch
from jax_specdec.cli.logs import Lines, logged
from jax_specdec.cli.serve_watch import Work, watched
from tests.support.processes import wait_for
from tests.support.scene import long_requests
from tests.support.streaming import StreamingScene

pytestmark = pytest.mark.fast


def test_lines_have_a_time_and_a_level_and_others_say_warnings_only(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    ours, others = logging.getLogger("jax_specdec.engine"), logging.getLogger("another_package")
    monkeypatch.setattr(others, "level", logging.INFO)
    with logged("info"):
        ours.debug("too much")
        ours.info("a worker is there")
        others.info("chatter")
        others.warning("a word of warning")
    ours.warning("nobody hears it")
    said = stream.getvalue().splitlines()
    assert [line.split(maxsplit=2)[2] for line in said] == [
        "INFO a worker is there", "WARNING a word of warning",
    ]  # fmt: skip


def test_nobody_waits_for_a_reader_who_does_not_read(monkeypatch):
    """A pipe that is full: lines are dropped, and counted once somebody reads."""
    monkeypatch.setattr(logs, "MAX_LINES", 10)
    monkeypatch.setattr(logs, "END_SECONDS", 0.1)
    out, into = os.pipe()
    found = []
    # Of a test that fails the reading end is closed first: else closing the other one would wait.
    with os.fdopen(into, "w") as stream, os.fdopen(out, "rb", 0) as reader:
        handler = Lines(stream)
        record = logging.LogRecord("x", logging.INFO, "", 0, "x" * 1000, (), None)

        def emit():
            for _ in range(1000):  # far more than a pipe holds, and than may wait
                handler.emit(record)
            return handler._dropped

        wait_for(lambda: emit() > 100)  # the thread counts again with each line that it writes
        read = threading.Thread(target=lambda: _drain(reader, found))
        read.start()
        wait_for(lambda: handler._waiting.empty())
        handler.emit(record)
        wait_for(lambda: any("lines of the log were dropped" in text for text in found))
        handler.close()
        stream.close()
        read.join()


def _drain(reader, found):
    while data := reader.read(1 << 16):
        found.append(data.decode())


def test_a_reader_who_has_left_ends_nothing():
    out, into = os.pipe()
    os.close(out)
    stream = os.fdopen(into, "w")
    handler = Lines(stream)
    for _ in range(3):
        handler.emit(logging.LogRecord("x", logging.INFO, "", 0, "words", (), None))
    handler.close()
    assert not handler._thread.is_alive()
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_the_work_is_told_every_ten_seconds_in_which_there_was_some():
    scene = StreamingScene(num_slots=2)
    work = Work(scene.engine, 100.0)
    assert work.line(105.0) == ""
    for request in long_requests(3):
        scene.submit(request)
    scene.round()
    scene.round()
    first = scene.engine.sessions[0].state.statistics
    assert work.line(110.0) == (
        f"2 requests run and 1 wait; ended: 0; {first.num_tokens / 10:.1f} tokens/s"
        + (f"; acceptance {100 * first.num_accepted / first.num_drafts:.1f} %" if first.num_drafts
           else "")
    )  # fmt: skip
    assert work.line(119.0) == ""
    scene.finish()
    total = scene.engine.sessions[0].state.statistics
    line = work.line(122.0)
    assert line.startswith(
        f"0 requests run and 0 wait; ended: 3; {(60 - first.num_tokens) / 12:.1f} tokens/s; "
    )
    accepted = total.num_accepted - first.num_accepted
    assert line.endswith(f"{100 * accepted / (total.num_drafts - first.num_drafts):.1f} %")
    assert work.line(140.0) == ""  # nothing was done


def test_a_stopped_engine_ends_the_listener_and_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(serve_watch, "LOOK_SECONDS", 0.01)
    now = [0.0]
    engine = SimpleNamespace(failure=None, status=(), num_waiting=0)
    listener = SimpleNamespace(should_exit=False, force_exit=False, ending=False)
    with watched(engine, listener, clock=lambda: now[0]):
        looks = threading.Event()
        looks.wait(0.05)
        assert not listener.should_exit
        engine.failure = RuntimeError("no worker is left")
        wait_for(lambda: listener.should_exit)
        assert not listener.force_exit
        now[0] = serve_watch.ERRORS_SECONDS
        wait_for(lambda: listener.force_exit)
