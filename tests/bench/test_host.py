"""The host benchmark accepts equal content, notices unequal content, and judges its promise."""

from functools import partial

import pytest

from bench import host
from bench.timing import BenchError, compare


@pytest.mark.fast
@pytest.mark.parametrize("k", [0, 1, 20])
def test_all_contenders_deliver_the_same(k):
    calls = host.contenders(5, k)
    expected = calls[host.OURS]()
    assert len(expected) == 5
    for name, call in calls.items():
        host.same_content(name, expected, call())


@pytest.mark.fast
@pytest.mark.parametrize("name", [host.LISTS, host.OBJECTS, host.TOUCHED])
def test_different_content_is_noticed(name, monkeypatch):
    ours = host.contenders(5, 2)[host.OURS]
    other = partial(host.message_bytes, seed=1)
    monkeypatch.setattr(host, "message_bytes", other)
    wrong = host.contenders(5, 2)[name]
    with pytest.raises(BenchError, match="differs"):
        compare("unequal", {host.OURS: ours, name: wrong}, check=host.same_content, rounds=1)
