"""`jax-specdec view`: files, titles, and refusals in one line."""

import json
import os

import pytest

from jax_specdec.cli.main import main
from tests.support.hostile_responses import line
from tests.support.openai_records import snowman, two_steps
from tests.support.page_blocks import blocks

pytestmark = pytest.mark.fast


def test_the_command_writes_the_page_beside_the_file(tmp_path, capsys):
    source = tmp_path / "run.jsonl"
    source.write_text(line(snowman()) + "\n" + line(two_steps()) + "\n", encoding="utf-8")
    assert main(["view", str(source)]) == 0
    page = tmp_path / "run.html"
    assert capsys.readouterr().out == f"wrote 2 responses, 9 tokens to {page}\n"
    assert "<title>run.jsonl</title>" in page.read_text(encoding="utf-8")
    other = tmp_path / "other.html"
    assert main(["view", str(source), "--output", str(other), "--title", "A & B"]) == 0
    assert "<title>A &amp; B</title>" in other.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("run.html", b"{}", "the page would replace"),
        ("run.jsonl", b"{}", "run.jsonl: line 1 is not a completion"),
        ("run.jsonl", b"\xff\xfe", "'utf-8' codec can't decode"),
    ],
)
def test_the_command_refuses_in_one_line(tmp_path, capsys, name, content, said):
    source = tmp_path / name
    source.write_bytes(content)
    assert main(["view", str(source)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert source.read_bytes() == content
    assert len([*tmp_path.iterdir()]) == 1


def test_a_file_that_is_not_there(tmp_path, capsys):
    assert main(["view", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl" in capsys.readouterr().err


def test_a_file_name_that_is_not_text(tmp_path):
    source = tmp_path / os.fsdecode(b"run\xff.jsonl")
    source.write_text(line(snowman()), encoding="utf-8")
    assert main(["view", str(source)]) == 0
    assert "<title>run\\udcff.jsonl</title>" in source.with_suffix(".html").read_text("utf-8")


def test_a_page_that_does_not_fit_the_disk_is_named(tmp_path, capsys):
    (tmp_path / "run.jsonl").write_text(line(snowman()), encoding="utf-8")
    assert main(["view", str(tmp_path / "run.jsonl"), "--output", "/dev/full"]) == 2
    assert "No space left on device: '/dev/full'" in capsys.readouterr().err


def test_two_files_become_one_page(tmp_path, capsys):
    old, new = tmp_path / "old.jsonl", tmp_path / "new.json"
    old.write_text(line(snowman()), encoding="utf-8")
    new.write_text(f"\ufeff[{line(two_steps())},\n{line(snowman())}]", encoding="utf-8")
    assert main(["view", str(old), str(new)]) == 0
    assert capsys.readouterr().out == f"wrote 3 responses, 15 tokens to {tmp_path / 'old.html'}\n"
    page = (tmp_path / "old.html").read_text(encoding="utf-8")
    assert "<title>old.jsonl and new.json</title>" in page
    drawn, _ = blocks(page)
    assert drawn["files"] == [{"name": "old.jsonl", "count": 1}, {"name": "new.json", "count": 2}]


def test_a_page_that_would_replace_the_second_file_is_refused(tmp_path, capsys):
    old, new = tmp_path / "old.jsonl", tmp_path / "old.html"
    for file in (old, new):
        file.write_text(line(snowman()), encoding="utf-8")
    assert main(["view", str(old), str(new)]) == 2
    assert f"the page would replace {new}" in capsys.readouterr().err
    assert json.loads(new.read_text(encoding="utf-8"))["id"] == "r"


@pytest.mark.parametrize("there", [True, False])
def test_the_page_is_opened_on_demand(there, tmp_path, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or there)
    source = tmp_path / "a run.jsonl"
    source.write_text(line(snowman()), encoding="utf-8")
    assert main(["view", str(source)]) == 0
    assert opened == []
    monkeypatch.chdir(tmp_path)
    assert main(["view", source.name, "--open"]) == 0
    address = (tmp_path / "a run.html").as_uri()
    assert opened == [address]
    assert capsys.readouterr().err == (
        "" if there else f"no browser was found: open {address} in one\n"
    )
