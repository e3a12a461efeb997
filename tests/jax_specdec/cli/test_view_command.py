"""`jax-specdec view`: files, titles, and refusals in one line."""

import os

import pytest

from jax_specdec.cli.main import main
from tests.jax_specdec.export.test_html_page import line
from tests.jax_specdec.export.test_openai import snowman, two_steps

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
