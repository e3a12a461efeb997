"""`bench report`: a page and its pictures from the newest results; README's figures are there."""

import re
from dataclasses import replace

from bench import __main__ as bench
from bench import report
from bench.comparison import Target, from_samples
from bench.files import read_json, write_json
from tests.support.paths import ROOT


def results(folder, date, *comparisons):
    """Results of a machine of a test's, written and read."""
    machine = {"date": date, "cpus": 2, "processor": "a test's", "python": "3", "command": "bench"}
    path = folder / f"{date}.json"
    write_json(path, comparisons, machine)
    return read_json(path)


def test_page_and_pictures_are_what_the_results_say(monkeypatch, tmp_path, capsys):
    assert report.main(["--check"]) == 0
    capsys.readouterr()
    monkeypatch.setattr(report, "PLOTS", tmp_path)  # no picture is here
    assert report.main(["--check"]) == 1
    said = capsys.readouterr().out
    assert "ring.svg is out of date: run python -m bench report" in said
    assert report.PAGE.name not in said


def test_the_newest_result_of_a_title_counts(tmp_path):
    old, new = (
        replace(from_samples("16 KB", {"ring": [1e-5], "ZeroMQ msgpack": [other]}), suite="ring")
        for other in (2e-5, 3e-5)
    )
    limits = [Target(name, 2.0, measured, "x") for name, measured in (("a", 1), ("b", 3))]
    new = replace(new, targets=tuple(limits))
    on_a_gpu = replace(old, settings={"device": "H100"})
    newer, older = (tmp_path, "2026-01-02", new), (tmp_path, "2026-01-01", old, on_a_gpu)
    text = report.page([results(*newer), results(*older)])
    assert "| [ring](#ring) | a message from process to process | 2.5x (2x, 3x) | 1 of 2 |" in text
    assert "| 16 KB | ring | 10 us (10 us to 10 us) | ZeroMQ msgpack 3x |" in text
    assert "| 16 KB (H100) | ring | 10 us (10 us to 10 us) | ZeroMQ msgpack 2x |" in text
    assert "- `2026-01-02.json`: 2026-01-02, 2 cores of a test's" in text
    assert "<summary>Limits: 1 missed, 0 not measured</summary>" in text
    assert "- 16 KB: b: 3 x, MISSED (at most 2 x)" in text
    assert "a: 1 x" not in text


def test_a_suite_of_our_own_ways_has_no_ratio_of_others(tmp_path):
    ways = replace(from_samples("a step", {"as they are": [1.0], "in tiles": [2.0]}), suite="block")
    text = report.page([results(tmp_path, "2026-01-02", ways)])
    assert "| our own ways alone | none set |" in text
    assert "| a step | as they are | 1 s (1 s to 1 s) | in tiles 2x |" in text


def test_every_ratio_in_readme_is_in_the_page():
    readme = (ROOT / "README.md").read_text().partition("## What it costs")[2]
    ratios = re.findall(r"\d[\d.]*x", readme.partition("```bash")[0])
    page = report.PAGE.read_text()
    assert len(ratios) > 5
    assert [ratio for ratio in ratios if f" {ratio}" not in page] == []


def test_every_suite_has_a_line_on_the_page():
    assert {*bench.SUITES, *bench.MORE} <= {*report.SUITES}
