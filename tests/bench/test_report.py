"""README's figures come from the kept results by one command, the same each time."""

import pytest

from bench.report import readme
from bench.report.comparison import Target, from_samples
from bench.report.files import ResultsError, read_json, write_json

pytestmark = pytest.mark.fast


def test_the_readme_is_what_the_command_makes_from_the_kept_results():
    results = readme.load(readme.RESULTS)
    part = readme.render(results, readme.images_in(readme.PLOTS))
    page = readme.README.read_text()
    assert readme.insert(page, part) == page, "run: python -m bench report"


def kept(directory, date, factor, **changes):
    """A results file with one comparison of the ring, `factor` times as fast as ZeroMQ."""
    one = from_samples(
        "16 KB, 5 ms between messages", {"ring": [1e-5], "ZeroMQ msgpack": [factor * 1e-5]}
    )
    machine = {"date": date, "cpus": 2, "processor": "a test's", "versions": {}, "command": "none"}
    path = directory / f"{date}.json"
    write_json(path, [one], machine | changes)
    return read_json(path)


def test_the_newest_result_of_a_kind_is_the_one_that_is_shown(tmp_path):
    kept(tmp_path, "2026-02-01", 3.0)
    kept(tmp_path, "2026-01-01", 9.0)
    text = readme.render(readme.load(tmp_path), [])
    assert "3.0x the speed" in text
    assert "9.0x" not in text


def test_what_no_file_holds_is_not_measured_and_never_guessed(tmp_path):
    text = readme.render([kept(tmp_path, "2026-01-01", 3.0)], [])
    table = [line for line in text.splitlines() if line.startswith("|")][2:]
    measured = [line for line in table if "x the speed" in line]
    assert len(measured) == 1
    assert all(readme.NOT_MEASURED in line for line in table if line not in measured)


def test_a_result_of_a_gpu_goes_to_its_own_column(tmp_path):
    samples = {"log_softmax + top_k": [1e-3], "mosaic_gpu": [1e-4]}
    for clock, cell in (("device", "10.0x the speed"), ("host, a rehearsal", readme.NOT_MEASURED)):
        one = from_samples(
            "topk_logprobs R=64 V=131072 K=20 float32",
            samples,
            settings={"device": "NVIDIA H100 80GB HBM3", "clock": clock},
        )
        write_json(tmp_path / "gpu.json", [one])
        text = readme.render(readme.load(tmp_path), [])
        row = next(line for line in text.splitlines() if "131072 logits, K = 20" in line or (
            line.startswith("| the same, K = 20")))  # fmt: skip
        assert row.split(" | ")[-1].startswith(cell)


def test_missed_limits_are_listed(tmp_path):
    path = tmp_path / "a.json"
    one = from_samples("16 KB, hot", {"ring": [1.0]})
    targets = (
        Target("speed", 4.0, 3.0, "x", at_least=True),
        Target("time", 4.0, 3.0, "us"),
        Target("H100", 4.0, None, "us"),
    )
    write_json(path, [type(one)(**{**vars(one), "targets": targets})])
    text = readme.render(readme.load(tmp_path), [])
    assert "Of the 3 limits that the benchmarks state, 1 were held, 1 missed and 1 not" in text
    assert "speed: 3 x, MISSED (at least 4 x)" in text


def test_only_plots_that_exist_are_shown(tmp_path):
    name = next(iter(readme.SHOWN))
    assert f"docs/plots/{name}.svg" in readme.render([], [f"{name}.svg"])
    assert "docs/plots" not in readme.render([], [])


@pytest.mark.parametrize(
    "readme",
    ["", readme.BEGIN, f"{readme.END}\n{readme.BEGIN}", 2 * f"{readme.BEGIN}\n{readme.END}\n"],
)
def test_a_readme_without_its_markers_is_refused(readme):
    with pytest.raises(ResultsError, match="needs the lines"):
        readme.insert(readme, "text")


def test_inserting_twice_changes_nothing():
    page = f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n"
    once = readme.insert(page, "new\n")
    assert once == f"before\n{readme.BEGIN}\nnew\n{readme.END}\nafter\n"
    assert readme.insert(once, "new\n") == once
