"""Options of commands that run on a Ray cluster."""

import argparse
from typing import Any

from jax_specdec.cli.argument_types import integer


def add_ray(group: Any) -> None:
    """Add the options for where engines run, and how many."""
    group.add_argument("--ray", nargs="?", const="", metavar="ADDRESS",
        help="run engines on a Ray cluster: that of the head at ADDRESS (host:port), or the one "
        "that RAY_ADDRESS names or this node belongs to, or else on this machine alone",
    )  # fmt: skip
    group.add_argument("--replicas", type=integer(1, 2**16), default=1, metavar="N",
        help="engines, each on devices of its own (default: %(default)s)")  # fmt: skip
    group.add_argument("--replica-devices", type=numbers, default={"CPU": 1.0}, metavar="KIND=N,..",
        help="what a replica takes of a node, such as GPU=4 or TPU=4 (default: CPU=1)")  # fmt: skip


def numbers(text: str) -> dict[str, float]:
    """An argparse type: numbers by name, such as "GPU=4,CPU=2"."""
    found = {}
    for part in text.split(","):
        name, sign, amount = part.partition("=")
        try:
            found[name.strip()] = float(amount)
        except ValueError:
            sign = ""
        if not sign or not name.strip():
            raise argparse.ArgumentTypeError(f"{part!r} is not NAME=N, such as GPU=4")
    return found


def refuse_without_ray(options: argparse.Namespace) -> None:
    """Refuse options that mean nothing on one machine.

    Raises:
      ValueError: names the option.
    """
    if options.ray is None and (options.replicas != 1 or options.replica_devices != {"CPU": 1.0}):
        raise ValueError("--replicas and --replica-devices are for --ray: add it")
    if getattr(options, "scaling", None) and options.max_replicas is None:
        raise ValueError("--scaling is for --max-replicas: add it")
