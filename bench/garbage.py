"""The cost of a call's result in garbage collection."""

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cost:
    """What one result holds, and how long collections take in a run of calls."""

    blocks: int  # memory blocks of one result
    tracked: int  # objects of one result that the garbage collector visits
    worst_pause: float  # seconds of the longest collection while the last results are alive
    worst_call: float  # seconds of the longest call


def cost(call: Callable[[], Any], calls: int, alive: int = 32) -> Cost:
    """Count one result, then call `calls` times, collecting, with the last `alive` results kept."""
    call()
    gc.collect()
    gc.disable()
    blocks, tracked = sys.getallocatedblocks(), len(gc.get_objects())
    result = call()
    blocks, tracked = sys.getallocatedblocks() - blocks, len(gc.get_objects()) - tracked
    del result
    gc.enable()
    pauses, begins, times = [0.0], [0.0], []
    kept: list[Any] = [None] * alive

    def watch(phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            begins[0] = time.perf_counter()
        else:
            pauses.append(time.perf_counter() - begins[0])

    gc.callbacks.append(watch)
    try:
        for n in range(calls):
            begin = time.perf_counter()
            kept[n % alive] = call()
            times.append(time.perf_counter() - begin)
    finally:
        gc.callbacks.remove(watch)
    return Cost(blocks, max(tracked, 0), max(pauses), max(times))
