"""Fenced blocks of pages: of known kinds, and commands whose programs, options and lanes exist."""

import importlib.util
import re
import shlex
import subprocess

import pytest

from jax_specdec.cli import main as command_line
from tests.support.pages import PAGES, blocks
from tests.support.paths import ROOT

pytestmark = pytest.mark.fast
KINDS = re.compile(r"python|text|bash|json|\{[\w-]+\}.*")
LANES = set(
    re.findall(r"^NOT RUN: ([\w-]+):", subprocess.run(
        [ROOT / ".ci/heavy", "--list"], capture_output=True, text=True, check=True
    ).stdout, re.MULTILINE)
)  # fmt: skip
COMMANDS = [
    pytest.param(command, id=f"{page.name}: {command}"[:60])
    for page in PAGES
    for block in blocks(page.read_text("utf-8"), "bash")
    for line in block.replace("\\\n", " ").splitlines()
    for command in re.split(r" && | \| ", line.partition("  # ")[0])
    if command.strip() and not command.startswith("#")
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_of_a_known_kind(page):
    """Python runs (test_pages.py), text is output or a sketch, bash is looked at below."""
    fences = re.findall(r"^```(.*)$", page.read_text("utf-8"), re.MULTILINE)
    assert len(fences) % 2 == 0
    assert all(KINDS.fullmatch(kind) for kind in fences[::2])
    assert not any(fences[1::2])


def problem(command):
    """What a command names and is not there; "" where all of it is."""
    words = shlex.split(command.partition(" >")[0])
    while words and "=" in words[0]:
        words.pop(0)
    program = words[0].rpartition("/")[2]
    if program == "jax-specdec":
        try:
            command_line._parsed(words[1:])
        except SystemExit:
            return "its options"
    elif program == "heavy":
        return ", ".join({*words[1:]} - LANES - {"--list", "all"})
    elif program.startswith("python") and words[1] == "-m":
        return "" if importlib.util.find_spec(words[2]) else words[2]
    elif program.startswith("python") and words[1] != "-c":
        return "" if (ROOT / words[1]).is_file() else words[1]
    return ""


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_names_what_there_is(command):
    assert problem(command) == ""


def test_wrong_commands_are_seen():
    """The control."""
    assert problem("jax-specdec demo --nothing") == "its options"
    assert problem(".ci/heavy ring nothing") == "nothing"
    assert problem(".venv/bin/python -m bench.nothing") == "bench.nothing"
    assert problem("python examples/nothing.py") == "examples/nothing.py"
