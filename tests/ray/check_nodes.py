"""A model over two raylets: one placement group, processes joined by jax.distributed."""

import os
import re
import signal
import time

import pytest

from jax_specdec.engine import Engine, EngineConfig, Request, SamplingParams, byte_tokens
from jax_specdec.ray import RayConfig, RayEngine
from tests.ray.cluster import add_node, cluster_of, kill_raylet
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


def test_two_nodes_compute_what_one_device_does_whatever_becomes_of_the_follower(cluster):
    """A follower is killed, is stopped, and is lost with its node: the replica ends in 5 s each."""
    config = EngineConfig(
        **SMALL, tensor_parallel=2, processes=True, on_worker_loss="restart", resume_lost=True,
        restart_delay=0.05, max_attempts=9,
    )  # fmt: skip
    with RayEngine(config, RayConfig(nodes=2, start_timeout=200)) as engine:
        expected = local_ids(12)
        assert ids(engine.generate(requests(12))) == expected

        def said(reason):
            (now,) = engine.status
            return re.search(reason, " ".join((*now.events, now.problem)))

        def struck(strike, reason):
            """Strike in mid-run; how long the lead lived after it, in seconds."""
            wait_for(lambda: engine.status[0].workers, 60)
            (before,) = engine.status
            (lead,) = before.workers
            assert len(lead.phase) == 2  # the lead's, and its follower's
            node, actor, follower = other_node(cluster, before, lead)
            slow = iter(engine.generate(requests(40)))
            batches = [next(slow)]
            began = time.monotonic()
            strike(node, actor, follower)
            wait_for(lambda: not is_alive(lead.pid), 30)
            taken = time.monotonic() - began
            # At once: an engine that has no node for its followers is replaced, and its words too.
            wait_for(lambda: said(reason), 30)
            if strike is lose_node:
                add_node(cluster, 1)
            batches += list(slow)
            assert {text: found[:12] for text, found in ids(batches).items()} == expected
            (after,) = engine.status
            assert after.workers[0].pid != lead.pid
            wait_for(lambda: not is_alive(follower), 30)
            print(f"{strike.__name__}: the lead ended {taken:.2f} s after it")
            return taken

        def kill(node, actor, follower):
            os.kill(follower, signal.SIGKILL)

        def stop(node, actor, follower):
            os.kill(follower, signal.SIGSTOP)

        def lose_node(node, actor, follower):
            for pid in (actor, follower):
                os.kill(pid, signal.SIGKILL)
            kill_raylet(node)

        place = "process 1 of 2 on another node"
        taken = [
            struck(kill, f"{place} .* was killed by signal 9"),
            struck(stop, f"{place} .*sent no heartbeat for 3.5 seconds"),
            struck(lose_node, f"{place} .* exited with status 1"),
        ]
        assert max(taken) < 5, taken


def other_node(cluster, status, lead):
    """The node that has the follower, the actor there, and the follower."""
    (found,) = [
        (node, actor, child)
        for node in cluster.workers
        for process in node.all_processes["raylet"]
        for actor in children_of(process.process.pid)
        for child in children_of(actor)
        if b"jax_specdec.child" in cmdline(child) and child != lead.pid
    ]
    assert found[0].node_id != status.node
    return found


def cmdline(pid):
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()
