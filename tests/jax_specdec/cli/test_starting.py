"""What a person who waits for the first token sees: what workers do, and for how long."""

import io
import sys
import threading

import pytest

from jax_specdec.cli import standard_output, starting
from jax_specdec.cli.starting import Starting, repeated

pytestmark = pytest.mark.fast


def test_the_line_says_each_thing_once_and_since_when():
    now, phases = [10.0], ["loading 3 of 9", "loading 3 of 9"]
    starting = Starting(lambda: phases, clock=lambda: now[0])
    assert starting.line() == "loading 3 of 9, 0 s"
    now[0] = 12.4
    assert starting.line() == "loading 3 of 9, 2 s"
    phases[0] = "compiling 7 of 9 (step)"
    assert starting.line() == "compiling 7 of 9 (step), 0 s; loading 3 of 9, 2 s"
    phases[:] = ["compiling 7 of 9 (step)"]
    now[0] = 20.0
    assert starting.line() == "compiling 7 of 9 (step), 8 s"


class Calls:
    """A function that counts its calls."""

    def __init__(self):
        self.count, self.again = 0, threading.Semaphore(0)

    def __call__(self):
        self.count += 1
        self.again.release()
        return ["compiling 7 of 9 (step)"]


def test_it_is_shown_again_and_again_until_it_is_over(monkeypatch):
    monkeypatch.setattr(starting, "LOOK_SECONDS", 0.001)
    show = Calls()
    with repeated(show) as end:
        assert all(show.again.acquire(timeout=30) for _ in range(3))
        end()
        count = show.count
        end()
        assert not [each for each in threading.enumerate() if each.name == "what workers do"]
    assert show.count == count


def test_a_terminal_shows_it_until_the_first_message(monkeypatch):
    monkeypatch.setattr(starting, "LOOK_SECONDS", 0.001)
    screen, phases = io.StringIO(), Calls()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(screen, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with standard_output.waiting(phases) as begun:
        assert all(phases.again.acquire(timeout=30) for _ in range(2))
        begun()
        begun()
        count = phases.count
    assert "compiling 7 of 9 (step), 0 s" in screen.getvalue()
    assert phases.count == count


def test_a_pipe_shows_nothing_of_it(capsys):
    phases = Calls()
    with standard_output.waiting(phases) as begun:
        begun()
    assert phases.count == 0
    assert capsys.readouterr() == ("", "")
