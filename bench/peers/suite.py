"""The functions of trainers and engines that run on JAX, and the adapters' in their place.

Each peer runs in this process's environment where it is installed in the version that its adapter
was tried with, and otherwise in one that is made for it, where jax has a CPU.
"""

import os
import subprocess
import tempfile
from pathlib import Path

from bench.comparison import Comparison
from bench.files import read_json
from bench.peers.environments import PEERS, environment, newest
from bench.timing import BenchError

ROOT = Path(__file__).parents[2]
# With one thread, the CPU time of a call is the time that it takes.
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"


def run(quick: bool) -> list[Comparison]:
    """Measure all peers, one after the other."""
    return [one for peer in PEERS for one in measured(peer, quick)]


def measured(peer: str, quick: bool) -> list[Comparison]:
    """The comparisons of one peer; one that says why, where it cannot be installed."""
    python = newest()
    try:
        own = environment(peer, python) if python else None
    except subprocess.CalledProcessError as error:
        return [_not_run(peer, f"its environment cannot be made: {error}")]
    if own is None:
        return [_not_run(peer, "no Python 3.12 or 3.13 was found")]
    cores = os.sched_getaffinity(0)
    settings = {
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {ONE_THREAD}".strip(),
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "found.json")
        command = [own, "-m", "bench.peers.measure", peer, str(file), *["--quick"] * quick]
        try:
            os.sched_setaffinity(0, {max(cores)})
            done = subprocess.run(command, cwd=ROOT, env=os.environ | settings, check=False)
        finally:
            os.sched_setaffinity(0, cores)
        if done.returncode:
            raise BenchError(f"{peer} was not measured: exit status {done.returncode}")
        return list(read_json(file).comparisons)


def _not_run(peer: str, why: str) -> Comparison:
    return Comparison(f"{peer}, side by side", {}, (), {"NOT RUN": why})
