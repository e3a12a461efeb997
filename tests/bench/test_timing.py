"""The measuring tool: it refuses unequal contenders, and its ratios are of medians."""

import pytest

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
