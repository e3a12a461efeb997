"""The measuring tool: it refuses unequal contenders, and its ratios are of medians."""

import io
import json
import re
from dataclasses import replace

import pytest
from rich.console import Console

from bench import timing

pytestmark = pytest.mark.fast


def same(name, expected, actual):
    assert expected == actual, f"{name}: {expected} != {actual}"


def test_unequal_results_are_refused_before_anything_is_timed():
    calls = []
    contenders = {"right": lambda: 1, "wrong": lambda: calls.append(1) or 2}
    with pytest.raises(timing.BenchError, match="wrong differs from right"):
        timing.compare("t", contenders, check=same)
    assert len(calls) == 1


def test_contenders_are_interleaved_and_each_round_starts_with_another():
    order = []
    contenders = {
        name: (lambda name=name: order.append(name) or sum(range(20000))) for name in ("a", "b")
    }
    result = timing.compare("t", contenders, check=None, rounds=4, min_seconds=0.0)
    assert order[-8:] == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert len(result["a"].rounds) == 4


def test_a_slow_contender_sits_out_once_its_budget_is_spent(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def taking(seconds):
        def call():
            now[0] += seconds

        return call

    contenders = {"fast": taking(0.01), "slow": taking(1.0), "between": taking(0.2)}
    counts, calls = {}, []
    slow = contenders["slow"]
    contenders["slow"] = lambda: calls.append(1) or slow()
    for budget in (1.0, None):
        result = timing.compare(
            "t", contenders, check=None, rounds=9, min_seconds=0.02, budget=budget
        )
        counts[budget] = [len(result[name].rounds) for name in contenders]
        if budget:
            assert len(calls) == 1 + timing.LEAST_ROUNDS  # the first compiles
    assert counts == {1.0: [9, timing.LEAST_ROUNDS, 5], None: [9, 9, 9]}
    assert result["slow"].median == pytest.approx(1.0)


@pytest.mark.parametrize("rounds", [3, 2])
def test_rounds_are_told_where_contenders_had_different_numbers(rounds):
    one = timing.from_samples("t", {"fast": [1.0] * 3, "slow": [2.0] * rounds})
    out = io.StringIO()
    timing.print_table([one], Console(file=out, width=120))
    assert ("rounds" in out.getvalue()) == (rounds == 2)


def test_ratios_are_of_medians():
    result = timing.from_samples("t", {"slow": [4.0, 2.0, 9.0], "fast": [1.0, 2.0, 0.5]})
    assert result.speedup("fast", over="slow") == 4.0
    assert result["fast"].ratio == 0.25
    assert result["slow"].ratio == 1.0


def test_json_names_machine_and_settings(tmp_path):
    result = timing.from_samples("t", {"a": [1.0]}, settings={"K": 20})
    timing.write_json(tmp_path / "r" / "x.json", [result])
    content = json.loads((tmp_path / "r" / "x.json").read_text())
    assert content["comparisons"][0]["settings"] == {"K": 20}
    assert content["environment"]["versions"]["jax"]


@pytest.mark.parametrize("width", [70, 80, 120, 300])
def test_no_figure_and_no_word_is_cut_off_however_narrow_the_lines(width):
    names = ["ring", "K = 20, multiprocessing.Queue"]
    figures = {
        name: {f"thing{n} us": 530_432.0 + n for n in range(10)} | {"part: x us": 7.0}
        for name in names
    }
    one = timing.from_samples("title", {name: [8.87e-3, 8.01e-3, 10.7e-3] for name in names})
    out = io.StringIO()
    timing.print_table([replace(one, figures=figures)], Console(file=out, width=width))
    text = out.getvalue()
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert all(line.rstrip()[-1] in "┓┃┩│┘" for line in lines if line[0] in "┏┃┡│└")
    assert "\u2026" not in text  # the mark of a cut
    assert text.count("8.01 ms .. 10.7 ms") == len(names)
    assert all(text.count(f"530,{432 + n}") == len(names) for n in range(10))
    assert all(f"thing{n}" in text for n in range(10))
    assert "part:" not in text
    assert text.count("title") == 1
    ratios = "8.01 ms .. 10.7 ms \u2502 1.00x"  # beside its median, in 80 columns too
    assert (re.sub(" +", " ", text).count(ratios) == len(names)) == (width >= 80)


def test_the_slowest_hundredth_of_events_stands_beside_their_median():
    events = {"ring": [1e-5] * 95 + [4e-3] * 5}
    one = timing.from_samples("t", {"ring": [1e-5], "counted alone": [2e-5]}, events=events)
    out = io.StringIO()
    timing.print_table([one], Console(file=out, width=120))
    ring, other = (
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in out.getvalue().splitlines()
        if line.startswith("│")
    )
    assert ring[3:5] == ["10 us", "4 ms"]
    assert other[3:5] == ["", ""]
    timing.print_table(
        [timing.from_samples("t", {"ring": [1e-5]})], Console(file=(out := io.StringIO()))
    )
    assert "p99" not in out.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (4.5e-5, "45 us"), (3e-8, "0.03 us")]
)
def test_times_are_readable(seconds, text):
    assert timing.readable(seconds) == text
