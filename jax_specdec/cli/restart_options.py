"""Options for what becomes of lost workers."""

import argparse
import math
from typing import Any

from jax_specdec.cli.argument_types import integer

WINDOW = 600.0


def add_restarts(group: Any, *, default: int | None) -> None:
    """Add the options for how often lost workers are replaced.

    Args:
      default: replacements; None: without the option, the first loss ends the command.
    """
    said = "none: the first loss ends the command" if default is None else default
    group.add_argument("--max-restarts", type=integer(0), default=default, metavar="N",
        help="new workers in place of lost ones, for each, within --restart-window; a loss that is "
        f"put down to a request does not count (default: {said})")  # fmt: skip
    group.add_argument("--restart-window", type=_window, metavar="SECONDS",
        help=f"after which a loss counts no more (default: {WINDOW:g})")  # fmt: skip


def restarts(options: argparse.Namespace) -> dict[str, Any]:
    """The options as those of `EngineConfig`.

    Raises:
      ValueError: there is a window, and nothing that it holds for.
    """
    window = options.restart_window
    if options.max_restarts is None:
        if window is not None:
            raise ValueError("--restart-window is for --max-restarts: add it")
        return {}
    return {
        "on_worker_loss": "restart",
        "resume_lost": True,
        "max_restarts": options.max_restarts,
        "restart_window": WINDOW if window is None else window,
    }


def _window(text: str) -> float:
    """An argparse type: seconds, at least one."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 1 <= seconds < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 1 on")
    return seconds
