"""The measured pages come from the kept results by one command, the same each time."""

from dataclasses import replace

import pytest

from bench.report import pages, rows
from bench.report.comparison import Target, from_samples
from bench.report.files import ResultsError, read_json, write_json

pytestmark = pytest.mark.fast

RENDERERS = (pages.readme_part, pages.page)


def test_the_pages_are_what_the_command_makes_from_the_kept_results():
    for path, text in pages.rendered(pages.load(pages.RESULTS)).items():
        assert path.read_text() == text, f"{path.name}: run python -m bench report"


def test_the_check_finds_a_page_that_differs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "README", tmp_path / "README.md")
    monkeypatch.setattr(pages, "PAGE", tmp_path / "measurements.md")
    pages.README.write_text(f"{pages.BEGIN}\n{pages.END}\n")
    assert pages.main(["--check"]) == 1
    for path, text in pages.rendered(pages.load(pages.RESULTS)).items():
        path.write_text(text)
    assert pages.main(["--check"]) == 0
    pages.PAGE.write_text("")
    assert pages.main(["--check"]) == 1
    assert "measurements.md is out of date: run python -m bench report" in capsys.readouterr().out


def test_every_plot_and_file_that_the_pages_name_exists():
    for path, text in pages.rendered(pages.load(pages.RESULTS)).items():
        named = [word.partition(")")[0] for word in text.split("](")[1:]]
        local = [name for name in named if not name.startswith("http")]
        assert local
        for name in local:
            assert (path.parent / name.partition("#")[0]).exists(), f"{path.name} names {name}"
    for name in (word for word in pages.PAGE.read_text().split("`") if "bench/" in word):
        if name.startswith("bench/results/"):
            assert (pages.ROOT / name).is_file(), name


def test_readme_has_ten_rows_at_most():
    table = [line for line in pages.readme_part([], []).splitlines() if line.startswith("|")]
    assert 0 < len(table) - 2 <= 10
    whole = [line for line in pages.page([], []).splitlines() if line.startswith("|")]
    assert set(table) <= set(whole)


def kept(directory, date, factor, **changes):
    """A results file with one comparison of the ring, `factor` times as fast as ZeroMQ."""
    samples = {"ring": [1e-5], "ZeroMQ copy=False": [factor * 1e-5]}
    one = from_samples("530 KB, hot", samples)
    machine = {"date": date, "cpus": 2, "processor": "a test's", "versions": {}, "command": "none"}
    path = directory / f"{date}.json"
    write_json(path, [one], machine | changes)
    return read_json(path)


@pytest.mark.parametrize("render", RENDERERS)
def test_the_newest_result_of_a_kind_is_the_one_that_is_shown(tmp_path, render):
    kept(tmp_path, "2026-02-01", 3.0)
    kept(tmp_path, "2026-01-01", 9.0)
    text = render(pages.load(tmp_path), [])
    assert "3.0x the speed" in text
    assert "9.0x" not in text


def test_the_machine_and_the_command_of_a_figure_are_named(tmp_path):
    text = pages.page([kept(tmp_path, "2026-01-01", 3.0, **{"load before": 1.5})], [])
    assert "- `bench/results/2026-01-01.json`: 2026-01-01, 2 cores of a test's," in text
    assert "`none`, on a machine that was busy (load 1.5)." in text
    changes = {"load before": 9.0, "priority": "autogroup nice -20"}
    text = pages.page([kept(tmp_path, "2026-01-02", 3.0, **changes)], [])
    assert "busy (load 9.0), before its other programs (autogroup nice -20)." in text


def test_a_row_of_messages_has_their_slowest_hundredth(tmp_path):
    samples = {"ring": [1e-5], "multiprocessing.Pipe": [2e-5], "ZeroMQ msgpack": [3e-5]}
    events = {"ring": [1e-5] * 98 + [5e-4] * 2}
    titles = ("16 KB, 5 ms between messages", "16 KB, 5 ms between messages, beside two busy loops")
    found = [from_samples(title, samples, events=events) for title in titles]
    samples["ring"] = [1.5e-5]
    found[1] = from_samples(titles[1], samples)
    write_json(tmp_path / "a.json", found)
    lines = pages.page(pages.load(tmp_path), []).splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("| 16 KB to another"))
    cells = [line.split(" | ")[2] for line in lines[start : start + 3]]
    assert cells[0] == "3.0x the speed, 10 us (p99 500 us)"
    assert cells[1] == "2.0x the speed, 10 us (p99 500 us)"
    assert cells[2] == "2.0x the speed, 15 us"  # of the other title


