"""`bench report`: one page from the newest results, and README's figures are in it."""

import re
from dataclasses import replace

import pytest

from bench import report
from bench.comparison import Target, from_samples
from bench.files import read_json, write_json
from tests.support.paths import ROOT

pytestmark = pytest.mark.fast


def results(folder, date, *comparisons):
    """Results of a machine of a test's, written and read."""
    machine = {"date": date, "cpus": 2, "processor": "a test's", "python": "3", "command": "bench"}
    path = folder / f"{date}.json"
    write_json(path, comparisons, machine)
    return read_json(path)


def test_the_page_is_what_the_results_say():
    assert report.main(["--check"]) == 0


def test_the_newest_result_of_a_title_counts_and_says_where_it_is_from(tmp_path):
    old = from_samples("16 KB", {"ring": [1e-5], "ZeroMQ msgpack": [2e-5]})
    new = from_samples("16 KB", {"ring": [1e-5], "ZeroMQ msgpack": [3e-5]})
    limits = [Target(name, 2.0, measured, "x") for name, measured in (("a", 1), ("b", 3))]
    new = replace(new, targets=tuple(limits))
    on_a_gpu = replace(old, settings={"device": "H100"})
    newer, older = (tmp_path, "2026-01-02", new), (tmp_path, "2026-01-01", old, on_a_gpu)
    text = report.page([results(*newer), results(*older)])
    assert "| 16 KB | ring | 10 us (10 us to 10 us) | ZeroMQ msgpack 3x | 2 |" in text
    assert "| 16 KB (H100) | ring | 10 us (10 us to 10 us) | ZeroMQ msgpack 2x | 1 |" in text
    assert "2. `2026-01-02.json`: 2026-01-02, 2 cores of a test's" in text
    assert "Limits: 1 held, 1 missed, 0 not measured." in text
    assert "- 16 KB: b: 3 x, MISSED (at most 2 x)" in text
    assert "a: 1 x" not in text


def test_every_ratio_in_readme_is_in_the_page():
    readme = (ROOT / "README.md").read_text().partition("## What it costs")[2]
    ratios = re.findall(r"\d[\d.]*x", readme.partition("```bash")[0])
    page = report.PAGE.read_text()
    assert len(ratios) > 5
    assert [ratio for ratio in ratios if f" {ratio}" not in page] == []
