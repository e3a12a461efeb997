"""What admitting a long prompt costs the engine's thread: its tokens are copied, never touched.

Work is counted in lines of Python, which no machine changes; and once in CPU seconds of the thread,
in which the time of other programs does not count.
"""

import os
import sys
import time

import numpy as np
import pytest

from jax_specdec.control import Connection, ControlClient, ControlServer, Vitals, to_bytes
from jax_specdec.engine.config import EngineConfig, check
from jax_specdec.engine.devices import Share
from jax_specdec.engine.queued_request import QueuedRequest
from jax_specdec.engine.worker_session import WorkerSession
from jax_specdec.records.processor_state import Progress
from jax_specdec.requests import Request, SamplingParams
from tests.support.processes import wait_for

LONG = 128_000
VOCAB = 200_000
CONFIG = EngineConfig(vocab_size=VOCAB, num_slots=32, max_length=LONG + 200, num_drafts=0)
CPU_SECONDS = 1e-3  # what an admission may take


class LinkedWorker:
    """A worker of which there is only the link: its commands travel, and nobody runs them."""

    ring = None
    share = Share()
    pid = os.getpid()

    def __init__(self, link):
        self.link = link

    @property
    def pulse(self):
        return self.link.pulse

    def tell(self, command):
        return self.link.tell(to_bytes(command))


@pytest.fixture
def session(tmp_path):
    server = ControlServer(folder=tmp_path)
    link = server.link()
    client = ControlClient(Connection(**vars(link.connection)), Vitals())
    client.start()

    def heard():
        server.pump()
        return link.pulse.beats > 0

    wait_for(heard)
    made = WorkerSession(
        LinkedWorker(link), num_slots=CONFIG.num_slots, max_length=CONFIG.max_length
    )
    made.client, made.server = client, server
    yield made
    server.close()


def request(name, length):
    ids = np.random.default_rng(length).integers(0, VOCAB, length)
    return Request(id=name, prompt_token_ids=ids, params=SamplingParams(max_tokens=100))


def admission(session, asked, emitted=0):
    """What the engine's thread does for a request that it gives a slot, as a call."""
    progress = Progress(token_ids=(7,) * emitted)

    def admit():
        check(asked, CONFIG)
        session.admit(QueuedRequest(request=asked, progress=progress))

    return admit


def lines_of(call):
    lines, before = 0, sys.gettrace()

    def count(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return count

    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize("emitted", [0, 50])
def test_a_long_prompt_takes_as_many_lines_as_a_short_one(session, emitted):
    asked = [request(f"r{n}", length) for n, length in enumerate((1, 1, LONG))]
    _, short, long = (lines_of(admission(session, each, emitted)) for each in asked)
    assert long <= short + 20
    # Negative control: who makes the request does touch them.
    assert lines_of(lambda: request("another", LONG)) > LONG


@pytest.mark.parametrize("emitted", [0, 50])
def test_a_long_prompt_takes_less_than_a_millisecond_of_the_thread_s_cpu_time(session, emitted):
    """The least of several: a shared core's caches are its programs' common luck."""
    taken = []
    for number in range(25):
        admit = admission(session, request(str(number), LONG), emitted)
        begun = time.thread_time()
        admit()
        taken.append(time.thread_time() - begun)
    assert min(taken) <= CPU_SECONDS
    commands = [session.client.commands.get(timeout=60) for _ in taken]
    lengths = {len(command.request.prompt_token_ids) for command in commands}
    assert lengths == {LONG + emitted}  # they did travel
    begun = time.thread_time()
    request("negative control", LONG)
    assert time.thread_time() - begun > CPU_SECONDS
