"""`bench compare`: a slowdown is flagged, a slower machine is not."""

import json

import pytest

from bench import regressions
from bench.comparison import from_samples
from bench.files import ResultsError, read_json, write_json

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


def test_the_tolerance_is_the_readers(tmp_path):
    assert status(tmp_path, BEFORE | {"ring": 11.0}) == 0
    assert status(tmp_path, BEFORE | {"ring": 11.0}, "--tolerance", "0.05") == 1
    assert status(tmp_path, BEFORE | {"ring": 15.0}, "--tolerance", "0.6") == 0


def test_a_peer_that_changed_alone_does_not_decide(tmp_path):
    slower = BEFORE | {"SysV fixed struct": 100.0}
    old = written(tmp_path / "old.json", slower)
    new = written(tmp_path / "new.json", slower | {"ZeroMQ copy=False": 10.0})
    assert regressions.main([old, new]) == 0


def test_a_peers_own_slowdown_is_nobodys_concern(tmp_path):
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
