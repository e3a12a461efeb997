"""The README's Python runs as it stands, and its two commands are what they claim to be."""

import re
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_there_are_blocks_to_run():
    assert len(BLOCKS) == 2


@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_a_block_runs(index, tmp_path):
    script = tmp_path / "block.py"
    script.write_text(BLOCKS[index])
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr


def test_two_commands_do_all_their_own_set_up():
    commands = re.findall(r"^python3 -m venv .*$", README, flags=re.MULTILINE)
    assert len(commands) == 2
    assert commands[0].endswith("jax-specdec demo")
    assert "pytest" in commands[1]


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#:]+)\)", README))
def test_a_link_leads_somewhere(link):
    assert (ROOT / link).exists()
