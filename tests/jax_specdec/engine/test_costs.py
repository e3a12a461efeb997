"""What the engine's thread pays: the same however many requests wait, and however long prompts are.

Work is counted in lines of Python, comparisons of ids and allocated bytes, which no machine
changes.
"""

import sys
import tracemalloc

import numpy as np
import pytest

from jax_specdec.control import Heartbeat, to_bytes
from jax_specdec.engine.config import EngineConfig, check
from jax_specdec.engine.devices import Share
from jax_specdec.engine.queued_request import QueuedRequest
from jax_specdec.engine.worker_session import WorkerSession
from jax_specdec.records.batch import FinishReason
from jax_specdec.records.processor_state import Progress
from jax_specdec.requests import Request, SamplingParams
from tests.support.scene import Scene

LONG = 128_000  # tokens of a long prompt
VOCAB = 200_000
CONFIG = EngineConfig(vocab_size=VOCAB, num_slots=32, max_length=LONG + 200, num_drafts=0)


class Id(str):
    """An id that counts how often it is compared."""

    compared = 0

    def __eq__(self, other):
        Id.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def work(call):
    """The lines and comparisons that a call took."""
    lines, Id.compared, before = 0, 0, sys.gettrace()

    def count(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return count

    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines + Id.compared


def work_with(count):
    """The most that each action took with two slots and `count` requests behind them."""
    scene = Scene(num_slots=2)
    scheduler, (session,) = scene.engine._scheduler, scene.engine.sessions
    params = SamplingParams(max_tokens=40)
    updates = scene.generate(
        [Request(id=Id(f"r{n}"), prompt_token_ids=(n % 7,), params=params) for n in range(count)]
    )
    next(updates)
    names = [Id(f"r{n}") for n in (count - 1, count // 2, 2, count - 2, 3)]
    aborts = [work(lambda name=name: scheduler.abort(name)) for name in names]
    assert not scheduler.abort("nobody")
    assert not scheduler.abort(names[0])  # it has ended
    ended = [record for _ in names for record in next(updates).records]
    assert {r.request_id for r in ended if r.finish_reason is FinishReason.ABORT} == {*names}
    releases, admissions = [], []
    for _ in range(5):
        releases.append(work(lambda: scheduler.abort(session.request_ids[0])))
        admissions.append(work(scheduler._admit))
        assert len(session.request_ids) == 2
    updates.close()
    scene.engine.close()
    return max(aborts), max(releases), max(admissions)


def test_aborting_and_admitting_cost_the_same_however_many_wait():
    for many, few in zip(work_with(1000), work_with(50), strict=True):
        assert 10 < many <= 1.1 * few


class MuteWorker:
    """Packs its commands, and sends them nowhere."""

    ring, heartbeat, share, pid = None, Heartbeat(), Share(), 0

    def tell(self, command):
        return len(to_bytes(command))


def request(name, length):
    ids = np.random.default_rng(length).integers(0, VOCAB, length)
    return Request(id=name, prompt_token_ids=ids, params=SamplingParams(max_tokens=100))


def admission(session, asked, emitted):
    """What the engine's thread does for a request that it gives a slot, as a call."""
    progress = Progress(token_ids=(7,) * emitted)

    def admit():
        check(asked, CONFIG)
        session.admit(QueuedRequest(request=asked, progress=progress))

    return admit


def allocated(call):
    """The most bytes that are allocated at one time."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("emitted", [0, 50])
def test_a_long_prompt_is_copied_and_none_of_its_tokens_is_touched(emitted):
    """Ids travel as one array of int32: a message of them, and what packs it, which grows."""
    copies = (3 if emitted else 2) + 0.6  # with the tokens so far the prompt is joined first
    session = WorkerSession(MuteWorker(), num_slots=32, max_length=CONFIG.max_length)
    for cost, most in ((work, 20), (allocated, copies * 4 * LONG)):
        asked = [request(f"{cost}{n}", length) for n, length in enumerate((1, 1, LONG))]
        _, short, long = (cost(admission(session, each, emitted)) for each in asked)
        assert long - short <= most
    assert work(lambda: request("another", LONG)) > LONG  # who makes the request does touch them
