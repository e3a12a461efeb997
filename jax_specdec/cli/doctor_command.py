"""`jax-specdec doctor`: rings in shared memory, and those that dead processes left behind."""

import argparse
from typing import Any


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "doctor",
        help="list rings in shared memory, and remove those of dead processes",
        description="List every ring in /dev/shm and the process that made it. A process that is "
        "killed before both sides have attached leaves its ring there until it is removed.",
    )
    parser.add_argument("--remove", action="store_true", help="remove the rings of dead processes")


def run(options: argparse.Namespace) -> int:
    """List all rings, and with --remove remove those of dead processes."""
    from ipc import doctor

    return doctor.main(["--remove"] if options.remove else [])
