"""The application of Ray Serve: it scales with its load, and a lost engine is replaced.

Its workers have no model: they emit a token in 10 ms, and every request asks for seconds of them.
"""

import concurrent.futures
import functools
import importlib
import os
import signal

import httpx
import pytest

from jax_specdec.engine import EngineConfig
from jax_specdec.ray import serve_app
from jax_specdec.serve.bounds import Bounds
from jax_specdec.serve.model import tiny_model
from tests.ray.cluster import EMITTER, below, cluster_that_leaves_nothing, engine_with
from tests.support.emitting_worker import PACE, TOKENS
from tests.support.processes import wait_for

SLOTS, LENGTH, PORT = 2, 512, 18433
URL = f"http://127.0.0.1:{PORT}/v1/completions"
# Ray Serve's own classes, when they are imported.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def ray_serve():
    return importlib.import_module("ray.serve")


@pytest.fixture(scope="module")
def cluster():
    with cluster_that_leaves_nothing(2) as made:
        yield made
        ray_serve().shutdown()


def served(**more):
    """An application with one replica, listening; the models' processes are scripted ones."""
    model = functools.partial(tiny_model, name="tiny", created=0, max_length=LENGTH)
    config = EngineConfig(
        vocab_size=model().vocab_size, num_slots=SLOTS, max_length=LENGTH, num_drafts=TOKENS,
        on_worker_loss="restart", resume_lost=True, max_restarts=0,
    )  # fmt: skip
    serve_app.deploy(
        serve_app.application(
            config, model, bounds=Bounds(max_body=1 << 20, max_open=64, timeout=60.0),
            variables={PACE: str(10_000 * TOKENS)}, make_engine=engine_with(EMITTER),
            **more,
        ),
        "127.0.0.1",
        PORT,
    )  # fmt: skip


def ask(tokens):
    """How many tokens an answer has, and who gave it."""
    asked = {"model": "tiny", "prompt": "a", "max_tokens": tokens, "ignore_eos": True,
             "logprobs": 1}  # fmt: skip
    answer = httpx.post(URL, json=asked, timeout=120)
    answer.raise_for_status()
    return len(answer.json()["choices"][0]["logprobs"]["token_logprobs"])


def replicas():
    """How many replicas run, as Ray Serve says."""
    (deployment,) = ray_serve().status().applications[serve_app.APPLICATION].deployments.values()
    return deployment.replica_states.get("RUNNING", 0)


def workers(cluster):
    """The workers that there are, and the replicas' processes that started them."""
    return [(worker, actor) for _, actor, worker in below(cluster, EMITTER[-1])]


def test_replicas_come_with_the_load_and_go_with_it(cluster):
    delays = {"upscale_delay_s": 1, "downscale_delay_s": 2, "metrics_interval_s": 0.5,
              "look_back_period_s": 2}  # fmt: skip
    served(max_replicas=2, scaling=delays)
    assert ask(20) == 20
    assert replicas() == 1
    with concurrent.futures.ThreadPoolExecutor(6 * SLOTS) as clients:
        asked = [clients.submit(ask, 400) for _ in range(6 * SLOTS)]
        wait_for(lambda: replicas() == 2, 60)
        assert len({actor for _, actor in workers(cluster)}) == 2
        assert [one.result() for one in asked] == [400] * 6 * SLOTS
    wait_for(lambda: replicas() == 1, 90)
    assert ask(20) == 20
    wait_for(lambda: len(workers(cluster)) == 1, 60)
    ray_serve().delete(serve_app.APPLICATION)


def test_a_replica_whose_engine_or_process_is_lost_is_replaced(cluster):
    served()
    assert ask(20) == 20
    for lost in range(2):  # the worker, which the engine may not replace; the replica itself
        (before,) = workers(cluster)
        os.kill(before[lost], signal.SIGKILL)

        def another(before=before):
            return [found for found in workers(cluster) if not {*found} & {*before}]

        wait_for(another, 120)
        wait_for(answers, 60)
    ray_serve().delete(serve_app.APPLICATION)


def answers():
    try:
        return ask(20) == 20
    except httpx.HTTPError:
        return False
