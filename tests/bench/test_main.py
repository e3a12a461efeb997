"""`python -m bench`: its suites exist, a wrong contender ends a run, results become files."""

import importlib
import signal
import subprocess
import sys

import pytest

from bench import __main__ as bench
from bench import host, kernel_grid, kernels, sampling, timing
from bench.comparison import from_samples
from bench.files import read_json
from bench.timing import BenchError
from pallas_kernels import topk_logprobs
from pallas_kernels.testing.shapes import Shape


def test_every_suite_is_a_module_that_runs():
    for suite in bench.SUITES | bench.MORE:
        assert callable(importlib.import_module(f"bench.{bench.MODULES.get(suite, suite)}").run)


def test_an_unknown_suite_is_refused_by_name(capsys):
    with pytest.raises(SystemExit):
        bench.main(["kernel"])
    assert "unknown suite or command 'kernel': choose from kernels, ring" in capsys.readouterr().err


def test_sampling_is_measured_in_parts(monkeypatch, capsys, tmp_path):
    def measure(case):
        return from_samples(case.title(), {"ours": [1e-4]})

    monkeypatch.setattr(sampling, "measure", measure)
    titles = set()
    for rows in (["--rows", "16", "--rows", "64"], ["--rows", "256"]):
        file = tmp_path / f"{len(rows)}.json"
        assert bench.main(["sampling", *rows, "--json", str(file)]) == 0
        found = {one.title for one in read_json(file).comparisons}
        assert found
        assert not found & titles
        titles |= found
    assert titles == {case.title() for case in sampling.GRID}
    capsys.readouterr()
    assert bench.main(["sampling", "--rows", "64", "--vocabulary", "600"]) == 1
    assert "rows [64] and vocabulary [600]: choose among [(16, 32000)" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench.main(["host", "--rows", "16"])
    assert "--rows and --vocabulary are options of the suite sampling" in capsys.readouterr().err


def measured(monkeypatch, calls):
    """Replace the host suite by one that only counts its calls."""
    one = from_samples("bytes to records", {"columns (ours)": [1e-4]})
    monkeypatch.setattr(host, "run", lambda quick: calls.append(quick) or [one])


@pytest.mark.parametrize("option", ["--json", "--plot"])
@pytest.mark.parametrize("place", ["file/x", "/proc/x/y"])
def test_a_place_that_cannot_be_written_is_refused_before_measuring(
    tmp_path, monkeypatch, capsys, option, place
):
    calls = []
    measured(monkeypatch, calls)
    tmp_path.joinpath("file").touch()
    assert bench.main(["host", "--quick", option, str(tmp_path / place)]) == 2
    assert calls == []
    assert "cannot write files to the folder" in capsys.readouterr().err
    assert bench.main(["host", "--quick", option, str(tmp_path / "new/x")]) == 0  # and others are
    assert calls == [True]


def test_a_folder_is_no_file_for_results_and_a_file_no_folder_for_plots(tmp_path, capsys):
    assert bench.main(["host", "--json", str(tmp_path)]) == 2
    assert f"{tmp_path} is a folder: name a file in it" in capsys.readouterr().err
    tmp_path.joinpath("file").touch()
    assert bench.main(["host", "--plot", str(tmp_path / "file")]) == 2
    assert "name another one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("package", "command"),
    [
        ("matplotlib", ["host", "--plot", "here"]),
        ("tokenizers", ["host", "detokenize"]),
    ],
)
def test_a_missing_package_is_named_before_measuring(
    tmp_path, monkeypatch, capsys, package, command
):
    calls = []
    measured(monkeypatch, calls)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    assert bench.main(command) == 2
    assert calls == []
    assert f"needs {package}, which is not installed: pip" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_so_and_takes_down_what_it_set_up(monkeypatch, capsys, number):
    taken_down = []

    def run(quick):
        try:
            signal.raise_signal(number)
        finally:
            taken_down.append(True)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(host, "run", run)
    assert bench.main(["host"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert taken_down == [True]
    assert signal.getsignal(signal.SIGTERM) is before


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
    assert {
        "date",
        "cpus",
        "processor",
        "python",
        "versions",
        "command",
        "load before",
        "priority",
    } <= set(found.environment)
    (read,) = found.comparisons
    assert (read.suite, read.settings) == ("host", {"k": 5})
    timing = read["columns (ours)"]
    assert (timing.low, timing.median, timing.high) == (1e-4, 2e-4, 4e-4)


def test_logits_a_second_stand_beside_those_of_a_copy():
    one = from_samples(
        "topk_logprobs",
        {"log_softmax + top_k": [4e-3], "xla": [1e-3]},
        settings={"bytes": 2_000_000},
    )
    figures = kernels.beside(one, bandwidth=4.0).figures
    assert figures["xla"] == pytest.approx({"GB/s": 2.0, "% of a copy": 50.0})
    assert figures["log_softmax + top_k"] == pytest.approx({"GB/s": 0.5, "% of a copy": 12.5})


def test_wrong_logprobs_of_logits_are_caught_before_any_timing(monkeypatch):
    def wrong(*args, **kwargs):
        found = topk_logprobs(*args, **kwargs)
        return found._replace(token_ranks=found.token_ranks + 1)

    shape = Shape(2, 300, 5, "float32")
    right = kernels.measure(shape, rounds=1)
    assert right.names == ("log_softmax + top_k", "xla")
    assert right.settings["bytes"] == 2 * 300 * 4
    monkeypatch.setattr(kernels, "topk_logprobs", wrong)
    monkeypatch.setattr(timing, "rotated", None)  # timed before it was checked
    with pytest.raises(BenchError, match="xla differs from log_softmax"):
        kernels.measure(shape, rounds=1)


@pytest.mark.parametrize(("seconds", "verdict"), [(0.9, "held"), (1.1, "MISSED")])
def test_on_a_cpu_the_promise_is_twice_the_speed_of_the_plain_way(seconds, verdict):
    found = from_samples("t", {"log_softmax + top_k": [2.0], "xla": [seconds]})
    (target,) = kernels.targets_of(found)
    assert target.verdict == verdict


def test_the_ways_of_the_kernel_grid_agree_and_its_limits_can_be_missed():
    shape = Shape(64, 300, 5, "bfloat16")
    found = kernel_grid.measure(shape, rounds=1)
    assert len(found.timings) == 4
    assert found.suite == "kernel-grid"
    times = {kernel_grid.PLAIN: [3.0, 2.0], kernel_grid.LOGSUMEXP: [1.0], kernel_grid.NUMPY: [4.0]}
    slow = kernel_grid.targets_of(from_samples("t", times | {"xla": [1.1]}), shape)
    assert [one.verdict for one in slow] == ["MISSED", "MISSED"]
    fast = kernel_grid.targets_of(from_samples("t", times | {"xla": [9.0, 0.99]}), shape)
    assert [one.verdict for one in fast] == ["held", "held"]


def test_the_engines_side_of_the_loops_benchmark_imports_no_jax():
    for module, expected in (("bench.loop.consumer", "False"), ("bench.loop.rig", "True")):
        code = f"import sys, {module}; print('jax' in sys.modules)"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == expected
