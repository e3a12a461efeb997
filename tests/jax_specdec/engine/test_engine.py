"""Engine and workers as real processes: from prompts to records, and when a worker dies.

Every start of a worker takes seconds, so the tests share one engine, of which one test kills a
worker. Workers compile as `decoding` does, so that values can be compared bit by bit.
"""

import os
import signal
from dataclasses import replace
from unittest import mock

import jax
import numpy as np
import pytest

from jax_specdec.declaration import Serves
from jax_specdec.device.model.params import named_arrays
from jax_specdec.engine.config import EngineConfig
from jax_specdec.engine.engine import Engine
from jax_specdec.engine.errors import WeightsError, WorkerFailed
from jax_specdec.records.batch import FinishReason
from jax_specdec.requests import SamplingParams
from tests.support import decoding, quick_compile
from tests.support.decoding import VOCAB, mixed_requests, random_model
from tests.support.processes import wait_for
from tests.support.weights_by_version import check_scores


@pytest.fixture(autouse=True, scope="module")
def workers_compile_quickly():
    two_devices = "--xla_force_host_platform_device_count=2"  # of which each rank has its own
    with mock.patch.dict(os.environ, XLA_FLAGS=f"{quick_compile.FLAGS} {two_devices}"):
        yield


def config(weights, **changes):
    # Few messages may wait in a ring: however late a kill comes, no request has ended.
    sizes = {"num_slots": 3, "max_length": 96, "prefill_chunk": 8, "ring_slots": 2}
    serves = Serves.of([SamplingParams(logprobs=5)])
    sizes |= {"draft_width": "fixed", "serves": serves}
    return EngineConfig(vocab_size=VOCAB, weights=weights, **sizes | changes)


@pytest.fixture(scope="module")
def two_workers(weights):
    """Two workers; a lost one is replaced, and its requests continue. They end well."""
    changes = {"num_ranks": 2, "on_worker_loss": "restart", "resume_lost": True}
    changes |= {"restart_delay": 0.0}
    with Engine(config(weights, **changes)) as engine:
        engine.serve()
        wait_for(lambda: all(session.ready for session in engine.sessions))
        yield engine
    assert [session.worker.exit_status for session in engine.sessions] == [0, 0]


def asking(count=7, **limits):
    """Requests with one K or two with none, as every other K of a batch is another program."""
    return mixed_requests(count, ks=(5, 5, None), **limits)


def test_two_workers_deliver_what_one_process_computes(two_workers):
    requests = asking()
    numpy_ids = np.array(requests[0].prompt_token_ids, np.int32)
    requests[0] = replace(requests[0], prompt_token_ids=numpy_ids)
    expected = decoding.run(requests, "mtp")
    records, ranks = {item.id: [] for item in requests}, set()
    for update in two_workers.generate(requests):
        assert update.latency_ns > 0
        ranks.add(update.message.process_rank)
        for record in update.records:
            records[record.request_id].append(record)
    assert ranks == {0, 1}
    assert all(each.state.statistics.num_tokens > 0 for each in two_workers.sessions)
    for item in requests:
        emitted = [t for record in records[item.id] for t in record.token_ids.tolist()]
        assert emitted == expected.token_ids(item.id)
        assert records[item.id][-1].finish_reason is FinishReason.LENGTH
        if item.params.logprobs is not None:
            got = np.concatenate([record.logprobs for record in records[item.id]])
            wanted = np.concatenate([record.logprobs for record in expected.records[item.id]])
            np.testing.assert_array_equal(got, wanted)


def test_a_killed_rank_is_restarted_while_the_other_goes_on(two_workers):
    requests = asking(6, max_tokens=(40, 60))
    expected = decoding.run(requests, "mtp")
    ids, lost, after = {item.id: [] for item in requests}, [], set()
    first = two_workers.sessions[0].worker.pid
    for n, update in enumerate(two_workers.generate(requests)):
        for record in update.records:
            ids[record.request_id] += record.token_ids.tolist()
            assert record.finish_reason in (None, FinishReason.LENGTH)
        if update.lost:
            lost.append((update.process_rank, str(update.lost)))
        elif lost and update.records:
            after.add(update.process_rank)
        if not n:
            os.kill(first, signal.SIGKILL)
    assert ids == {item.id: expected.token_ids(item.id) for item in requests}

    def both_are_ready():
        list(two_workers.generate(asking(1)))  # workers are looked after while requests run
        return all(session.ready for session in two_workers.sessions)

    wait_for(both_are_ready)
    status = two_workers.status
    ((rank, why),) = lost
    assert rank == 0
    assert f"process rank 0 (pid {first}) was killed by signal 9" in why
    assert 1 in after
    assert [each.restarts for each in status] == [1, 0]
    assert status[0].pid != first
    assert [each.devices for each in status] == [("cpu:0",), ("cpu:1",)]
    assert [each.given for each in status] == ["local devices 0", "local devices 1"]


def test_weights_change_in_two_workers_while_requests_run(two_workers):
    """Arrays travel to both; every token is scored by the weights whose version it has."""
    other = jax.tree.map(lambda x: x * 1.25 if x.ndim > 2 else x, random_model()[0])
    requests = asking(6, max_tokens=(25, 40))
    records = {item.id: [] for item in requests}
    for n, update in enumerate(two_workers.generate(requests)):
        for record in update.records:
            records[record.request_id].append(record)
        if n == 8:
            assert two_workers.update_weights(named_arrays(other)) == 1
            with pytest.raises(WeightsError, match=r"it lacks .*has besides"):
                two_workers.update_weights({"head": np.zeros(3, np.float32)})
    versions = check_scores([random_model()[0], other], random_model()[1], requests, records)
    assert versions == {0, 1}
    assert [each.weights_version for each in two_workers.status] == [1, 1]


def test_a_worker_that_cannot_start_says_why(tmp_path, monkeypatch):
    (tmp_path / "queue.py").write_text("raise RuntimeError('the wrong queue')")
    monkeypatch.chdir(tmp_path)
    with (
        Engine(config("/nowhere/weights.safetensors")) as engine,
        pytest.raises(WorkerFailed, match=r"(?s)status 1 .*no checkpoint at /nowhere"),
    ):
        list(engine.generate(asking(1)))
