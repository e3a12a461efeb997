"""Errors of requests, engines, streams, workers, weights and messages."""

from collections.abc import Sequence

from jax_specdec.records.decode import MessageError
from jax_specdec.requests import RequestError
from jax_specdec.wording import pluralize

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


class WeightsError(RuntimeError):
    """The weights were not updated: says why. All workers use those that they had."""


class WorkerFailed(RuntimeError):
    """A worker ended before its requests did; says how, and what it printed last.

    Attributes:
      report: the message without the advice.
      reason: the report in one line, for a log.
      advice: for the author of a program around the engine; empty where it would not help.
      failures: one for each worker, where the report is of several that were lost; else empty.
    """

    def __init__(
        self,
        report: str,
        advice: str = "",
        failures: Sequence["WorkerFailed"] = (),
        reason: str = "",
    ) -> None:
        super().__init__(f"{report}\n{advice}" if advice else report)
        self.report = report
        self.reason = " ".join((reason or report).splitlines())
        self.advice = advice
        self.failures = tuple(failures)


def together(failures: Sequence[WorkerFailed]) -> WorkerFailed:
    """One report of all the workers that are lost, at least one."""
    if len(failures) == 1:
        return failures[0]
    count = pluralize(len(failures), "worker")
    failure = WorkerFailed(
        "\n\n".join([f"{count} are lost:", *(failure.report for failure in failures)]),
        next((failure.advice for failure in failures if failure.advice), ""),
        failures,
        "; ".join(failure.reason for failure in failures),
    )
    failure.__cause__ = failures[-1]
    return failure
