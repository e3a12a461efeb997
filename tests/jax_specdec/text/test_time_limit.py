"""Work that takes too long ends, and nothing is raised behind the end of other work."""

import threading
import time

import pytest

from jax_specdec.text.time_limit import OutOfTime, run_within


def endless():
    while True:
        pass


def test_endless_work_ends_in_its_thread_alone():
    ended = []

    def run():
        try:
            run_within(0.05, endless)
        except OutOfTime as error:
            ended.append(str(error))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert ended == ["it takes longer than 0.05 seconds"] * 3


def test_work_that_ends_at_the_limit_has_a_result_or_an_error():
    """Whichever it is, no exception comes later."""
    results = 0
    for _ in range(200):
        until = time.monotonic() + 0.001
        try:
            results += run_within(0.001, lambda until=until: wait(until))
        except OutOfTime:
            continue
        sum(range(100))
    assert 0 <= results <= 200


def wait(until):
    while time.monotonic() < until:
        pass
    return 1


def test_errors_of_the_work_are_its_own():
    with pytest.raises(ZeroDivisionError):
        run_within(60, lambda: 1 // 0)
    assert run_within(60, lambda: "done") == "done"
