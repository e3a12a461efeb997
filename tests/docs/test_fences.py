"""Fenced blocks: excerpts are of examples, commands name what there is, text is no code."""

import ast
import importlib.util
import re
import shlex
import subprocess

import pytest

from jax_specdec.cli import main as command_line
from tests.support.pages import PAGES, blocks
from tests.support.paths import ROOT

KINDS = re.compile(r"python(?: examples/\w+\.py)?|text|bash|json|\{[\w-]+\}.*")
EXCERPT = re.compile(r"^```python (examples/\w+\.py)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
EXCERPTS = [
    pytest.param(*excerpt, id=f"{page.name}: {excerpt[0]}")
    for page in PAGES
    for excerpt in EXCERPT.findall(page.read_text("utf-8"))
]
# A line of Python, of a signature, or of a command.
CODE = re.compile(
    r"\s*(?:from [\w.]+ import "
    r"|(?:import|with|for|async|await|def|class|return|raise|except|@)\b.*[:=(.]"
    r"|\w[\w., ()]* = (?:await )?[\w.]+[(\[]|[\w.]+\(.*\)(?:$|  | ->)"
    r"|(?:\S*/)?(?:pytest|pip|jax-specdec|python) )"
)
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
    """Python runs (test_pages.py) or is an excerpt; the others are looked at below."""
    fences = re.findall(r"^```(.*)$", page.read_text("utf-8"), re.MULTILINE)
    assert len(fences) % 2 == 0
    assert all(KINDS.fullmatch(kind) for kind in fences[::2])
    assert not any(fences[1::2])


@pytest.mark.parametrize(("path", "code"), EXCERPTS)
def test_an_excerpt_has_the_lines_of_its_example(path, code):
    assert lines_that_are_not_in(code, (ROOT / path).read_text("utf-8")) == []


def lines_that_are_not_in(code, source):
    """Of an excerpt, with `...` where it leaves lines out: those that the source has not next."""
    ast.parse(code)
    lines, missing = iter(map(bare, source.splitlines())), []
    for line in map(bare, code.splitlines()):
        if line not in ("", "...") and line not in lines:
            missing.append(line)
    return missing


def bare(line):
    """Without its comment and the room around."""
    return line.partition("  # ")[0].strip()


def test_another_line_in_an_excerpt_is_seen():
    """The control; a line out of turn too."""
    source = "def f():\n    with a() as b:  # here\n        c(b)\n    d()\n"
    assert lines_that_are_not_in("with a() as b:\n    ...  # more\nd()", source) == []
    assert lines_that_are_not_in("with a() as c:\n    ...", source) == ["with a() as c:"]
    assert lines_that_are_not_in("d()\nc(b)", source) == ["c(b)"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_text_is_output_or_a_sketch_and_no_code(page):
    lines = [
        line for block in blocks(page.read_text("utf-8"), "text") for line in block.split("\n")
    ]
    assert [line for line in lines if CODE.match(line)] == []


@pytest.mark.parametrize(
    "line",
    [
        "from ipc import RingReader", "for message in reader:", "state = processor.admit(state)",
        "topk_logprobs(logits, token_ids, 20)", "jax-specdec serve --ray", "@jax.jit(a)",
        "model(tokens [B, T]) -> logits [B, S, V]", "version = await engine.update_weights(...)",
        "pytest tests/ipc",
    ],
)  # fmt: skip
def test_code_in_text_is_seen(line):
    """The control."""
    assert CODE.match(line)


def problem(command):
    """What a command names and is not there; "" where all of it is."""
    words = shlex.split(command.partition(" >")[0])
    while words and "=" in words[0]:
        words.pop(0)
    program = words[0].rpartition("/")[2]
    if program == "jax-specdec":
        try:
            command_line.parsed_options(words[1:])
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
