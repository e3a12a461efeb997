"""Run the worker's own code in this process and keep everything that it computed and sent."""

import functools
import os
from collections import namedtuple
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np

from ipc.wire import MAX_DRAFTS
from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.declaration import EVERYTHING
from jax_specdec.device.drafting.drafters import MtpDrafter, NgramDrafter, NoDrafter
from jax_specdec.device.loop import step as step_module
from jax_specdec.device.loop.programs import Compiled
from jax_specdec.device.loop.state import LoopConfig
from jax_specdec.device.messages.row_logprobs import DraftReport, draft_rows
from jax_specdec.device.model.sharding import ONE_DEVICE
from jax_specdec.device.worker.worker import Worker
from jax_specdec.engine.config import EngineConfig
from jax_specdec.engine.queued_request import QueuedRequest
from jax_specdec.engine.worker_session import WorkerSession
from tests.support.random_params import random_params
from tests.support.requests import request as request

VOCAB = 32


@functools.cache
def random_model(vocab=VOCAB, scale=4.0, **changes):
    """Weights large enough that the model is decided, and repeats itself now and then."""
    config = ModelConfig.tiny(vocab_size=vocab, **changes)
    params = random_params(config, seed=1)
    return jax.tree.map(lambda x: x * x.dtype.type(scale) if x.ndim > 2 else x, params), config


def drafter(name, config, num_drafts=3):
    if name == "none":
        return NoDrafter(num_drafts)  # padded: the same compiled step as with drafts
    return NgramDrafter(num_drafts) if name == "ngram" else MtpDrafter(config, num_drafts)


class Sent(list):
    def send(self, data, /):
        self.append(np.array(data))


# What a draft message has of drafts, and the logits [B, D, V] that it was made of.
ReportWithLogits = namedtuple("ReportWithLogits", (*DraftReport._fields, "logits"))


@contextmanager
def draft_logits_kept():
    """Steps that are traced in here keep the drafts' logits too, for a test to look at."""

    def with_logits(*arguments):
        report_drafts = draft_rows(*arguments)
        if report_drafts is None:
            return None
        return lambda logits, drafts: ReportWithLogits(*report_drafts(logits, drafts), logits)

    with mock.patch.object(step_module, "draft_rows", with_logits):
        yield


compiled = functools.cache(Compiled)  # one compilation for all runs of a configuration


