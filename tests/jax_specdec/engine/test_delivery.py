"""Delivery through a real ring that is full, and around preemptions, by the worker's own code.

The worker runs in a thread of this process, so that the tests can inspect it.
"""

import contextlib
import itertools
import queue
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from ipc import RingReader, RingWriter
from ipc.errors import EndOfStream
from jax_specdec.control import ProcessStats, Shutdown
from jax_specdec.device.loop.state import LoopConfig
from jax_specdec.device.worker.worker import Worker
from jax_specdec.device.worker.worker_process import serve
from jax_specdec.engine.config import EngineConfig
from jax_specdec.engine.devices import Share
from jax_specdec.engine.engine import Engine
from jax_specdec.engine.worker_client import WorkerFailed
from jax_specdec.engine.worker_session import WorkerSession
from jax_specdec.records.batch import FinishReason
from tests.support import decoding
from tests.support.decoding import VOCAB, mixed_requests
from tests.support.processes import wait_for

SLOTS = 3


class WorkerThread:
    """A worker and its ring of one slot, for an `Engine`; both sides' numbers stay visible.

    `patience` messages are read only once the worker waits for room.
    """

    def __init__(self, *, patience=0):
        params, model = decoding.random_model()
        settings = LoopConfig(
            model=model, drafter=decoding.drafter("mtp", model), num_slots=SLOTS, max_length=96
        )
        self.reader = RingReader.create(1, 1 << 16)
        self.writer = RingWriter.attach(self.reader.name)
        self.patience, self.reads = patience, 0
        sender = SimpleNamespace(send=lambda words: self.writer.send(words, timeout=None))
        compiled = decoding.compiled(settings)
        worker = Worker(settings, params, sender, compiled=compiled, prefill_chunk=8)
        self.commands = queue.SimpleQueue()
        self.stats, self.beats = ProcessStats(), itertools.count()
        arguments = (worker, self.commands, lambda _: None, self.stats)
        self.thread = threading.Thread(target=serve, args=arguments, daemon=True)
        self.thread.start()

    pid = 0
    ended = True
    exit_status = None
    share = Share()
    ring = property(lambda self: self)
    heartbeat = property(
        lambda self: replace(self.stats.heartbeat, beats=next(self.beats), ready=True)
    )

    def tell(self, command):
        self.commands.put(command)
        return 0

    def end(self, cause):
        pass

    def receive(self, timeout):
        if self.reads < self.patience:
            # Each message finds a full ring and waits once, so `waits` counts the messages.
            self.reads += 1
            wait_for(lambda: self.writer.counters().waits >= self.reads)
        return self.reader.receive(timeout)

    def failure(self, cause):
        return WorkerFailed(str(cause))

    def stop(self, *, drain):
        del drain
        self.tell(Shutdown())
        while self.thread.is_alive():
            self.reader.try_receive()
            self.thread.join(0.01)
        self.writer.close()
        with contextlib.suppress(EndOfStream):
            while True:
                self.reader.receive(1)
        self.reader.close()


def engine_with(worker, first_generation=0):
    """An engine whose one worker is `worker`; its slots' generations count from the given one."""
    engine = Engine(
        EngineConfig(vocab_size=VOCAB, num_slots=SLOTS, max_length=96),
        start_worker=lambda config, **_: worker,
    )
    engine.sessions[0] = WorkerSession(
        worker, num_slots=SLOTS, max_length=96, first_generation=first_generation
    )
    return engine


def collect(engine, requests):
    """Records of each request, and every message."""
    records, messages = {item.id: [] for item in requests}, []
    for update in engine.generate(requests):
        messages.append(update.message)
        for record in update.records:
            records[record.request_id].append(record)
    return records, messages


def requests():
    return mixed_requests(5, max_tokens=(18, 24), ks=(None, 5))  # of two programs


@pytest.fixture(scope="module")
def expected():
    return decoding.run(requests(), "mtp")


def check(records, expected, *, exact=True):
    for item in requests():
        emitted = [t for record in records[item.id] for t in record.token_ids.tolist()]
        assert emitted == expected.token_ids(item.id)
        assert records[item.id][-1].finish_reason is FinishReason.LENGTH
        if item.params.logprobs is not None:
            got, wanted = (
                np.concatenate([record.logprobs for record in found])
                for found in (records[item.id], expected.records[item.id])
            )
            if exact:
                np.testing.assert_array_equal(got, wanted)
            else:
                np.testing.assert_allclose(got, wanted, atol=1e-4)


def test_a_full_ring_blocks_the_worker_and_loses_nothing(expected):
    worker = WorkerThread(patience=3)
    with engine_with(worker) as engine:
        records, messages = collect(engine, requests())
        assert worker.writer.counters().waits >= 3
    assert [message.step for message in messages] == list(range(len(messages)))
    check(records, expected)


def test_generations_wrap_around_while_slots_are_reused(expected):
    """Slots are given away under 2^32 - 1, then 0: the engine, the device and the wire agree."""
    with engine_with(WorkerThread(), first_generation=2**32 - 2) as engine:
        records, messages = collect(engine, requests())
    seen = {int(g) for message in messages for g in message.generation[message.num_tokens > 0]}
    assert seen == {2**32 - 1, 0}
    check(records, expected)
