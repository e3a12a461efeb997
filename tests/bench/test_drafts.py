"""The pace of drafters: a rate while all slots decode, and the time until the last has ended."""

import itertools
from types import SimpleNamespace

import pytest

from bench import drafts
from bench.timing import BenchError


def engine(*steps):
    """One whose steps make these numbers of tokens, and end so many requests."""
    updates = [
        SimpleNamespace(
            records=[
                SimpleNamespace(num_tokens=tokens, finish_reason=int(at < ends))
                for at in range(max(ends, 1))
            ]
        )
        for tokens, ends in steps
    ]
    return SimpleNamespace(generate=lambda asked: iter(updates))


def test_the_rate_ends_before_the_makespan_does(monkeypatch):
    seconds = itertools.count()
    monkeypatch.setattr(drafts.time, "perf_counter", lambda: float(next(seconds)))
    three = engine((3, 0), (2, 1), (1, 1), (3, 1))  # a clock is read twice, and once in between
    pace = drafts.pace(three, ["a", "b", "c"], 3, slots=2)
    assert pace == (1 / 6, 2.0)
    with pytest.raises(BenchError, match="9 tokens, where 12 were asked for"):
        drafts.pace(three, ["a", "b", "c"], 4, slots=2)
