"""The host benchmark accepts equal content, notices unequal content, and judges its promise."""

import gc
import sys

import pytest

from bench import host
from bench.timing import BenchError, compare, from_samples


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


@pytest.mark.fast
@pytest.mark.parametrize(("ours", "verdict"), [(2.0, "held"), (3.5, "MISSED")])
def test_the_promise_is_judged_by_the_ratios_of_a_run(ours, verdict):
    samples = {host.OURS: [ours * 1e-4], host.LISTS: [1e-3], host.OBJECTS: [5e-3]}
    time, lists, objects = host.targets_of(from_samples("256 requests", samples))
    assert [target.verdict for target in (time, lists, objects)] == [verdict] * 3


def left_by(call):
    """The memory blocks of a call's result, and its objects that garbage collection visits."""
    call()
    gc.collect()
    gc.disable()
    blocks, tracked = sys.getallocatedblocks(), len(gc.get_objects())
    result = call()
    found = sys.getallocatedblocks() - blocks, len(gc.get_objects()) - tracked
    gc.enable()
    del result
    return found


@pytest.mark.fast
def test_one_call_leaves_few_objects_whatever_its_size():
    few_blocks, few_tracked = left_by(host.contenders(8, 0)[host.OURS])
    many_blocks, many_tracked = left_by(host.contenders(64, 20)[host.OURS])
    assert many_blocks < few_blocks + 100  # of 8064 values
    assert many_tracked < few_tracked + 20
    assert left_by(host.contenders(64, 20)[host.LISTS])[0] > 20 * many_blocks
