"""The engine that `engine_deaths` kills or whose processes it kills; prints what became of it.

`python -m tests.heavy.engine_driver scripted|real SECONDS` runs requests three times, then closes
the engine. A worker may be silent for so many seconds. A line of JSON, {"ends": ...}, for each run.
"""

import contextlib
import functools
import json
import sys

from jax_specdec.engine import Engine, EngineConfig, SamplingParams, Serves
from jax_specdec.engine.errors import WorkerFailed
from jax_specdec.engine.worker_client import WorkerProcess
from tests.support import scripted_process
from tests.support.requests import request

RUNS = 3
REQUESTS = 12


def settings(kind, silence):
    """Two workers; the real one is a group of two processes."""
    common = {
        "num_ranks": 2, "on_worker_loss": "restart", "resume_lost": True, "restart_delay": 0.05,
        "heartbeat_timeout": float(silence), "num_slots": 2, "max_length": 96,
    }  # fmt: skip
    if kind == "scripted":
        return EngineConfig(vocab_size=32, **common)
    common["serves"] = Serves.of([SamplingParams()])
    group = {"tensor_parallel": 2, "processes": True, "drafter": "none", "prefill_chunk": 16}
    return EngineConfig(vocab_size=264, **common | group | {"num_ranks": 1})


def main(kind, silence):
    start = WorkerProcess
    if kind == "scripted":
        start = functools.partial(WorkerProcess, program=scripted_process.WORKER)
    with Engine(settings(kind, silence), start_worker=start) as engine:
        for run in range(RUNS):
            requests = [
                request(f"{run}.{n}", (1 + n,) * 20, max_tokens=40) for n in range(REQUESTS)
            ]
            ends, lost = {}, []
            with contextlib.suppress(WorkerFailed):
                for update in engine.generate(requests):
                    if update.lost is not None:
                        lost.append(str(update.lost).splitlines()[0])
                    for record in update.records:
                        if record.finish_reason is not None:
                            assert record.request_id not in ends
                            ends[record.request_id] = record.finish_reason.name
            print(json.dumps({"ends": ends, "lost": lost}), flush=True)
    print("closed")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
