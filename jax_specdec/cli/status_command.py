"""`jax-specdec status`: the nodes, replicas and applications of a Ray cluster."""

import argparse
import sys

from jax_specdec.ray import overview

HELP = """\
List what runs on a Ray cluster: its nodes, the replicas of generate --ray and of programs with a
RayEngine, and the applications of serve --ray.
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("address", nargs="?", default="", metavar="ADDRESS",
        help="of the head, host:port (default: what RAY_ADDRESS names, or this node's "
        "cluster)")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Print it; returns 1 where no cluster answers.

    Raises:
      ModuleNotFoundError: Ray is not installed.
    """
    try:
        for line in overview.lines(options.address):
            print(line)
    except (ConnectionError, RuntimeError) as error:
        print(f"jax-specdec: {error}", file=sys.stderr)
        return 1
    return 0
