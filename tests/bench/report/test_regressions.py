"""`bench compare` flags a slowdown, and not a slower machine."""

import json

import pytest

from bench.report import regressions
from bench.report.comparison import from_samples
from bench.report.files import ResultsError, read_json, write_json

pytestmark = pytest.mark.fast

TITLE = "530 KB, hot"
BEFORE = {"ring": 10.0, "ZeroMQ copy=False": 40.0, "multiprocessing.Queue": 200.0}


def written(path, seconds, title=TITLE):
    samples = {name: [value * 1e-6] * 3 for name, value in seconds.items()}
    write_json(path, [from_samples(title, samples)])
    return str(path)


def status(tmp_path, after, *options, title=TITLE):
    old = written(tmp_path / "old.json", BEFORE)
    new = written(tmp_path / "new.json", after, title)
    return regressions.main([old, new, *options])


def test_the_same_figures_are_no_slowdown(tmp_path, capsys):
    assert status(tmp_path, BEFORE) == 0
    assert "0 of 1 got slower" in capsys.readouterr().out


def test_a_machine_of_half_the_speed_is_no_slowdown(tmp_path):
    assert status(tmp_path, {name: 2 * value for name, value in BEFORE.items()}) == 0


def test_a_slowdown_is_flagged_and_named(tmp_path, capsys):
    assert status(tmp_path, BEFORE | {"ring": 15.0}) == 1
    out = capsys.readouterr().out
    assert "SLOWER" in out
    assert "1.50" in out


def test_a_slowdown_is_flagged_on_a_faster_machine_too(tmp_path):
    after = {name: value / 2 for name, value in BEFORE.items()} | {"ring": 10.0}
    assert status(tmp_path, after) == 1


LOOP = {
    "no logprobs": 8.0, "K = 20": 9.0, "K = 20, naive kernel": 12.0, "K = 20, ZeroMQ": 9.0,
    "K = 20, lists a token": 9.5,
}  # fmt: skip


def loop_status(tmp_path, after):
    """The exit status for two runs of the whole loop."""
    title = "decoding 64 greedy requests"
    old = written(tmp_path / "old.json", LOOP, title)
    return regressions.main([old, written(tmp_path / "new.json", after, title)])


def test_logprobs_that_cost_more_are_a_slowdown_of_the_loop(tmp_path, capsys):
    """The ablations share all parts but one with it: they are as slow, and no excuse."""
    slower = {name: value * (1 if name == "no logprobs" else 1.5) for name, value in LOOP.items()}
    assert loop_status(tmp_path, slower) == 1
    assert "1 of 1 got slower" in capsys.readouterr().out


def test_a_slower_model_is_no_slowdown_of_the_logprobs(tmp_path):
    assert loop_status(tmp_path, {name: 1.5 * value for name, value in LOOP.items()}) == 0


def test_another_device_is_not_compared(tmp_path, capsys):
    for name, device in (("old", "cpu"), ("new", "NVIDIA H100")):
        samples = {name: [value * 1e-6] for name, value in BEFORE.items()}
        one = from_samples(TITLE, samples, settings={"device": device})
        write_json(tmp_path / f"{name}.json", [one])
    files = [str(tmp_path / f"{name}.json") for name in ("old", "new")]
    assert regressions.main(files) == 2
    assert "nothing to compare" in capsys.readouterr().err
    assert regressions.main([files[0], files[0]]) == 0


@pytest.mark.parametrize("tolerance", ["nan", "-1", "inf"])
def test_a_tolerance_that_would_judge_nothing_is_refused(tmp_path, capsys, tolerance):
    with pytest.raises(SystemExit):
        status(tmp_path, BEFORE | {"ring": 100.0}, f"--tolerance={tolerance}")
    assert "is no share of a time" in capsys.readouterr().err


@pytest.mark.parametrize("median", ["0", "-1.0", "NaN", "Infinity", '"fast"', "null"])
def test_a_time_that_has_no_ratios_is_refused(tmp_path, capsys, median):
    path = written(tmp_path / "a.json", BEFORE)
    text = (tmp_path / "a.json").read_text()
    broken = text.replace('"median": 1e-05', f'"median": {median}')
    assert broken != text
    (tmp_path / "b.json").write_text(broken)
    assert regressions.main([path, str(tmp_path / "b.json")]) == 2
    assert "b.json holds no benchmark results" in capsys.readouterr().err


def test_the_tolerance_is_the_readers(tmp_path):
    assert status(tmp_path, BEFORE | {"ring": 11.0}) == 0
    assert status(tmp_path, BEFORE | {"ring": 11.0}, "--tolerance", "0.05") == 1
    assert status(tmp_path, BEFORE | {"ring": 15.0}, "--tolerance", "0.6") == 0


def test_a_peer_that_changed_alone_does_not_decide(tmp_path):
    slower = BEFORE | {"SysV fixed struct": 100.0}
    old = written(tmp_path / "old.json", slower)
    new = written(tmp_path / "new.json", slower | {"ZeroMQ copy=False": 10.0})
    assert regressions.main([old, new]) == 0


def test_a_slower_peer_is_no_slowdown(tmp_path):
    after = BEFORE | {"ZeroMQ copy=False": 400.0, "multiprocessing.Queue": 2000.0}
    assert status(tmp_path, after) == 0


def test_a_contender_that_is_gone_is_named(tmp_path, capsys):
    old = written(tmp_path / "old.json", BEFORE | {"ring, spin": 9.0})
    new = written(tmp_path / "new.json", BEFORE)
    assert regressions.main([old, new]) == 0
    assert "no longer measured: ring, spin in '530 KB, hot'" in capsys.readouterr().out


def test_files_without_anything_in_common_are_refused(tmp_path, capsys):
    assert status(tmp_path, BEFORE, title="another size") == 2
    assert "nothing to compare" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"comparisons": [{}], "environment": {}}'])
def test_what_is_no_results_file_is_refused_by_name(tmp_path, capsys, content):
    path = tmp_path / "broken.json"
    path.write_text(content)
    with pytest.raises(ResultsError, match="holds no benchmark results"):
        read_json(path)
    assert regressions.main([str(path), str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_results_survive_their_file(tmp_path):
    path = tmp_path / "a.json"
    written(path, BEFORE)
    found = read_json(path)
    assert found.comparisons[0].names == tuple(BEFORE)
    assert found.comparisons[0].speedup("ring", "ZeroMQ copy=False") == pytest.approx(4.0)
    assert found.comparisons[0].suite == "ring"
    assert found.environment["cpus"] == json.loads(path.read_text())["environment"]["cpus"]
