"""What 1,000 requests cost the parts of a cluster that all nodes share, counted on this machine.

    python -m bench.ray_scale [--requests 1000] [--tokens 256] [--logprobs 0] [--coalesce 0.02]

Two replicas of 64 slots run a worker without a model, at 10 ms a step. Counted are batches, bytes
and calls at the driver, the bytes and messages that the head (`gcs_server`) sends and receives, and
the CPU seconds of the driver, of the head, of the raylet and of the replicas, beside what the same
processes take when nothing runs. The kernel counts what a connection carries (`ss`, of iproute2).
"""

import argparse
import functools
import importlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from bench.ray_worker import PACE, TOKENS
from jax_specdec.engine import Engine, EngineConfig, Request, SamplingParams
from jax_specdec.engine.worker_client import WorkerProcess
from jax_specdec.ray import RayConfig, RayEngine

WORKER = (sys.executable, "-m", "jax_specdec.child", "bench.ray_worker")
REPLICAS, SLOTS, STEP_US = 2, 64, 10_000
TICK = os.sysconf("SC_CLK_TCK")


def cpu(pid: int) -> float:
    """CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def carried(pid: int) -> dict[str, float]:
    """Bytes and segments with data that the open connections of a process have carried."""
    lines = subprocess.run(
        ["ss", "-tinHpO"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    found = {"bytes": 0.0, "messages": 0.0}
    for line in lines:
        if f"pid={pid}," in line:
            for name, word in (("bytes", r"bytes_(?:acked|received)"), ("messages", "data_segs_")):
                counts = re.findall(rf"{word}\w*:(\d+)", line)
                found[name] += sum(map(float, counts))
    return found


def named(word: str) -> list[int]:
    """Processes of this user whose first argument ends so."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            first = path.read_bytes().split(b"\0")[0].decode()
        except OSError:
            continue
        if first.endswith(word) and path.stat().st_uid == os.getuid():
            found.append(int(path.parent.name))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--logprobs", type=int, default=0)
    parser.add_argument("--coalesce", type=float, default=0.02, help="seconds")
    options = parser.parse_args()
    ray = importlib.import_module("ray")
    before = {name: set(named(name)) for name in ("gcs_server", "raylet")}
    ray.init(
        address="local", num_cpus=REPLICAS, object_store_memory=200_000_000,
        include_dashboard=False, log_to_driver=False, logging_level="error",
    )  # fmt: skip
    (head,) = set(named("gcs_server")) - before["gcs_server"]
    (raylet,) = set(named("raylet")) - before["raylet"]
    make = functools.partial(Engine, start_worker=functools.partial(WorkerProcess, program=WORKER))
    config = EngineConfig(
        vocab_size=1000, num_slots=SLOTS, max_length=options.tokens + 264, num_drafts=TOKENS
    )
    cluster = RayConfig(
        replicas=REPLICAS,
        coalesce=options.coalesce,
        environment={PACE: str(STEP_US), "PYTHONPATH": os.getcwd()},
    )
    params = SamplingParams(max_tokens=options.tokens, logprobs=options.logprobs)
    with RayEngine(config, cluster, make_engine=make) as fleet:
        for _ in fleet.generate([Request(id="first", prompt_token_ids=(1,), params=params)]):
            pass
        replicas = [status.pid for status in fleet.status]
        parts = {"driver": [os.getpid()], "head": [head], "raylet": [raylet], "replicas": replicas}

        def counted() -> dict[str, float]:
            seconds = {
                f"CPU seconds of the {name}": sum(map(cpu, pids)) for name, pids in parts.items()
            }
            through = {f"{name} through the head": n for name, n in carried(head).items()}
            return seconds | through

        began, idle = time.monotonic(), counted()
        time.sleep(5)
        still = {name: (now - idle[name]) / 5 for name, now in counted().items()}
        before_run, traffic, began = counted(), fleet.traffic, time.monotonic()
        requests = [
            Request(id=str(n), prompt_token_ids=tuple(range(n % 500, n % 500 + 256)), params=params)
            for n in range(options.requests)
        ]
        for _ in fleet.generate(requests):
            pass
        seconds = time.monotonic() - began
        used = {name: now - before_run[name] for name, now in counted().items()}
        moved = {name: float(now - traffic[name]) for name, now in fleet.traffic.items()}
    ray.shutdown()
    scale = 1000 / options.requests
    print(f"{options.requests} requests x {options.tokens} tokens, {seconds:.1f} s")
    print("for 1,000 requests:")
    for name, count in moved.items():
        print(f"  {name}: {count * scale:,.0f}")
    for name, value in used.items():
        digits = 2 if "CPU" in name else 0
        print(
            f"  {name}: {value * scale:,.{digits}f} "
            f"({still[name]:,.{digits + 1}f} a second when nothing runs)"
        )


if __name__ == "__main__":
    main()
