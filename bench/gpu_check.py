"""Every check of the kernels that needs a GPU: are they right, and how fast are they?

    python -m bench.gpu_check                     on a GPU of compute capability 9.0 or newer
    python -m bench.gpu_check --minutes 8         begin no piece after 8 minutes; the same command
                                                  continues where this one stopped
    python -m bench.gpu_check --part first tune   only some parts
    python -m bench.gpu_check --rehearse          anywhere: the same steps, small, the kernels' PTX
                                                  executed on a CPU (needs the aot extra)
    python -m bench.gpu_check --one-of-each       only the first piece of every part

The parts, the most informative first, with estimated minutes on an H100 (mostly compiling):

  first       2   do both passes run, are they right, and how far are they from the floor?
  tests       2   the repository's kernel tests, with real kernels in place of interpreted ones
  shapes      7   every vocabulary, dtype and kind of K at real sizes: both paths against XLA on all
                  rows and the float64 oracle on a few; every edge of the contract; arbitrary values
  targets     8   the shapes with promised limits, against peers and the memory's speed
  tune        8   other schedules than the chosen ones: see `bench.gpu_tune`
  rest       15   all other shapes against peers
  end-to-end  2   the decoding loop on this device, with and without logprobs

Each piece of the work is timed and announced. A failure is reported at the end and does not stop
the others. Results are in FOLDER/gpu-DATE.json after every piece, with device, driver and versions.
Exit status: 0 if every piece passed, 1 if one failed, 2 without such a GPU, 3 if time ran out.
"""

import argparse
import itertools
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# Set before jax is imported: the tests' process and PyTorch need memory of the same GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp

from bench.gpu import summary, torch_peers
from bench.gpu.contenders import Machine
from bench.gpu.device_clock import host_spans
from bench.gpu.journal import Journal, opened
from bench.gpu.pieces import PARTS, pieces_of
from bench.report.files import environment
from pallas_kernels.lowering import implementation, obstacles

REHEARSAL = "tests.bench.gpu_rehearsal"  # executes the kernels


def main(arguments: list[str] | None = None) -> int:
    """See the module's docstring."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(arguments)
    if options.rehearse:
        return subprocess.run([sys.executable, "-m", REHEARSAL, *arguments], check=False).returncode
    probe = jax.ShapeDtypeStruct((1, 4096), jnp.float32)  # type: ignore[no-untyped-call]
    obstacle = implementation.gpu_obstacle(probe)
    if obstacle is not None:
        print(f"NOT RUN: {obstacle}. Nothing was measured. (--rehearse runs the steps anywhere.)")
        return 2
    machine = Machine() if options.clock == "device" else Machine(clock=host_spans)
    return check(options, machine)


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="small, on any machine, by executed PTX"
    )
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument(
        "--one-of-each", action="store_true", help="only the first piece of every part"
    )
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="begin no piece after this many"
    )
    parser.add_argument("--results", type=Path, default=Path("bench/results"), metavar="FOLDER")
    parser.add_argument("--afresh", action="store_true", help="forget an earlier call's results")
    parser.add_argument(
        "--clock",
        choices=("device", "host"),
        default="device",
        help="host: for a profiler that sees no kernels; times then include launching",
    )
    return parser


def check(options: argparse.Namespace, machine: Machine) -> int:
    """Do the pieces of work that are left, on this machine; the exit status."""
    options.results.mkdir(parents=True, exist_ok=True)
    kind = "rehearsal" if options.rehearse else "gpu"
    path = options.results / f"{kind}-{datetime.now(UTC):%Y-%m-%d}.json"
    journal = opened(path, environment() | device(), options.afresh)
    if journal.checks:
        print(f"{path} has {len(journal.checks)} finished pieces (--afresh repeats them)")
    most = 1 if options.one_of_each else None
    pieces = [
        piece
        for part in options.part
        for piece in itertools.islice(pieces_of(part, machine, journal), most)
    ]
    left = journal.work(pieces, 60 * options.minutes)
    return conclude(journal, left, options.rehearse)


def conclude(journal: Journal, left: int, rehearsed: bool) -> int:
    """Print the summary, and return the exit status."""
    for line in summary.lines(journal.comparisons):
        print(line)
    if rehearsed:
        print("REHEARSED: the steps ran, and nothing was measured on a GPU.")
    for failure in journal.failures:
        print(f"FAILED {failure.splitlines()[0]}")
    print(f"{len(journal.checks)} pieces done, {len(journal.failures)} failed: {journal.path}")
    if left:
        print(f"OUT OF TIME: {left} pieces are left; the same command continues with them")
    return 1 if journal.failures else 3 if left else 0


def device() -> dict[str, Any]:
    """The device and its software, beside `files.environment`."""
    return {
        "device": jax.devices()[0].device_kind,
        "compute capability": obstacles.cuda_capability(),
        "driver": driver(),
        "torch": torch_peers.version(),
    }


def driver() -> str:
    """The GPU's name and the version of its driver."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "none"


if __name__ == "__main__":
    sys.exit(main())
