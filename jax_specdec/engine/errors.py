"""Errors of requests, engines, streams, workers, weights and messages."""

from jax_specdec.engine.weights import WeightsError
from jax_specdec.engine.worker_client import WorkerFailed
from jax_specdec.records.decode import MessageError
from jax_specdec.requests import RequestError

__all__ = [
    "RequestError",
    "EngineFull",
    "EngineClosed",
    "StreamBehind",
    "WorkerFailed",
    "WeightsError",
    "MessageError",
]


class EngineFull(RuntimeError):
    """As many requests wait for a slot as may; says how many. Nothing of the request was kept."""


class EngineClosed(RuntimeError):
    """The engine takes no more requests, or ended before this one did."""


class StreamBehind(RuntimeError):
    """The consumer of a stream read too slowly; its request was ended."""
