"""`jax-specdec view`: files, titles, and where the page goes."""

import os
import subprocess
import sys

import pytest

from jax_specdec.cli.main import main
from tests.support.hostile_responses import line
from tests.support.openai_records import snowman, two_steps
from tests.support.page_blocks import blocks


@pytest.fixture
def source(tmp_path):
    file = tmp_path / "a run.jsonl"
    file.write_text(line(snowman()) + "\n" + line(two_steps()) + "\n", encoding="utf-8")
    return file


def test_the_command_writes_the_page_beside_the_file(source, tmp_path, capsys):
    page, other = tmp_path / "a run.html", tmp_path / "other.html"
    assert main(["view", str(source)]) == 0
    assert capsys.readouterr().out == f"wrote 2 responses, 9 tokens to {page}\n"
    assert "<title>a run.jsonl</title>" in page.read_text(encoding="utf-8")
    assert main(["view", str(source), "--output", str(other), "--title", "A & B"]) == 0
    assert "<title>A &amp; B</title>" in other.read_text(encoding="utf-8")
    assert main(["view", str(source), "--output", "/dev/full"]) == 2
    assert "No space left on device: '/dev/full'" in capsys.readouterr().err
    assert [main(["view", folder]) for folder in (str(tmp_path), "/")] == [2, 2]
    assert "/ is a folder: name a file of responses in it" in capsys.readouterr().err


def test_a_file_name_that_is_not_text(source, tmp_path):
    renamed = source.rename(tmp_path / os.fsdecode(b"run\xff.jsonl"))
    assert main(["view", str(renamed)]) == 0
    assert "<title>run\\udcff.jsonl</title>" in renamed.with_suffix(".html").read_text("utf-8")


def test_closed_standard_streams_are_as_if_nobody_reads(source):
    command = [sys.executable, "-m", "jax_specdec.cli.main", "view", str(source)]
    subprocess.run(["sh", "-c", '"$@" <&- >&- 2>&-', "sh", *command], check=True)


def test_two_files_become_one_page(source, tmp_path, capsys):
    new = tmp_path / "new.json"
    new.write_text(f"\ufeff[{line(two_steps())},\n{line(snowman())}]", encoding="utf-8")
    assert main(["view", str(source), str(new)]) == 0
    page = tmp_path / "a run.html"
    assert capsys.readouterr().out == f"wrote 4 responses, 18 tokens to {page}\n"
    text = page.read_text(encoding="utf-8")
    assert "<title>a run.jsonl and new.json</title>" in text
    files = [{"name": "a run.jsonl", "count": 2}, {"name": "new.json", "count": 2}]
    assert blocks(text)[0]["files"] == files


@pytest.mark.parametrize("there", [True, False])
def test_the_page_is_opened_on_demand(there, source, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or there)
    monkeypatch.chdir(source.parent)
    assert main(["view", source.name]) == 0
    assert opened == []
    assert main(["view", source.name, "--open"]) == 0
    address = source.with_suffix(".html").as_uri()
    assert opened == [address]
    said = "" if there else f"no browser was found: open {address} in one\n"
    assert capsys.readouterr().err == said
