"""A model over two raylets: one placement group, processes joined by jax.distributed."""

import os
import re
import signal
import time

import pytest

from jax_specdec.engine import Engine, EngineConfig, Request, SamplingParams, byte_tokens
from jax_specdec.ray import RayConfig, RayEngine
from tests.ray.cluster import cluster_of
from tests.support import quick_compile
from tests.support.processes import children_of, is_alive, wait_for

TEXTS = ("def main(", "import os", "class A")
SMALL = {
    "vocab_size": byte_tokens.VOCAB_SIZE, "num_slots": 4, "max_length": 64, "prefill_chunk": 16,
    "drafter": "none",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _cheap_compiling():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", quick_compile.FLAGS)
        patch.setenv("JAX_PLATFORMS", "cpu")
        yield


@pytest.fixture(scope="module")
def cluster():
    with cluster_of(1, 1) as made:
        yield made


def requests(tokens):
    return [
        Request(
            id=text,
            prompt_token_ids=byte_tokens.encode(text, start_document=True),
            params=SamplingParams(max_tokens=tokens, logprobs=0),
        )
        for text in TEXTS
    ]


def ids(batches):
    found = {text: [] for text in TEXTS}
    for batch in batches:
        for part in batch:
            found[part.request_id] += part.token_ids.tolist()
    return found


def local_ids(tokens):
    found = {text: [] for text in TEXTS}
    with Engine(EngineConfig(**SMALL)) as engine:
        for update in engine.generate(requests(tokens)):
            for record in update.records:
                found[record.request_id] += record.token_ids.tolist()
    return found


def test_two_nodes_compute_what_one_device_does_until_a_follower_is_killed(cluster):
    config = EngineConfig(
        **SMALL, tensor_parallel=2, processes=True, on_worker_loss="restart", resume_lost=True,
        restart_delay=0.05, max_attempts=5,
    )  # fmt: skip
    with RayEngine(config, RayConfig(nodes=2, start_timeout=200)) as engine:
        expected = local_ids(12)
        assert ids(engine.generate(requests(12))) == expected
        (status,) = engine.status
        (lead,) = status.workers
        assert len(lead.phase) == 2  # the lead's, and its follower's
        others = [node for node in cluster.workers if node.node_id != status.node]
        assert len(others) == 1
        (follower,) = [
            child
            for node in cluster.workers
            for process in node.all_processes["raylet"]
            for actor in children_of(process.process.pid)
            for child in children_of(actor)
            if b"jax_specdec.child" in cmdline(child) and child != lead.pid
        ]
        assert follower not in children_of(lead.pid)

        began, slow = 0.0, iter(engine.generate(requests(40)))
        batches = [next(slow)]
        os.kill(follower, signal.SIGKILL)
        began = time.monotonic()
        wait_for(lambda: not is_alive(lead.pid), 30)
        taken = time.monotonic() - began
        batches += list(slow)
        assert {text: found[:12] for text, found in ids(batches).items()} == expected
        (after,) = engine.status
        assert after.workers[0].restarts == 1
        assert after.workers[0].pid != lead.pid
        assert re.search(r"process 1 of 2 on another node .* was killed by signal 9",
                         " ".join(after.events))  # fmt: skip
        print(f"the lead ended {taken:.2f} s after its follower")
        assert taken < 20  # 5 s are the promise, with cores of its own


def cmdline(pid):
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()