@pytest.mark.parametrize("render", RENDERERS)
def test_what_no_file_holds_is_not_measured_and_never_guessed(tmp_path, render):
    text = render([kept(tmp_path, "2026-01-01", 3.0)], [])
    head = "| What | Beside | Two CPU cores | GPU | TPU |\n| --- | --- | --- | --- | --- |\n"
    table = text.partition(head)[2].partition("\n\n")[0].splitlines()
    measured = [line for line in table if "x the speed" in line]
    assert len(measured) == 1
    assert all(rows.NOT_MEASURED in line for line in table if line not in measured)


def test_a_result_of_a_gpu_goes_to_its_own_column(tmp_path):
    samples = {"log_softmax + top_k": [1e-3], "mosaic_gpu": [1e-4]}
    for clock, cell in (("device", "10.0x the speed"), ("host, a rehearsal", rows.NOT_MEASURED)):
        one = from_samples(
            "topk_logprobs R=64 V=131072 K=20 float32",
            samples,
            settings={"device": "NVIDIA H100 80GB HBM3", "clock": clock},
        )
        write_json(tmp_path / "gpu.json", [one])
        text = pages.readme_part(pages.load(tmp_path), [])
        row = next(line for line in text.splitlines() if "131072 logits, K = 20" in line)
        assert row.split(" | ")[-2].startswith(cell)


def test_a_result_of_a_tpu_goes_to_its_own_column(tmp_path):
    """The kernel's figure, not XLA's; a GPU's and a CPU's columns stay as they are."""
    samples = {"log_softmax + top_k": [1e-3], "xla": [5e-4], "mosaic_tpu": [1e-4]}
    one = from_samples(
        "topk_logprobs R=64 V=131072 K=20 float32", samples, settings={"device": "TPU v6 lite"}
    )
    write_json(tmp_path / "tpu.json", [one])
    for render in RENDERERS:
        lines = render(pages.load(tmp_path), []).splitlines()
        row = next(line for line in lines if "131072 logits, K = 20" in line)
        cells = row.strip("| ").split(" | ")[2:]
        assert cells == [rows.NOT_MEASURED] * 2 + ["10.0x the speed, 100 us"]


@pytest.mark.parametrize(
    ("steps", "cell"),
    [
        ([1.25, 1.25, 1.0, 1.25, 1.25], "80 % (80 to 80), +2,500 us a step"),
        ([1.25, 1.25, 0.8, 1.25, 0.8], "within noise: 80 % (80 to 125)"),
    ],
)
def test_a_cost_below_the_noise_is_no_figure(steps, cell):
    one = from_samples("decoding 64 greedy", {"no logprobs": [1.0] * 5, "K = 0": steps})
    figures = {"K = 0": {"% of tokens/s": 80.0, "adds us": 2500.0}}
    assert rows.share("K = 0")(replace(one, figures=figures)) == cell


def test_missed_limits_are_listed(tmp_path):
    path = tmp_path / "a.json"
    one = from_samples("16 KB, hot", {"ring": [1.0]})
    targets = (
        Target("speed", 4.0, 3.0, "x", at_least=True),
        Target("time", 4.0, 3.0, "us"),
        Target("H100", 4.0, None, "us"),
    )
    write_json(path, [replace(one, targets=targets)])
    for render in RENDERERS:
        text = render(pages.load(tmp_path), [])
        assert "Of the 3 limits that the benchmarks state, 1 were held, 1 missed and 1 not" in text
    assert "- 16 KB, hot: speed: 3 x, MISSED (at least 4 x)" in text  # on the page
    assert "| 16 KB, hot | H100: not measured (at most 4 us) |" in text


def test_only_plots_that_exist_are_shown():
    name = next(iter(pages.SHOWN))
    assert f"(docs/plots/{name}.svg)" in pages.readme_part([], [f"{name}.svg"])
    assert f"(plots/{name}.svg)" in pages.page([], [f"{name}.svg"])
    assert "docs/plots" not in pages.readme_part([], [])
    assert "(plots/" not in pages.page([], [])


@pytest.mark.parametrize(
    "content",
    ["", pages.BEGIN, f"{pages.END}\n{pages.BEGIN}", 2 * f"{pages.BEGIN}\n{pages.END}\n"],
)
def test_a_readme_without_its_markers_is_refused(content):
    with pytest.raises(ResultsError, match="needs the lines"):
        pages.insert(content, "text")


def test_inserting_twice_changes_nothing():
    page = f"before\n{pages.BEGIN}\nold\n{pages.END}\nafter\n"
    once = pages.insert(page, "new\n")
    assert once == f"before\n{pages.BEGIN}\nnew\n{pages.END}\nafter\n"
    assert pages.insert(once, "new\n") == once
