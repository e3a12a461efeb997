"""The lane `peers`: each peer in an environment of its own, and its `check_*.py` and example there.

    python -m tests.peers.run [PEER ...]

`bench.peers` makes the environments, once, and stands in for what they lack: a run that was cut
short goes on with those that it made. Each peer prints RUN, or NOT RUN and why, and its verdict.
"""

import os
import subprocess
import sys
import time

from bench.peers.environments import PEERS, environment, newest
from tests.support import compatibility, quick_compile
from tests.support.paths import ROOT


def check(peer: str, python: str) -> bool:
    """Whether the peer's tests pass."""
    options = ["-q", "-p", "bench.peers.stand_ins", "-p", "no:cacheprovider", "--noconftest"]
    options += ["-c", os.devnull, "--rootdir", str(ROOT), "--hypothesis-profile=ci"]
    flags = ("xla_backend_optimization_level", "xla_llvm_disable_expensive_passes")
    given = [f"--{name}={str(quick_compile.UNOPTIMIZED[name]).lower()}" for name in flags]
    settings = {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": " ".join([*given, "--xla_force_host_platform_device_count=4"]),
    }
    folder = ROOT / "tests" / "peers"
    files = [*sorted(folder.glob(f"check_{peer}*.py")), folder / "check_example.py"]
    done = subprocess.run(
        [python, "-m", "pytest", *options, *files], env=os.environ | settings, cwd=ROOT, check=False
    )
    return done.returncode == 0


def verdict(peer: str, python: str) -> str:
    """What came of a peer: "ok", "FAILED" or "NOT RUN", and after it how long it took, or why."""
    start = time.monotonic()
    try:
        own = environment(peer, python)
    except subprocess.CalledProcessError as error:
        why = f"no environment could be made: exit status {error.returncode} of the command above"
        print(f"NOT RUN: {peer}: {why}", flush=True)
        return f"NOT RUN, {why}"
    print(f"RUN: {peer}: {', '.join(PEERS[peer][0][:1])}", flush=True)
    found = "ok" if check(peer, own) else "FAILED"
    if found == "ok":
        code = "import jax, platform; print(platform.python_version(), jax.__version__)"
        versions = subprocess.run([own, "-c", code], capture_output=True, text=True, check=True)
        name = PEERS[peer][0][0].replace("==", " ")
        compatibility.keep(f"the adapter of {name}", *versions.stdout.split())
    return f"{found}, {time.monotonic() - start:.0f} s"


def main(names: list[str]) -> int:
    """Run the named peers, or all; exit status 1: one fails, 2: no such peer, 3: none could run."""
    python = newest()
    if unknown := set(names) - set(PEERS):
        print(f"there is no peer {min(unknown)}: one of {', '.join(PEERS)}", file=sys.stderr)
        return 2
    if python is None:
        print("no Python 3.12 or 3.13 was found", file=sys.stderr)
        return 3
    verdicts = {name: verdict(name, python) for name in names or PEERS}
    for name, found in verdicts.items():
        print(f"{name}: {found}")
    if any(found.startswith("FAILED") for found in verdicts.values()):
        return 1
    return 3 if all(found.startswith("NOT RUN") for found in verdicts.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