class Local:
    """A worker in this process and the engine's session of it; a test drives both sides.

    `distort` changes a step's output before it is packed: for negative controls. `options` are the
    worker's.
    """

    pid = os.getpid()
    state = property(lambda self: self.rank.state)  # of the engine's session

    def __init__(self, drafting, *, num_slots=3, max_length=96, chunk=8, model=None,
                 prefill_only=False, programs=None, parallel=ONE_DEVICE, accept=None,
                 distort=None, cuts=False, **options):  # fmt: skip
        params, config = model or random_model()
        settings = LoopConfig(
            model=config,
            drafter=drafter(drafting, config) if isinstance(drafting, str) else drafting,
            num_slots=num_slots,
            max_length=max_length,
            accept=accept,
            prefill_only=prefill_only,
            parallel=parallel,
        )
        self.sent, self.messages = Sent(), []
        self.outputs = []  # StepOutput as numpy, by step
        self.records = {}  # request id to its records
        self.chunks, self.distort = [], distort  # chunks that were run, as (slot, start)
        self.shared = compiled(settings, cuts=cuts)
        recorded = "step", "choose", "prefill_chunk", "score_chunk"
        recorders = {name: getattr(self, name) for name in recorded}
        self.chosen_apart = 0  # steps in two programs
        recording = SimpleNamespace(**vars(self.shared) | recorders)
        self.worker = Worker(settings, params, self.sent, prefill_chunk=chunk,
                             compiled=programs or recording, **options)  # fmt: skip
        self.ring = self  # the rank's worker, and its ring
        served = EngineConfig(vocab_size=config.vocab_size, num_slots=num_slots,
                              max_length=max_length, num_drafts=MAX_DRAFTS,
                              serves=EVERYTHING)  # fmt: skip
        self.rank = WorkerSession(self, served, prefill_only=prefill_only)

    def noted(self, program, *given, **options):
        with draft_logits_kept():
            state, output = program(*given, **options)
        self.outputs.append(jax.tree.map(np.asarray, output))
        return state, output

    def step(self, *given, **options):
        state, output = self.noted(self.shared.step, *given, **options)
        return state, self.distort(output) if self.distort else output

    def choose(self, *given, **options):
        self.chosen_apart += 1
        return self.noted(self.shared.choose, *given, **options)

    def prefill_chunk(self, params, state, *places, **static):
        self.chunks.append(tuple(map(int, places)))
        return self.shared.prefill_chunk(params, state, *places, **static)

    def score_chunk(self, params, state, slot, start, *asked, **static):
        self.chunks.append((int(slot), int(start)))
        return self.shared.score_chunk(params, state, slot, start, *asked, **static)

    def tell(self, command):
        self.worker.apply(command)

    def try_receive(self):
        return SimpleNamespace(data=self.sent.pop(0).tobytes()) if self.sent else None

    def admit(self, item, **job):
        self.rank.admit(QueuedRequest(request=item, **job))

    def advance(self, steps=1):
        """Make steps; the records that came."""
        records = []
        for _ in range(steps):
            self.worker.advance()
            while (update := self.rank.receive(0)) is not None:
                self.messages.append(update.message)
                records += list(update.records)
        for record in records:
            self.records.setdefault(record.request_id, []).append(record)
        return records

    def token_ids(self, request_id):
        return tokens_of(self.records[request_id])

    def decode_evicted(self, item, evict_at):
        """The records of a request that is evicted each time so many tokens have come."""
        records, evict_at = [], [*evict_at]
        self.admit(item)
        while not any(record.finish_reason for record in records):
            found = [record for record in self.advance() if record.request_id == item.id]
            records += found
            if any(record.reschedule for record in found):
                self.rank.admit(self.rank.leave(item.id))
            elif evict_at and sum(record.num_tokens for record in records) >= evict_at[0]:
                evict_at.pop(0)
                self.rank.evict(item.id, reschedule=True)
        assert not evict_at
        return records

    def drain(self, most=200):
        """Advance until nothing is under way; requests keep their slots."""
        records = []
        for _ in range(most):
            if not self.worker.busy:
                return records
            records += self.advance()
        raise AssertionError(f"still busy after {most} steps")


def run(requests, drafting, **options):
    """Decode `requests` as the engine does, admitting when a slot is free; returns the worker."""
    local, waiting, live = Local(drafting, **options), [*requests], 0
    while waiting or live:
        while waiting and local.rank.num_free:
            local.admit(waiting.pop(0))
            live += 1
        for record in local.advance():
            if record.finish_reason:
                local.rank.leave(record.request_id)
                live -= 1
    assert local.records.keys() == {request.id for request in requests}
    return local


def tokens_of(records):
    return [token for record in records for token in record.token_ids.tolist()]


def mixed_requests(
    count=7, seed=0, temperature=0.0, max_tokens=(6, 30), ks=(None, 0, 1, 5, 20, 3, 2)
):
    """Prompts of many lengths (one token, chunk borders), K from none to 20."""
    random = np.random.default_rng(seed)
    lengths = [1, 2, 8, 9, 10, 17, 25, 5, 16, 3][:count]
    return [
        request(
            f"r{index}",
            random.integers(0, VOCAB, length).tolist(),
            max_tokens=int(random.integers(*max_tokens)),
            temperature=temperature,
            top_p=0.9 if temperature else 1.0,
            seed=index,
            logprobs=ks[index % len(ks)],
        )
        for index, length in enumerate(lengths)
    ]
