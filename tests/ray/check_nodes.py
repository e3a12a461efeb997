"""A model over two raylets: one placement group, processes joined by jax.distributed."""

import os
import re
import signal
import time

from jax_specdec.engine import Engine, EngineConfig, SamplingParams, Serves, byte_tokens
from jax_specdec.ray import RayConfig, RayEngine
from tests.ray.cluster import add_node, below, cluster_that_compiles, fixture, kill_raylet
from tests.support.processes import is_alive, wait_for
from tests.support.requests import request

TEXTS = ("def main(", "import os", "class A")
SMALL = {
    "vocab_size": byte_tokens.VOCAB_SIZE, "num_slots": 4, "max_length": 64, "prefill_chunk": 16,
    "drafter": "none", "serves": Serves.of([SamplingParams(logprobs=0)]),
}  # fmt: skip


cluster = fixture(cluster_that_compiles, 1, 1)


def requests(tokens):
    return [
        request(text, byte_tokens.encode(text, start_document=True), max_tokens=tokens, logprobs=0)
        for text in TEXTS
    ]


def ids(parts):
    found = {text: [] for text in TEXTS}
    for part in parts:
        found[part.request_id] += part.token_ids.tolist()
    return found


def parts_of(batches):
    return [part for batch in batches for part in batch]


def local_ids(tokens):
    with Engine(EngineConfig(**SMALL)) as engine:
        updates = engine.generate(requests(tokens))
        return ids([record for update in updates for record in update.records])


def test_two_nodes_compute_what_one_device_does(cluster):
    """A follower is killed, is stopped, and is lost with its node: the replica ends in 5 s each."""
    config = EngineConfig(
        **SMALL, tensor_parallel=2, processes=True, on_worker_loss="restart", resume_lost=True,
        restart_delay=0.05, max_attempts=9,
    )  # fmt: skip
    with RayEngine(config, RayConfig(nodes=2, start_timeout=200)) as engine:
        expected = local_ids(12)
        assert ids(parts_of(engine.generate(requests(12)))) == expected

        def said(reason):
            (now,) = engine.status
            words = " ".join((*now.events, now.problem))
            return re.search(f"process 1 of 2 on another node .*{reason}", words)

        def struck(blow, reason):
            """Strike in mid-run; how long the lead lived after it, in seconds."""
            wait_for(lambda: engine.status[0].workers, 60)
            (before,) = engine.status
            (lead,) = before.workers
            assert len(lead.phase) == 2  # the lead's, and its follower's
            node, actor, follower = other_node(cluster, before, lead)
            slow = iter(engine.generate(requests(40)))
            batches = [next(slow)]
            began = time.monotonic()
            os.kill(follower, signal.SIGSTOP if blow == "stop" else signal.SIGKILL)
            if blow == "lose node":
                os.kill(actor, signal.SIGKILL)
                kill_raylet(node)
            wait_for(lambda: not is_alive(lead.pid), 30)
            taken = time.monotonic() - began
            # At once: an engine that has no node for its followers is replaced, and its words too.
            wait_for(lambda: said(reason), 30)
            if blow == "lose node":
                add_node(cluster, 1)
            batches += list(slow)
            assert {text: found[:12] for text, found in ids(parts_of(batches)).items()} == expected
            (after,) = engine.status
            assert after.workers[0].pid != lead.pid
            wait_for(lambda: not is_alive(follower), 30)
            print(f"{blow}: the lead ended {taken:.2f} s after it")
            return taken

        taken = [
            struck("kill", "was killed by signal 9"),
            struck("stop", "sent no heartbeat for 3.5 seconds"),
            struck("lose node", "exited with status 1"),
        ]
        assert max(taken) < 5, taken


def other_node(cluster, status, lead):
    """The node that has the follower, the actor there, and the follower."""
    (found,) = [one for one in below(cluster, "jax_specdec.child") if one[2] != lead.pid]
    assert found[0].node_id != status.node
    return found
