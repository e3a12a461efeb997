"""What a cluster costs: the same requests through an engine here, and through one in an actor.

Both run the same worker, which has no model and emits as fast as it is read, or at a pace. Tokens
and logprobs are compared first, of every request. Then the two run in turn.
"""

import functools
import importlib
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from bench.ray_worker import PACE, TOKENS
from bench.timing import Comparison, Target, compare
from jax_specdec.engine import Engine, EngineConfig, Request, SamplingParams
from jax_specdec.engine.worker_client import WorkerProcess
from jax_specdec.export.column_builder import ColumnBuilder
from jax_specdec.export.token_columns import TokenColumns
from jax_specdec.ray import ColumnBatch, RayConfig, RayEngine, columns

REQUESTS, LENGTH, VOCABULARY = 256, 1024, 1000
LOCAL, CLUSTER = "an engine here", "RayEngine, one replica"
WORKER = (sys.executable, "-m", "jax_specdec.child", "bench.ray_worker")
STORE = 200_000_000  # bytes


def run(*, quick: bool) -> list[Comparison]:
    """Measure at K = 0, 5 and 20 at full speed, and at the pace of a model of 5 ms a step."""
    ray = importlib.import_module("ray")  # this module has its name
    ray.init(
        address="local", num_cpus=2, object_store_memory=STORE, include_dashboard=False,
        log_to_driver=False, logging_level="error",
    )  # fmt: skip
    try:
        cases = [(5, 5_000), (5, 0), (0, 0), (20, 0)]
        return [measured(k, pace, 3 if quick else 9) for k, pace in cases[: 2 if quick else 4]]
    finally:
        ray.shutdown()


def measured(k: int, pace: int, rounds: int) -> Comparison:
    """One case; `pace` in microseconds."""
    os.environ[PACE] = str(pace)
    config = EngineConfig(
        vocab_size=VOCABULARY, num_slots=REQUESTS, max_length=LENGTH + 8, num_drafts=TOKENS
    )
    make = functools.partial(Engine, start_worker=functools.partial(WorkerProcess, program=WORKER))
    cluster = RayConfig(
        devices={"CPU": 1}, environment={PACE: str(pace), "PYTHONPATH": os.getcwd()}
    )
    steps = LENGTH // TOKENS
    with make(config) as engine, RayEngine(config, cluster, make_engine=make) as fleet:
        calls: dict[str, Callable[[], Any]] = {
            LOCAL: lambda: [update.records for update in engine.generate(requests(k))],
            CLUSTER: lambda: list(fleet.generate(requests(k))),
        }
        before = fleet.traffic
        found = compare(
            f"{REQUESTS} requests, K = {k}, {steps} steps, "
            + (f"{pace / 1000:g} ms a step" if pace else "as fast as it is read"),
            calls,
            check=check,
            rounds=rounds,
            min_seconds=0.0,
            settings={"k": k, "pace_us": pace, "steps": steps},
        )
        after = fleet.traffic
    ours, theirs = found[CLUSTER].median, found[LOCAL].median
    runs = rounds + 2  # with those before the clock runs
    counted = {name: (after[name] - before[name]) / runs for name in before}
    tokens = REQUESTS * LENGTH
    figures = {
        LOCAL: {"us a step": theirs / steps * 1e6, "tokens/s": tokens / theirs},
        CLUSTER: {
            "us a step": ours / steps * 1e6,
            "tokens/s": tokens / ours,
            "batches": counted["batches"],
            "kB": counted["bytes"] / 1e3,
            "calls": counted["calls"],
        },
    }
    targets = (
        Target("more in each step", 0.3, (ours - theirs) / steps * 1e3, "ms"),
        Target(
            "tokens/s left", 90.0, statistics.median(found.kept(CLUSTER)) * 100, "%", at_least=True
        ),
    )
    return replace(found, figures=figures, targets=targets)


def requests(k: int) -> list[Request]:
    """All with one token of prompt, by which their tokens differ."""
    params = SamplingParams(max_tokens=LENGTH, logprobs=k)
    return [Request(id=f"r{n}", prompt_token_ids=(n,), params=params) for n in range(REQUESTS)]


def check(name: str, expected: Any, actual: Any) -> None:
    """Compare every request's tokens and logprobs."""
    del name
    wanted, found = _columns(expected), _columns(actual)
    assert sorted(wanted.request_id.tolist()) == sorted(found.request_id.tolist())
    places = {request_id: at for at, request_id in enumerate(found.request_id.tolist())}
    for at, request_id in enumerate(wanted.request_id.tolist()):
        one, other = wanted.of_request(at), found.of_request(places[request_id])
        for column in ("token_id", "position", "logprob", "token_rank", "kind"):
            assert np.array_equal(getattr(one, column), getattr(other, column)), column
        assert np.array_equal(one.topk.logprobs, other.topk.logprobs), "topk"  # type: ignore[arg-type]


def _columns(found: list[Any]) -> TokenColumns:
    if isinstance(found[0], ColumnBatch):
        return columns(found)
    builder = ColumnBuilder()
    for records in found:
        builder.add(records)
    return builder.columns()
