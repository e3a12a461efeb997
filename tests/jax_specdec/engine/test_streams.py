"""Requests that join a running engine: their order, bounds, ends, and what their streams tell."""

import asyncio
import collections
import concurrent.futures
import threading

import pytest

from jax_specdec.engine.config import EngineConfig
from jax_specdec.engine.errors import EngineClosed, StreamBehind, WorkerFailed
from jax_specdec.engine.streams import MAX_UPDATES_AHEAD
from jax_specdec.records.batch import FinishReason
from jax_specdec.requests import RequestError
from tests.support.processes import wait_for
from tests.support.requests import request as request_of
from tests.support.scene import Scene, long_requests
from tests.support.scripted_process import scripted_engine
from tests.support.scripted_worker import VOCAB, continuation
from tests.support.streaming import StreamingScene


def request(name, max_tokens=5):
    return request_of(name, (3,), max_tokens=max_tokens, logprobs=0)


def expected(requests):
    return {one.id: continuation(one)[0] for one in requests}


def test_a_short_request_waits_for_no_long_one():
    """Steps of the worker from the submission of a 2-token request to its first token."""
    steps = []
    for beside in (0, 7):
        scene = StreamingScene(num_slots=8)
        (worker,) = scene.workers
        longs = [scene.submit(request(f"long{n}", 50)) for n in range(beside)]
        while not all(stream.num_waiting for stream in longs):
            scene.round()
        before = worker.step
        worker.rng.randint = lambda low, high: low  # its prompt is short, and nothing is drafted
        stream = scene.submit(request("short", 2))
        while not stream.num_waiting:
            scene.round()
        steps.append(worker.step - before)
        scene.engine.close()
    assert 1 <= steps[0] <= steps[1] <= steps[0] + 3


def test_a_request_on_its_way_to_the_queue_counts_once():
    """Another thread submits just when the engine's own has queued the first request."""
    scene = StreamingScene(num_slots=1, max_waiting=2)
    begin = scene.scheduler.enqueue

    def begun(queued, **how):
        begin(queued, **how)
        if not other.ident:
            other.start()
            other.join(0.2)  # it ends by then where it need not wait for this thread

    other = threading.Thread(target=scene.submit, args=(request("second"),))

    scene.scheduler.enqueue = begun
    scene.submit(request("first"))
    scene.round()
    other.join()
    scene.finish()
    assert scene.tokens("second") == continuation(request("second"))[0]  # it was not refused


def test_what_cannot_be_served_is_refused_where_it_is_submitted():
    scene = StreamingScene()
    with pytest.raises(RequestError, match="exceed the 64 tokens of a slot"):
        scene.submit(request("long", 64))
    for _ in range(2):  # it is free again once the first one has ended
        scene.submit(request("twice"))
        with pytest.raises(RequestError, match="'twice' is that of an open request"):
            scene.submit(request("twice"))
        scene.finish()
    for requests, said in (
        ([request("r"), request("long", 64)], "exceed the 64 tokens of a slot"),
        ([request("r"), request("s"), request("r")], "'r' occurs 2 times"),
    ):
        with pytest.raises(RequestError, match=said):
            next(scene.engine.generate(requests))
    assert not scene.open_streams.open_ids


def test_generate_has_the_records_of_its_requests_alone():
    """With a stream and another `generate` at the same time, each of which ends in its own way."""
    scene = StreamingScene(num_slots=3)
    mine, others = long_requests(4), [request(f"other{n}") for n in range(3)]
    scene.submit(request("stream", 40))
    with pytest.raises(RequestError, match="'stream' is that of an open request"):
        next(scene.engine.generate([request("stream")]))
    left = scene.generate(others)
    next(left)
    got = collections.defaultdict(list)
    for record in (record for update in scene.generate(mine) for record in update.records):
        got[record.request_id] += record.token_ids.tolist()
    assert got == expected(mine)
    left.close()
    assert scene.open_streams.readers == []
    scene.finish()
    assert scene.tokens("stream") == continuation(request("stream", 40))[0]


@pytest.mark.parametrize("num_ranks", [1, MAX_UPDATES_AHEAD + 1])
def test_a_waiting_reader_is_served_before_the_engine_waits(num_ranks):
    """Also where one round brings more than may wait."""
    scene = StreamingScene(num_ranks=num_ranks, num_slots=1)
    updates = scene.open_streams.generate(long_requests(num_ranks))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        taken = pool.submit(next, updates)
        wait_for(lambda: updates.changed._waiters)
        while not updates.num_waiting:
            scene.round()
        if num_ranks > 1:
            assert not updates.has_room
        scene.round()
        assert taken.result(30).process_rank in range(num_ranks)
    scene.engine.close()


