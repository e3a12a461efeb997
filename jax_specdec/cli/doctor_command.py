"""`jax-specdec doctor`: rings in shared memory, and what dead processes left of them."""

import argparse
from typing import Any


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "doctor",
        help="list rings in shared memory, and remove those of dead processes",
        description="List every ring in /dev/shm and who made it. What a killed process left "
        "behind before both sides had attached stays there until it is removed.",
    )
    parser.add_argument("--remove", action="store_true", help="remove what the dead left")


def run(options: argparse.Namespace) -> int:
    """List them, and remove leftovers where asked."""
    from ipc import doctor

    return doctor.main(["--remove"] if options.remove else [])
