"""What a replica says: the batches of its engine, in parts of a bounded size and up to a limit, and
why there are no more.
"""

import threading
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from jax_specdec.engine import EngineConfig
from jax_specdec.engine.errors import EngineClosed, RequestError, WorkerFailed
from jax_specdec.engine.queued_request import QueuedRequest, ended
from jax_specdec.ray.batch import unpacked
from jax_specdec.ray.replica import Replica
from jax_specdec.ray.replica_types import Submission
from jax_specdec.ray.send_queue import BEHIND_NS, MAX_BATCH_BYTES, MAX_WAITING_BYTES, SendQueue
from jax_specdec.records.batch import FinishReason
from tests.support.processes import wait_for
from tests.support.scene import long_requests

REASONS = [FinishReason.WORKER_LOST, FinishReason.ABORT, FinishReason.ATTEMPTS_EXHAUSTED]


def replica(**options):
    return Replica(0, EngineConfig(vocab_size=16, on_worker_loss="restart", **options))


@pytest.mark.parametrize(
    ("resume_lost", "expected"), [(True, [REASONS[1:]]), (False, [REASONS[:1], REASONS])]
)
def test_an_engines_end_keeps_requests_the_fleet_resumes(resume_lost, expected):
    """Another replica takes them; a batch that had nothing else is none."""
    ends = [
        ended(QueuedRequest(request=request), reason).batches
        for request, reason in zip(long_requests(3), REASONS, strict=True)
    ]
    steps = [ends[0], [*ends[0], *ends[1], *ends[2]]]
    made = replica(resume_lost=resume_lost)
    for batches in steps:
        made.send_queue.take(update(batches))
    made.send_queue.fail(WorkerFailed("no worker is left"))
    *batches, last = made.records(0.0)
    assert last == "no worker is left"
    found = [unpacked(batch).column("finish_reason").to_pylist() for batch in batches]
    assert found == expected


@pytest.mark.parametrize("mistake", [TypeError("a mistake"), ValueError("a mistake")])
def test_an_engines_mistake_is_raised_to_its_reader(mistake):
    made = replica()
    made.send_queue.fail(mistake)
    with pytest.raises(type(mistake), match="a mistake"):
        list(made.records(0.0))


def test_a_refused_request_is_no_loss_of_the_replica():
    made, errors = replica(), [RequestError("an id outside the vocabulary"), EngineClosed("closed")]
    engine = mock.Mock(**{"submit.side_effect": errors})
    submission = Submission(request=long_requests(1)[0])
    with pytest.raises(RequestError):
        made.submit_one(engine, submission)
    made.submit_one(engine, submission)
    assert list(made.records(0.0)) == ["closed"]


class Batch(int):
    """A batch of records that is a number, and ends requests for some reasons."""

    finish_reason = np.zeros(0)


def numbered(number, size, *reasons, latency=0):
    """An engine's update with one batch of records, from a message of `size` bytes."""
    batch = Batch(number)
    batch.finish_reason = np.array(reasons)
    return update((batch,), size, latency)


def update(batches, size=MAX_BATCH_BYTES, latency=None):
    return SimpleNamespace(
        message=SimpleNamespace(num_bytes=size),
        latency_ns=latency,
        lost=None,
        records=SimpleNamespace(batches=batches),
    )


def expecting(requests, make=list):
    """A queue that waits for more while any of so many requests is open."""
    queue = SendQueue(make)
    queue.expect(requests)
    return queue


def test_what_nobody_read_comes_in_parts_of_a_bounded_size():
    """An update that is larger than that comes alone."""
    queue = SendQueue(list)
    for number, share in enumerate([1.5] + [0.25] * 9):
        queue.take(numbered(number, int(share * MAX_BATCH_BYTES)))
    queue.fail(OSError("the end"))
    *parts, error = queue.read(0.0)
    assert parts == [[0], [1, 2, 3, 4], [5, 6, 7, 8], [9]]
    assert str(error) == "the end"