def test_an_engine_nobody_reads_waits_unless_others_read():
    scene = StreamingScene()
    updates = scene.open_streams.generate(long_requests(2))
    scene.round(MAX_UPDATES_AHEAD + 4)
    (worker,) = scene.workers
    sent = worker.sent
    assert updates.num_waiting == MAX_UPDATES_AHEAD
    scene.submit(request("r"))
    while scene.streams["r"].finish_reason is None:
        scene.round()
    assert worker.sent > sent
    assert not scene.open_streams.wakeup.ready()
    while updates.num_waiting:
        next(updates)
    assert scene.open_streams.wakeup.ready()
    scene.finish()


def test_a_deadline_ends_a_request_that_runs_or_waits():
    scene = StreamingScene(num_slots=1)
    scene.submit(request("runs", 60), deadline=0.2)
    scene.submit(request("waits"), deadline=0.1)
    scene.submit(request("stays"), deadline=1e6)
    scene.round()
    scene.clock.time += 0.15
    scene.round(2)
    assert scene.streams["waits"].finish_reason is FinishReason.DEADLINE
    assert scene.streams["runs"].finish_reason is None
    scene.clock.time += 0.15
    scene.finish()
    assert scene.streams["runs"].finish_reason is FinishReason.DEADLINE
    tokens = continuation(scene.streams["runs"].request)[0]
    assert 0 < len(scene.tokens("runs")) < 60
    assert scene.tokens("runs") == tokens[: len(scene.tokens("runs"))]
    assert scene.streams["stays"].finish_reason is FinishReason.LENGTH


def test_a_slow_consumer_is_told_and_not_waited_for():
    scene = StreamingScene(max_backlog=4)
    scene.submit(request("slow", 60))
    other = scene.submit(request("other", 20))
    for _ in range(200):
        scene.round()
        scene.take("other")
        if not scene.open_streams.open_ids:
            break
    assert other.finish_reason is FinishReason.LENGTH
    slow = scene.streams["slow"]
    assert slow.num_waiting == 4
    for _ in range(4):
        next(slow)
    with pytest.raises(StreamBehind, match=r"request 'slow': 4 records wait .*max_backlog"):
        next(slow)
    scene.submit(request("slow"))  # its id is free, and it gets no record of the old one
    scene.finish()
    assert scene.tokens("slow") == continuation(request("slow"))[0]
    assert all(session.num_free == 2 for session in scene.engine.sessions)


def test_closing_ends_what_is_open():
    scene, never_served = StreamingScene(num_slots=1), Scene()
    for name in ("runs", "waits"):
        scene.submit(request(name, 50))
    scene.round()
    for one in (scene, never_served):
        one.engine.close()
        with pytest.raises(EngineClosed, match="closed"):
            one.engine.submit(request("late"))
    for name in ("runs", "waits"):
        assert [*scene.streams[name]][-1].finish_reason is FinishReason.ABORT


def test_a_lost_worker_ends_streams_with_record_and_error():
    scene = StreamingScene(num_slots=1, faults={0: [3]})
    for name in ("runs", "waits"):
        scene.submit(request(name, 50))
    with pytest.raises(WorkerFailed):
        scene.finish()
    for stream in list(scene.streams.values()):
        assert stream.finish_reason is FinishReason.WORKER_LOST
        for call in (lambda stream=stream: list(stream), lambda: scene.submit(request("late"))):
            with pytest.raises(WorkerFailed):
                call()
    health = scene.engine.health()
    assert not health.alive
    assert "the engine has stopped" in health.problems[0]


@pytest.fixture
def engine():
    """With its thread; its worker answers at once."""
    config = EngineConfig(vocab_size=VOCAB, num_slots=2, max_length=64)
    with scripted_engine()(config) as made:
        yield made


def test_cancelling_an_asyncio_task_ends_its_request_alone(engine):
    requests = [request(f"{n}", 20) for n in range(6)]

    async def read(one):
        return [t async for record in engine.stream(one) for t in record.token_ids.tolist()]

    async def read_a_little():
        async for _ in engine.stream(request("endless", 60)):
            await asyncio.sleep(3600)

    async def main():
        left = asyncio.create_task(read_a_little())
        got = await asyncio.gather(*map(read, requests))
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        assert left.cancelled()
        return got

    assert asyncio.run(main()) == [continuation(one)[0] for one in requests]
    assert engine.drain(30)
    assert "endless" not in engine.running


def test_ended_requests_do_not_wait_for_their_deadlines():
    scene = StreamingScene(num_slots=1)
    scene.submit(request("r0", 1), deadline=1e6 + 1)
    scene.submit(request("last", 1), priority=1, deadline=1e6)  # before those of all others
    for n in range(1, 300):
        scene.submit(request(f"r{n}", 1), deadline=1e6 + 1)
        while f"r{n - 1}" in scene.open_streams.open_ids:
            scene.round()
    assert "last" in scene.open_streams.open_ids
    assert len(scene.open_streams.deadlines) < 100
    scene.finish()
