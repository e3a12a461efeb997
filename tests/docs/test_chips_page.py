"""docs/chips.md has every chip of the table, and every report that somebody sent, once."""

import json

import pytest

from jax_specdec.cli.device_report import Report
from pallas_kernels.testing.chips import GPUS
from tests.support.pages import DOCS, cells

REPORTS = DOCS / "reports"


def lines_of(folder):
    """[chip, jax, what is sent back] of each report of a folder, in the order of the files."""
    lines = []
    for file in sorted(folder.glob("*.json")):
        content = json.loads(file.read_text())
        ground, pieces, rehearsed = (content[x] for x in ("ground", "pieces", "rehearsed"))
        assert not rehearsed, f"{file.name} is of a rehearsal"
        said = Report(folder, ground, [], pieces).line()
        lines.append([ground["device"], ground["versions"]["jax"], said])
    return lines


def test_the_page_has_the_reports_that_were_sent():
    assert cells("chips.md", "Reports that people sent") == lines_of(REPORTS)


@pytest.mark.parametrize("rehearsed", [False, True])
def test_a_report_is_a_line_and_a_rehearsal_is_none(tmp_path, rehearsed):
    ground = {"device": "NVIDIA H200", "backend": "mosaic_gpu", "kernels": {"rows": "top K"},
              "pieces": {"rows": ["rows: a"]}, "missing": {}, "compute capability": 9.0,
              "versions": {"jax": "0.11.2", "jax-specdec": "1"}}  # fmt: skip
    report = Report(tmp_path, ground, [], {"rows: a": {"ok": True, "seconds": 1.0}}, rehearsed)
    report.save()
    (tmp_path / "device-check.json").rename(tmp_path / "h200.json")
    if rehearsed:
        with pytest.raises(AssertionError, match="rehearsal"):
            lines_of(tmp_path)
        return
    ((chip, version, said),) = lines_of(tmp_path)
    assert (chip, version) == ("NVIDIA H200", "0.11.2")
    assert "1 of 1 kernels pass" in said


def test_the_page_has_each_chip_of_the_table_once():
    rows = cells("chips.md", "By chip")
    said = [(name, capability) for name, capability, *_ in rows if capability]
    assert said == [(gpu.name, ".".join(map(str, gpu.capability))) for gpu in GPUS.values()]
