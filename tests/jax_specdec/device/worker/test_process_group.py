"""A worker of several processes: one publishes, all compute, and they end together."""

import os
import signal
import threading
import time
import uuid
from multiprocessing.connection import Listener
from pathlib import Path

import numpy as np
import pytest

from jax_specdec.control import WorkerConfig
from jax_specdec.declaration import Serves
from jax_specdec.device.worker.follower_process import Silent
from jax_specdec.device.worker.process_group import PlacedFollower
from jax_specdec.engine.config import EngineConfig
from jax_specdec.engine.engine import Engine
from jax_specdec.engine.errors import WorkerFailed
from jax_specdec.records.batch import FinishReason
from jax_specdec.requests import SamplingParams
from tests.support import decoding, quick_compile
from tests.support.decoding import VOCAB, request
from tests.support.processes import family, is_alive, marked, no_ring_is_left, wait_for

SECONDS = 10  # for a group to end: a second for its lead, the rest for a busy machine


@pytest.fixture(autouse=True)
def quick_compiling(monkeypatch):
    """Every process compiles everything: no time is spent on good machine code."""
    monkeypatch.setenv("XLA_FLAGS", quick_compile.FLAGS)


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch):
    """No ring stays in shared memory and no process runs on, not even an orphan."""
    name, value = "PROCESS_GROUP_TEST", uuid.uuid4().hex
    monkeypatch.setenv(name, value)
    yield
    assert no_ring_is_left()
    wait_for(lambda: not marked(f"{name}={value}"), SECONDS)


def config(weights, **changes):
    # Few messages may wait in a ring: however late a test kills, its requests have not ended.
    sizes = {
        "num_slots": 2, "max_length": 96, "prefill_chunk": 8, "drafter": "ngram", "ring_slots": 2,
    }  # fmt: skip
    serves = Serves.of([SamplingParams(logprobs=2, temperature=0.8)])
    group = {"tensor_parallel": 2, "processes": True, "serves": serves}
    return EngineConfig(vocab_size=VOCAB, weights=weights, **sizes | group | changes)


def requests(max_tokens):
    """One greedy and one sampled request, for which each process compiles few programs.

    Their prompts begin alike: all processes take over the same entries, or none goes on.
    """
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    return [
        request("greedy", prompt, max_tokens=max_tokens, logprobs=2),
        request("sampled", [*prompt, 7], max_tokens=max_tokens, logprobs=2, temperature=0.8,
                seed=5),
    ]  # fmt: skip


def check_rings(engine):
    """Check that the leads alone have a ring, each its own."""
    leads = {rank.worker.pid: rank.process_rank for rank in engine.sessions}
    processes = [pid for lead in leads for pid in (lead, *family(lead))]
    assert len(processes) == len(leads) * engine.config.tensor_parallel
    for pid in processes:
        maps = Path(f"/proc/{pid}/maps").read_text()
        mapped = [r.process_rank for r in engine.sessions if r.worker.ring.name in maps]
        assert mapped == ([leads[pid]] if pid in leads else [])


@pytest.mark.slow
def test_prefill_and_decode_groups_give_one_stream(weights):
    """The ids are those of one process on one device, the logprobs too, up to rounding."""
    items, ranks = requests(9), {}
    expected = decoding.run(items, "ngram")
    records = {item.id: [] for item in items}
    with Engine(config(weights, num_prefill_ranks=1)) as engine:
        for number, update in enumerate(engine.generate(items)):
            if number == 0:
                check_rings(engine)
            for record in update.records:
                records[record.request_id].append(record)
                ranks.setdefault(record.request_id, []).append(update.process_rank)
        for item in items:
            found = records[item.id]
            assert decoding.tokens_of(found) == expected.token_ids(item.id)  # no near tie was met
            reasons = [record.finish_reason for record in found if record.finish_reason]
            assert reasons == [FinishReason.LENGTH]
            got, wanted = (
                np.concatenate([record.logprobs for record in one])
                for one in (found, expected.records[item.id])
            )
            np.testing.assert_allclose(got, wanted, atol=1e-4)
            first, *rest = ranks[item.id]
            assert (first, {*rest}, found[0].num_tokens) == (1, {0}, 1)
        lead = engine.sessions[0].worker.pid
        group = [lead, *family(lead)]
        assert len(group) == 2
        stream = engine.generate(requests(60))
        next(stream)
        os.kill(lead, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(WorkerFailed, match=rf"rank 0 \(pid {lead}\) was killed by signal 9"):
            list(stream)
        assert time.monotonic() - began < SECONDS
        wait_for(lambda: not any(map(is_alive, group)), SECONDS)


def test_a_follower_may_be_killed_before_it_has_joined():
    with Engine(config("")) as engine:
        lead = engine.sessions[0].worker.pid
        wait_for(lambda: family(lead))
        (follower,) = family(lead)
        os.kill(follower, signal.SIGKILL)
        with pytest.raises(WorkerFailed) as error:
            list(engine.generate(requests(1)))
    assert f"process 1 of 2 (pid {follower}) was killed by signal 9" in str(error.value)


def test_what_a_user_can_mend_is_said_and_ends_the_group(tmp_path):
    with (
        Engine(config(str(tmp_path / "none"))) as engine,
        pytest.raises(WorkerFailed, match=r"(?s)status 1 .*no checkpoint at .*none"),
    ):
        list(engine.generate(requests(1)))


@pytest.mark.fast
def test_a_follower_cannot_publish():
    with pytest.raises(RuntimeError, match="publishes nothing"):
        Silent().send(np.zeros(16, np.uint32))


# A follower on another node: a line goes out, an exit status comes back --------------------------


@pytest.mark.fast
@pytest.mark.parametrize(
    ("answer", "status", "why"),
    [
        (b"-9 pid 7 at 10.0.0.2", -9, "pid 7 at 10.0.0.2"),
        (None, 1, "who started it has ended"),  # without an answer
    ],
)
def test_its_end_and_where_it_was_come_back(answer, status, why, tmp_path):
    path, heard = str(tmp_path / "launcher"), []
    listener = Listener(path, "AF_UNIX")

    def serve():
        with listener, listener.accept() as connection:
            heard.append(connection.recv_bytes())
            if answer is not None:
                connection.send_bytes(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    follower = PlacedFollower(path)
    assert follower.wait(0.0) is None  # it runs
    follower.tell("born\n")
    thread.join()
    assert [follower.wait(), follower.wait()] == [status, status]
    assert (follower.why, heard) == (why, [b"born\n"])


@pytest.mark.fast
def test_the_devices_of_a_node_are_its_part_of_all():
    one = WorkerConfig(vocab_size=32, tensor_parallel=8, processes=True)
    assert (one.devices_here, one.num_processes) == (8, 8)
    four = WorkerConfig(vocab_size=32, tensor_parallel=8, processes=True, group_nodes=4)
    assert (four.devices_here, four.num_processes) == (2, 8)
