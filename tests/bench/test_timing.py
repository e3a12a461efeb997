"""The measuring tool: it refuses unequal contenders, and its ratios are of medians."""

import io

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


def test_times_are_those_of_the_clock():
    now = iter(range(100))
    result = timing.compare("t", {"a": lambda: 1, "b": lambda: 1}, check=same, rounds=3,
                            min_seconds=0.0, clock=lambda: next(now))  # fmt: skip
    assert [result[name].rounds for name in "ab"] == [(1, 1, 1)] * 2


def test_ratios_are_of_medians():
    result = timing.from_samples("t", {"slow": [4.0, 2.0, 9.0], "fast": [1.0, 2.0, 0.5]})
    assert result.speedup("fast", over="slow") == 4.0
    assert (result["fast"].ratio, result["slow"].ratio) == (0.25, 1.0)


def test_a_table_shows_every_figure_whole():
    events = {"a": [1e-3] * 100, "b": [2e-3] * 100}
    result = timing.from_samples("t", {"a": [1.0] * 3, "b": [3.0] * 2}, events=events)
    file = io.StringIO()
    timing.print_table([result], Console(file=file, width=200))
    lines = [" ".join(line.replace("\u2502", " ").split()) for line in file.getvalue().split("\n")]
    assert "b 3 s 3 s .. 3 s 2 2 ms 2 ms 3.00x" in lines
