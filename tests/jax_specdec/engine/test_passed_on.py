"""An engine whose updates are passed on whole: to a sink, behind other engines' tokens, in step."""

import threading

import pytest

from jax_specdec.engine.config import EngineConfig
from jax_specdec.engine.errors import EngineClosed, WeightsError
from jax_specdec.export.step_rows import joined_rows, step_rows
from jax_specdec.ray.send_queue import SendQueue
from jax_specdec.records.batch import FinishReason
from jax_specdec.records.processor_state import Progress
from tests.support.processes import wait_for
from tests.support.scene import long_requests, parts_of
from tests.support.scripted_process import scripted_engine
from tests.support.scripted_worker import continuation


def engine_of(sink):
    """An engine with a thread of its own over a worker in this process, and that worker."""
    engine = scripted_engine()(EngineConfig(vocab_size=32, num_slots=3), sink=sink)
    return engine, engine.sessions[0].worker


def wait(streams):
    for stream in streams:
        for record in stream:
            pytest.fail(f"a stream beside a sink brought {record}")


def columns_of(queue, requests, emitted=None):
    queue.fail(EngineClosed("enough"))
    taken = [batches for batches in queue.read(0.0) if not isinstance(batches, BaseException)]
    rows = [step_rows(batches, {} if emitted is None else emitted) for batches in taken]
    return joined_rows(rows, {request.id: request for request in requests})


def test_a_request_goes_on_behind_what_another_engine_delivered():
    (request,) = long_requests(1)
    ids, logprobs = continuation(request)
    before = Progress(token_ids=tuple(ids[:8]), cumulative_logprob=sum(logprobs[:8]))
    queue = SendQueue(list)
    engine, _ = engine_of(queue)
    with engine:
        wait([engine.submit(request, progress=before)])
        found = columns_of(queue, [request], {request.id: 8})
    assert found.token_id.tolist() == ids[8:]
    assert found.position.tolist() == list(range(9, 21))


def test_an_engine_whose_sink_waits_waits_too():
    """Nothing is dropped, and nothing piles up: the worker makes no step meanwhile."""
    gate, seen = threading.Event(), []

    class Slow(SendQueue):
        def take(self, update):
            seen.append(update)
            gate.wait()
            super().take(update)

    slow = Slow(list)
    engine, worker = engine_of(slow)
    requests = long_requests(2)
    with engine:
        streams = [engine.submit(request) for request in requests]
        wait_for(lambda: seen)
        sent = worker.sent
        threading.Event().wait(0.05)
        assert (len(seen), worker.sent) == (1, sent)
        gate.set()
        wait(streams)
        assert len(columns_of(slow, requests)) == 40


def test_requests_that_are_submitted_together_begin_in_one_round():
    """But for one that is aborted before."""
    queue = SendQueue(list)
    engine, worker = engine_of(queue)
    requests = long_requests(3)
    with engine:
        with engine.together():
            streams = [engine.submit(request) for request in requests]
            assert engine.abort("r1")
            for _ in range(2):  # the engine's thread makes a whole round, and hears of the abort
                heard = threading.Event()
                parts_of(engine).streams.ask(heard.set)
                assert heard.wait(30)
            assert not worker.commands
        wait(streams)
        ends = [stream.finish_reason for stream in streams]
        assert ends == [FinishReason.LENGTH, FinishReason.ABORT, FinishReason.LENGTH]
        assert [type(command).__name__ for command in worker.commands[:2]] == ["Admit"] * 2
        assert "r1" not in [c.request.id for c in worker.commands if hasattr(c, "request")]
        assert len(columns_of(queue, requests)) == 40


def test_loaded_weights_are_used_on_command_or_forgotten(tmp_path):
    file = tmp_path / "new.safetensors"
    file.write_bytes(b"weights")
    engine, worker = engine_of(SendQueue(list))
    with engine:
        with engine.load_weights(file):
            assert (worker.answered, worker.weights_version) == (1, 0)
        assert engine.weights_version == 0
        assert type(worker.commands[-1]).__name__ == "Discard"
        with engine.load_weights(file) as loaded:
            assert worker.weights_version == 0
            assert loaded.use() == 1
        assert engine.weights_version == worker.weights_version == 1
        worker.refusal = None  # it never answers
        with pytest.raises(WeightsError, match="in time"), engine.load_weights(file, timeout=0.05):
            pytest.fail("nothing was loaded")
        assert engine.weights_version == 1
