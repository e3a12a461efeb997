"""A run ends with README's rows beside it, and with status 1 where a limit was missed."""

from dataclasses import replace

import pytest

from bench import __main__ as bench
from bench import host, readme, report
from bench.comparison import Target, from_samples

MACHINE = {
    "cpus": 2, "processor": "a test's", "load before": 0.5, "versions": {"jax": "0.10.2"},
}  # fmt: skip
TABLE = (report.ROOT / "README.md").read_text().partition("## What it costs")[2]
LINES = [line for line in TABLE.partition("```bash")[0].splitlines() if line.startswith("| ")][2:]


@pytest.fixture(scope="module")
def kept():
    return {title: one for title, (one, _) in report.newest(report.kept()).items()}


def test_rows_are_those_of_the_readme():
    assert len(LINES) == len(readme.ROWS)
    for row, line in zip(readme.ROWS, LINES, strict=True):
        assert line.startswith(f"| {row.begins}")
        assert row.suite in bench.SUITES | bench.MORE


@pytest.mark.parametrize("row", readme.ROWS, ids=lambda row: row.begins)
def test_the_readme_shows_what_was_kept(row, kept):
    (line,) = [line for line in LINES if line.startswith(f"| {row.begins}")]
    ratios = readme.ratios(row, kept[row.title])
    assert tuple(ratios) == row.others
    if row.others != ("kept programs",):  # of ours, in seconds
        assert all(f" {ratio:.3g}x" in line for ratio in ratios.values())


def measured(row, ours, *others):
    samples = {row.ours: [ours]} | {n: [s] for n, s in zip(row.others, others, strict=True)}
    return from_samples(row.title, samples)


def test_closing_lines_say_whether_rows_hold():
    row = readme.ROWS[0]
    kept = {row.title: measured(row, 1.0, 5.0)}
    for here, verdict in ((4.0, "4x: held"), (3.9, "3.9x: NOT HELD (less than 0.8 of it)")):
        lines = [*readme.closing_lines([measured(row, 1.0, here)], kept, MACHINE)]
        assert len(lines) == 8
        assert lines[0] == (
            f"logprobs of 64 x 131072: README log_softmax + top_k 5x; here log_softmax + top_k "
            f"{verdict}"
        )
        assert "not measured in this run; python -m bench ring does" in lines[1]
        assert lines[7] == "2 cores of a test's, load before 0.5, jax 0.10.2"


@pytest.mark.parametrize(("value", "status"), [(1.0, 0), (3.0, 1)])
def test_a_limit_that_is_missed_is_the_exit_status(value, status, monkeypatch, capsys):
    one = from_samples("bytes to records: 8 requests", {"ours": [1e-4]})
    one = replace(one, targets=(Target("a", 2.0, value, "x"),))
    monkeypatch.setattr(host, "run", lambda quick: [one])
    assert bench.main(["host", "--quick"]) == status
    assert capsys.readouterr().out.count("not measured in this run") == len(readme.ROWS)


def test_readme_is_all_of_its_suites(monkeypatch):
    ran = []
    module = type("Suite", (), {"run": staticmethod(lambda quick: [])})
    monkeypatch.setattr(bench.importlib, "import_module", lambda name: ran.append(name) or module)
    assert bench.main(["readme"]) == 0
    assert ran == [f"bench.{bench.MODULES.get(suite, suite)}" for suite in readme.suites()]
