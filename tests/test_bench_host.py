"""The host benchmark compares equal content, notices unequal content, and its promise holds."""

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
def test_different_content_is_noticed(name):
    ours = host.contenders(5, 2)[host.OURS]
    data = host.message_bytes(5, 2, seed=1)
    makers = {
        host.LISTS: lambda: host.lists(5)(data),
        host.OBJECTS: lambda: host.objects(5)(data),
        host.TOUCHED: lambda: host.touched(host.columns(5, 2)(data)),
    }
    with pytest.raises(BenchError, match="differs"):
        compare(
            "unequal",
            {host.OURS: ours, name: makers[name]},
            check=host.same_content,
            rounds=1,
        )


def test_columns_are_three_times_faster_than_lists_and_fifteen_times_than_objects():
    """Issue-sized: 256 requests x 3 tokens at K = 20, interleaved, garbage collection on."""
    calls = host.contenders(256, 20)
    chosen = {name: calls[name] for name in (host.OURS, host.LISTS, host.OBJECTS)}
    found = compare("promise", chosen, check=host.same_content, rounds=9, min_seconds=0.01)
    assert found.speedup(host.OURS, host.LISTS) >= 3
    assert found.speedup(host.OURS, host.OBJECTS) >= 15


@pytest.mark.fast
def test_one_call_leaves_few_objects_whatever_its_size():
    few = host.cost(host.contenders(8, 0)[host.OURS], 1)
    many = host.cost(host.contenders(64, 20)[host.OURS], 1)
    lists = host.cost(host.contenders(64, 20)[host.LISTS], 1)
    assert many.blocks < few.blocks + 100  # of 8064 values
    assert many.tracked < few.tracked + 20
    assert lists.blocks > 20 * many.blocks
