"""What is said meanwhile: lines of the log on stderr, and what workers do before the first token.

Who logs never waits for who reads.
"""

import io
import logging
import os
import sys
import threading
from types import SimpleNamespace
from unittest import mock

import pytest

from jax_specdec.cli import serve_watch, standard_output
from jax_specdec.cli.logs import Lines, logged
from jax_specdec.cli.serve_watch import Work, watched
from jax_specdec.cli.standard_output import Starting
from tests.support.processes import wait_for
from tests.support.scene import long_requests
from tests.support.streaming import StreamingScene


def test_lines_have_time_and_level_other_loggers_warn_only():
    stream = io.StringIO()
    ours, others = logging.getLogger("jax_specdec.engine"), logging.getLogger("another_package")
    others.setLevel(logging.INFO)
    with logged("info", stream):
        ours.debug("too much")
        ours.info("a worker is there")
        others.info("chatter")
        others.warning("a word of warning")
    ours.warning("nobody hears it")
    said = [line.split(maxsplit=2)[2] for line in stream.getvalue().splitlines()]
    assert said == ["INFO a worker is there", "WARNING a word of warning"]


def record(text):
    return logging.LogRecord("x", logging.INFO, "", 0, text, (), None)


def test_nobody_waits_for_a_reader_who_does_not_read():
    """A pipe that is full: lines are dropped, and counted once somebody reads."""
    out, into = os.pipe()
    found = []
    # Of a test that fails the reading end is closed first: else closing the other one would wait.
    with os.fdopen(into, "w") as stream, os.fdopen(out, "rb", 0) as reader:
        handler = Lines(stream, max_lines=10, end_seconds=0.1)

        def emit():
            for _ in range(1000):  # far more than a pipe holds, and than may wait
                handler.emit(record("x" * 1000))
            return handler.num_dropped

        wait_for(lambda: emit() > 100)  # the thread counts again with each line that it writes
        chunks = iter(lambda: reader.read(1 << 16), b"")
        read = threading.Thread(target=found.extend, args=(chunks,))
        read.start()
        wait_for(lambda: handler.waiting.empty())
        handler.emit(record("the last one"))
        wait_for(lambda: any(b"lines of the log were dropped" in text for text in found))
        handler.close()
        stream.close()
        read.join()


def test_a_reader_who_has_left_ends_nothing():
    out, into = os.pipe()
    os.close(out)
    stream = os.fdopen(into, "w")
    handler = Lines(stream)
    for _ in range(3):
        handler.emit(record("words"))
    handler.close()
    assert not handler.thread.is_alive()
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_work_is_logged_every_ten_seconds():
    def line(counts, rate, drafts, accepted):
        share = f"; acceptance {100 * accepted / drafts:.1f} %" if drafts else ""
        return f"{counts}; {rate:.1f} tokens/s{share}"

    scene = StreamingScene(num_slots=2)
    work = Work(scene.engine, 100.0)
    assert work.line(105.0) == ""
    for request in long_requests(3):
        scene.submit(request)
    scene.round(2)
    first = scene.engine.sessions[0].state.statistics
    counts = "2 requests run and 1 wait; ended: 0"
    said = line(counts, first.num_tokens / 10, first.num_drafts, first.num_accepted)
    assert work.line(110.0) == said
    assert work.line(119.0) == ""
    scene.finish()
    total = scene.engine.sessions[0].state.statistics
    drafts = total.num_drafts - first.num_drafts
    accepted = total.num_accepted - first.num_accepted
    counts = "0 requests run and 0 wait; ended: 3"
    assert work.line(122.0) == line(counts, (60 - first.num_tokens) / 12, drafts, accepted)
    assert work.line(140.0) == ""  # nothing was done


def test_a_stopped_engine_ends_the_listener_in_time():
    now = [0.0]
    health = SimpleNamespace(ready=True)
    engine = SimpleNamespace(failure=None, status=(), num_waiting=0, health=lambda: health)
    listener = SimpleNamespace(should_exit=False, force_exit=False, ending=False)
    looks = mock.Mock(side_effect=lambda: now[0])
    with watched(engine, listener, clock=looks, look_seconds=0.001):
        wait_for(lambda: looks.call_count >= 3)
        assert not listener.should_exit
        engine.failure = RuntimeError("no worker is left")
        wait_for(lambda: listener.should_exit)
        assert not listener.force_exit
        now[0] = serve_watch.ERRORS_SECONDS
        wait_for(lambda: listener.force_exit)


# Before the first token ------------------------------------------------------------------------


def test_the_line_says_each_thing_once_and_since_when():
    now, phases = [10.0], []
    starting = Starting(lambda: phases, clock=lambda: now[0], kept_in="/kept")
    for at, doing, said in (
        (10.0, ["loading 3 of 9", "loading 3 of 9"], "loading 3 of 9, 0 s"),
        (12.4, ["loading 3 of 9", "loading 3 of 9"], "loading 3 of 9, 2 s"),
        (12.4, ["loading 3 of 9", "compiling"], "loading 3 of 9, 2 s; compiling, 0 s"),
        (20.0, ["compiling"], "compiling, 8 s; on the first start only: kept in /kept"),
    ):
        now[0], phases[:] = at, doing
        assert starting.line() == said


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_shows_it_until_the_first_message(terminal, monkeypatch):
    screen, phases = io.StringIO(), mock.Mock(return_value=["compiling 7 of 9 (step)"])
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(screen, "isatty", lambda: terminal, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with standard_output.waiting(phases) as begun:
        assert not terminal or wait_for(lambda: phases.call_count >= 2) is None
        begun()
        begun()
        count = phases.call_count
    assert ("━━━╌╌╌╌╌ compiling 7 of 9 (step), 0 s" in screen.getvalue()) == terminal
    assert phases.call_count == count
    assert terminal or (count, screen.getvalue()) == (0, "")


def test_without_a_terminal_one_line_says_what_compiles(monkeypatch):
    phases = ["loading 1 of 3", "compiling", "compiling 1 of 8 (step)", "compiling 2 of 8", "idle"]
    look = mock.Mock(side_effect=lambda: [phases[min(look.call_count, 5) - 1]])
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(standard_output, "REDRAW_SECONDS", 0.001)
    with standard_output.waiting(look, kept_in="/kept"):
        wait_for(lambda: look.call_count > 5)
    said = "compiling 1 of 8 (step), 0 s; on the first start only: kept in /kept\n"
    assert screen.getvalue() == said
