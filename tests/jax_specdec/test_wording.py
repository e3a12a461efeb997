"""Reports and errors say "1 message" and "2 messages"."""

import re

import pytest

from jax_specdec.cli import demo_screen, demo_tables
from jax_specdec.wording import counted
from tests.jax_specdec.cli.test_demo_screen import collected, console, printed

pytestmark = pytest.mark.fast


def test_a_number_and_what_it_counts():
    assert [counted(n, "message") for n in (0, 1, 2)] == ["0 messages", "1 message", "2 messages"]
    assert counted(57_056, "weight", ",") == "57,056 weights"


def test_reports_of_one_thing():
    collector, shown = collected("x", done=(0,)), console(200)
    with demo_screen.screen(shown) as screen:
        screen.update(collector)
    shown.print(demo_screen.LiveView().draw(collector, 200, 24))
    demo_tables.show(collector, shown)
    said = printed(shown)
    assert "done: 1 token (length)" in said
    assert "1 token, step 1" in said
    assert "1 message, " in said
    assert not re.search(r"\b1 (messages|tokens|records|requests)\b", said)
