"""`jax-specdec doctor`: rings and directories of engines, and what dead processes left of them."""

import argparse

import jax_specdec.beside.ipc  # noqa: F401
from ipc import doctor
from jax_specdec import compiled_programs
from jax_specdec.cli import proved_kernels, toolchain
from jax_specdec.engine import leftovers

HELP = """\
Say where the driver, ptxas and libdevice are. List every ring in /dev/shm, and every engine's
directory, with the state of the process that made it. An engine that is killed leaves its
directory, and one that is closed the output of its lost workers, with the reason of each loss.
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--remove", action="store_true", help="remove what dead processes left")
    parser.add_argument(
        "--clear-cache", action="store_true", help="remove the compiled programs that are kept"
    )


def run(options: argparse.Namespace) -> int:
    """List everything, and with --remove remove what dead processes left.

    Returns the exit status: 1 while leftovers remain, 2 where it cannot know, else 0.
    """
    tools = toolchain.find_toolchain()
    for line in [*tools.lines(), *(f"NOTE: {note}" for note in tools.notes() if tools.gpus)]:
        print(line)

    folder = compiled_programs.default_folder()
    contents = (compiled_programs.clear if options.clear_cache else compiled_programs.contents)(
        folder
    )
    done = "removed from" if options.clear_cache else "in"
    print(f"compiled programs: {contents.count} ({contents.size / 2**20:.1f} MiB) {done} {folder}")
    path = proved_kernels.file()
    none = f"proved kernels: none in {path}; GPUs and TPUs take XLA until check-device --keep"
    digests = proved_kernels.current_digests() if proved_kernels.read_proofs(path) else None
    for line in proved_kernels.lines(path, digests) or [none]:
        print(line)
    status = doctor.main(["--remove"] if options.remove else [])
    if status == 2:  # it has said why nothing can be known of processes
        return status
    files = leftovers.find_leftovers()
    removed = leftovers.remove(files) if options.remove else []
    for file in files:
        print(file.line("removed" if file in removed else file.state))
        for name, loss in file.losses:
            print(f"{'':16} {name}: {loss}")
    undeleted = [file for file in files if file.state == "dead" and file not in removed]
    print(
        f"directories of engines: {len(files)}, {len(removed)} removed, {len(undeleted)} of dead "
        "engines"
    )
    return int(bool(status or undeleted))
