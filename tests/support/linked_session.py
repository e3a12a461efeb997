"""A worker session whose worker is only a link: commands travel, and nobody runs them."""

import os

import numpy as np

from jax_specdec.control import to_bytes
from jax_specdec.engine.config import EngineConfig, check
from jax_specdec.engine.devices import Share
from jax_specdec.engine.queued_request import QueuedRequest
from jax_specdec.engine.worker_session import WorkerSession
from jax_specdec.records.processor_state import Progress
from jax_specdec.requests import Request, SamplingParams

LONG = 128_000  # tokens of a long prompt
VOCAB = 200_000
CONFIG = EngineConfig(vocab_size=VOCAB, num_slots=32, max_length=LONG + 200, num_drafts=0)


class LinkedWorker:
    """Sends its commands through `link`."""

    ring = None
    share = Share()
    pid = os.getpid()

    def __init__(self, link):
        self.link = link

    @property
    def heartbeat(self):
        return self.link.heartbeat

    def tell(self, command):
        return self.link.tell(to_bytes(command))


def session_of(worker):
    return WorkerSession(worker, num_slots=CONFIG.num_slots, max_length=CONFIG.max_length)


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
