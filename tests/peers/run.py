"""The lane `peers`: each peer in an environment of its own, and its `check_*.py` there.

    python -m tests.peers.run [PEER ...]

`bench.peers` makes the environments, once, and stands in for what they lack.
"""

import os
import subprocess
import sys

from bench.peers.environments import PEERS, environment, newest
from tests.support import quick_compile
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
    files = sorted((ROOT / "tests" / "peers").glob(f"check_{peer}*.py"))
    done = subprocess.run(
        [python, "-m", "pytest", *options, *files], env=os.environ | settings, cwd=ROOT, check=False
    )
    return done.returncode == 0


def main(names: list[str]) -> int:
    """Run the named peers, or all; exit status 1: one fails, 2: no such peer, 3: no Python."""
    python = newest()
    if unknown := set(names) - set(PEERS):
        print(f"there is no peer {min(unknown)}: one of {', '.join(PEERS)}", file=sys.stderr)
        return 2
    if python is None:
        print("no Python 3.12 or 3.13 was found", file=sys.stderr)
        return 3
    failed = [name for name in names or PEERS if not check(name, environment(name, python))]
    for name in names or PEERS:
        print(f"{name}: {'FAILED' if name in failed else 'ok'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