def test_an_engine_waits_for_a_backlog_not_for_a_batch():
    queue, size, count = expecting(1), MAX_BATCH_BYTES, 40
    most = MAX_WAITING_BYTES // size + 1  # the last one that was let in
    engine = threading.Thread(
        target=lambda: [queue.take(numbered(number, size)) for number in range(count)]
    )
    engine.start()
    found = []
    for part in queue.read(3600.0):
        found += part
        assert queue.steps <= len(found) + most + 1
        if len(found) == count:
            queue.close()
    engine.join()
    assert found == list(range(count))


def test_a_new_reader_hears_nothing_of_before():
    queue = SendQueue(list)
    queue.take(numbered(0, 1))
    earlier = queue.read(0.0)
    assert next(earlier) == [0]
    queue.take(numbered(1, 1))
    queue.clear()
    queue.take(numbered(2, 1))
    assert list(earlier) == []
    queue.close()
    assert list(queue.read(0.0)) == [[2]]


def test_the_last_end_of_all_does_not_wait_for_more():
    """With a pause of an hour, a reader gets it at once; while one request is open, it waits."""
    queue, parts = expecting(3), []
    queue.take(numbered(0, 1, 1, 0, 0))
    reading = queue.read(3600.0)
    assert next(reading) == [0]
    queue.take(numbered(1, 1, 0, 2))
    reader = threading.Thread(target=lambda: parts.append(next(reading)))
    reader.start()
    reader.join(0.2)  # it has begun to wait
    assert not parts
    queue.take(numbered(2, 1, 3))
    reader.join()
    assert parts == [[1, 2]]


def reader_of(queue, pause):
    """A thread that reads, and the batches that it has got."""
    parts = []
    thread = threading.Thread(target=lambda: parts.extend(queue.read(pause)))
    thread.start()
    return thread, parts


def test_a_batch_that_is_due_is_made_by_whoever_fills_it():
    """An engine's thread and its reader's would wait for one another at every call of NumPy."""
    makers, count = set(), 0
    queue = expecting(1, lambda taken: makers.add(threading.get_ident()) or list(taken))
    thread, parts = reader_of(queue, 0.0)
    while threading.get_ident() not in makers:
        queue.take(numbered(count, 1))
        count += 1
        threading.Event().wait(0.001)
    queue.close()
    thread.join()
    assert [number for part in parts for number in part] == list(range(count))


def test_a_reader_that_is_busy_gets_fewer_and_larger_batches():
    """Where the engine is behind too, one is made for it meanwhile."""
    made = []
    queue = expecting(1, lambda taken: made.append(list(taken)) or made[-1])
    reading = queue.read(0.0)
    queue.take(numbered(0, 1))
    assert next(reading) == [0]
    for number in range(1, 6):
        queue.take(numbered(number, 1))
    assert next(reading) == [1, 2, 3, 4, 5]
    assert made == [[0], [1, 2, 3, 4, 5]]
    queue.take(numbered(6, 1, latency=BEHIND_NS + 1))
    assert made[2:] == [[6]]
    assert next(reading) == [6]


def test_an_engine_that_is_behind_makes_larger_batches():
    queue = expecting(1)
    thread, parts = reader_of(queue, 0.2)
    queue.take(numbered(0, 1))
    wait_for(lambda: parts)
    threading.Event().wait(0.25)
    for number in (1, 2):
        queue.take(numbered(number, 1, latency=BEHIND_NS + 1))
    queue.take(numbered(3, 1, latency=BEHIND_NS))
    queue.close()
    thread.join()
    assert parts == [[0], [1, 2, 3]]


def test_behind_rows_that_a_mistake_has_lost_none_come():
    queue = expecting(1, lambda taken: 1 // 0 if taken[0] else list(taken))
    for number in range(4):
        queue.take(numbered(number, MAX_BATCH_BYTES))
    reading = queue.read(0.0)
    assert next(reading) == [0]
    with pytest.raises(ZeroDivisionError):
        next(reading)
    assert [type(error) for error in queue.read(0.0)] == [ZeroDivisionError]


def test_a_closing_queue_leaves_batches_to_its_reader():
    """An engine ends its requests then, and goes on to end its workers."""
    queue = SendQueue(lambda _: pytest.fail("it was made"))
    thread, parts = reader_of(queue, 0.0)
    wait_for(lambda: queue.waits == 0)
    with queue.ready:
        queue.close()
        queue.take(numbered(0, 1))
        queue.clear()
    thread.join()
    assert parts == []
