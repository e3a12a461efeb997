"""`jax-specdec serve --ray`: the server as an application of Ray Serve, until a signal."""

import argparse
import logging
import os
import signal
import threading
from collections.abc import Callable

from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.cli import room
from jax_specdec.engine.config import EngineConfig
from jax_specdec.ray import placement, serve_app
from jax_specdec.serve.bounds import Bounds
from jax_specdec.serve.model import ServedModel

logger = logging.getLogger("jax_specdec.serve")
SIGNAL_LOOK_SECONDS = 0.5

ServedFleet = tuple[Callable[[], ServedModel], EngineConfig, ModelConfig | None]
MakeModel = Callable[[argparse.Namespace], ServedFleet]


def run(options: argparse.Namespace, make: MakeModel, bounds: Bounds) -> int:
    """Deploy, and wait for SIGTERM or Ctrl-C; returns the exit status.

    Args:
      make: says what makes the model, the configuration of an engine and the model's sizes, by the
        options: here to find what is wrong with them, and in each replica.
      bounds: of each replica.

    Raises:
      ValueError, ModuleNotFoundError: an option cannot be used, or Ray is not installed.
    """
    make_model, config, sizes = make(options)
    model = make_model()
    key = options.api_key or os.environ.get("JAX_SPECDEC_API_KEY", "")
    joined = placement.join_cluster(options.ray)
    built = serve_app.application(
        config,
        lambda: make(options)[0](),
        bounds=bounds,
        api_key=key,
        replicas=options.replicas,
        max_replicas=options.max_replicas,
        scaling=options.scaling,
        devices=options.replica_devices,
    )
    serve_app.deploy(built, options.host, options.port)
    logger.info(
        "serving %s on Ray Serve at http://%s:%d/v1", model.name, options.host, options.port
    )
    logger.info("of each replica: %s", room.line(config, sizes))
    try:
        _wait_for_a_signal()
        logger.info("the server ends: open requests end first")
    finally:
        serve_app.stop()
        if joined:
            placement.leave_cluster()
    return 0


def _wait_for_a_signal() -> None:
    """Wait for SIGTERM or SIGINT; Ray has handlers of its own, which would end this at once."""
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    while not over.wait(SIGNAL_LOOK_SECONDS):  # a wait without an end would hold the handlers up
        pass
