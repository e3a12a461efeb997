"""`python -m bench`: its suites exist, a wrong contender ends it, results become files."""

import importlib
import subprocess
import sys

import pytest

from bench import __main__ as bench
from bench import host, sweep
from bench.comparison import from_samples
from bench.files import read_json
from bench.timing import BenchError

pytestmark = pytest.mark.fast


def test_every_suite_and_command_is_a_module_that_runs():
    for suite in bench.SUITES | bench.MORE:
        for name in bench.MODULES.get(suite, (suite,)):
            assert callable(importlib.import_module(f"bench.{name}").run)
    for name in set(bench.COMMANDS.values()) - {"bench.timeline"}:  # needs matplotlib
        assert callable(importlib.import_module(name).main)


def test_an_unknown_suite_is_refused_by_name(capsys):
    with pytest.raises(SystemExit):
        bench.main(["kernel"])
    assert "unknown suite or command 'kernel': choose from kernels, ring" in capsys.readouterr().err


def test_a_wrong_contender_ends_the_run_and_writes_nothing(tmp_path, monkeypatch, capsys):
    def run(quick):
        raise BenchError("objects differs from columns")

    monkeypatch.setattr(host, "run", run)
    path = tmp_path / "out.json"
    assert bench.main(["host", "--quick", "--json", str(path)]) == 1
    assert "NOT MEASURED: objects differs" in capsys.readouterr().err
    assert not path.exists()


def test_results_are_printed_and_written_with_machine_settings_and_suite(
    tmp_path, monkeypatch, capsys
):
    one = from_samples(
        "bytes to records: 8 requests", {"columns (ours)": [1e-4, 2e-4, 4e-4]}, settings={"k": 5}
    )
    monkeypatch.setattr(host, "run", lambda quick: [one])
    path = tmp_path / "out.json"
    assert bench.main(["host", "--quick", "--json", str(path)]) == 0
    assert "200 us" in capsys.readouterr().out
    found = read_json(path)
    assert {"date", "cpus", "processor", "python", "versions", "command", "load before"} <= set(
        found.environment
    )
    (read,) = found.comparisons
    assert (read.suite, read.settings) == ("host", {"k": 5})
    timing = read["columns (ours)"]
    assert (timing.low, timing.median, timing.high) == (1e-4, 2e-4, 4e-4)


def test_logits_a_second_stand_beside_those_of_a_copy():
    one = from_samples(
        "topk_logprobs",
        {"log_softmax + top_k": [4e-3], "xla": [1e-3]},
        settings={"shape": "Shape(rows=10, vocabulary=100000, k=5, dtype='bfloat16')"},
    )
    figures = sweep.beside(one, bandwidth=4.0).figures  # 2 MB of logits
    assert figures["xla"] == pytest.approx({"GB/s": 2.0, "% of a copy": 50.0})
    assert figures["log_softmax + top_k"] == pytest.approx({"GB/s": 0.5, "% of a copy": 12.5})


def test_the_engines_side_of_the_loops_benchmark_imports_no_jax():
    for module, expected in (("bench.consumer", "False"), ("bench.rig", "True")):
        code = f"import sys, {module}; print('jax' in sys.modules)"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == expected
