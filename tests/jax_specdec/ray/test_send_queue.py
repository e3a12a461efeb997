"""What waits in a replica for its reader: in order, in parts of a bounded size, up to a limit."""

import threading
from types import SimpleNamespace

import numpy as np

from jax_specdec.ray.send_queue import MAX_BATCH_BYTES, MAX_WAITING_BYTES, SendQueue


class Batch(int):
    """A batch of records that is a number, and ends requests for some reasons."""

    finish_reason = np.zeros(0)


def update(number, size, *reasons):
    """An engine's update with one batch of records, from a message of `size` bytes."""
    batch = Batch(number)
    batch.finish_reason = np.array(reasons)
    return SimpleNamespace(
        message=SimpleNamespace(num_bytes=size),
        lost=None,
        records=SimpleNamespace(batches=(batch,)),
    )


def test_what_nobody_read_comes_in_parts_of_a_bounded_size():
    queue, size = SendQueue(), MAX_BATCH_BYTES // 4
    for number in range(10):
        queue.take(update(number, size))
    queue.fail(OSError("the end"))
    *parts, error = queue.read(0.0)
    assert parts == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert str(error) == "the end"


def test_an_update_that_is_larger_than_a_batch_comes_alone():
    queue = SendQueue()
    for number in range(3):
        queue.take(update(number, 3 * MAX_BATCH_BYTES))
    queue.close()
    assert list(queue.read(0.0)) == [[0], [1], [2]]


def test_the_engine_waits_where_too_much_waits():
    queue, size, count = SendQueue(), MAX_BATCH_BYTES, 40
    most = MAX_WAITING_BYTES // size + 1  # the last one that was let in
    engine = threading.Thread(
        target=lambda: [queue.take(update(number, size)) for number in range(count)]
    )
    engine.start()
    found = []
    for part in queue.read(0.0):
        found += part
        assert queue.steps <= len(found) + most + 1
        if len(found) == count:
            queue.close()
    engine.join()
    assert found == list(range(count))


def test_whoever_is_done_with_a_reader_hears_nothing_that_came_before():
    queue = SendQueue()
    queue.take(update(0, 1))
    earlier = queue.read(0.0)
    assert next(earlier) == [0]
    queue.take(update(1, 1))
    queue.clear()
    queue.take(update(2, 1))
    assert list(earlier) == []
    queue.close()
    assert list(queue.read(0.0)) == [[2]]


def test_the_last_end_of_all_does_not_wait_for_more():
    """With a pause of an hour, a reader gets it at once; while one request is open, it waits."""
    queue, parts = SendQueue(), []
    queue.expect(3)
    queue.take(update(0, 1, 1, 0, 0))
    reading = queue.read(3600.0)
    assert next(reading) == [0]
    queue.take(update(1, 1, 0, 2))
    reader = threading.Thread(target=lambda: parts.append(next(reading)))
    reader.start()
    reader.join(0.2)  # it has begun to wait
    assert not parts
    queue.take(update(2, 1, 3))
    reader.join()
    assert parts == [[1, 2]]
