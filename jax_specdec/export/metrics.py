"""The numbers of processors and engines as Prometheus text (extra `metrics`).

`prometheus_client` writes the text, in exposition format 0.0.4, for a server of your own to answer
with. Nothing is kept between calls: a page is a function of the values that it is given.

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

from ipc.field_docs import with_field_docs
from jax_specdec.engine.timings import BOUNDS, Timings
from jax_specdec.engine.updates import WorkerStatus
from jax_specdec.records.batch import Counters, FinishReason, Statistics
from jax_specdec.records.processor_state import ProcessorState

if TYPE_CHECKING:
    from prometheus_client import Metric

_PREFIX = "jax_specdec_"


@with_field_docs
class MetricFamily(NamedTuple):
    """One metric, or its samples of one process rank.

    Attributes:
      kind: "counter" or "gauge".
      name: without the prefix, and without the `_total` that every counter ends in.
      meaning: its help text.
      samples: labels and the value; one without a value is left out.
    """

    kind: str
    name: str
    meaning: str
    samples: Sequence[tuple[dict[str, str], float | None]]


def prometheus_text(*states: ProcessorState) -> str:
    """One page for all `states`, told apart by the label `process_rank`.

    Counters end in `_total`. A gauge that has no value yet, such as a ratio before the first draft,
    is left out.

    Raises:
      ModuleNotFoundError: prometheus_client is not installed; says how to install it.
    """
    return _page(
        family
        for state in states
        for family in _of_rank(
            state.process_rank, _delivery(state.statistics, state.counters, state.live_request_ids)
        )
    )


def status_text(
    statuses: Iterable[WorkerStatus],
    timings: Timings | None = None,
    without_slot: Sequence[int] = (),
) -> str:
    """The same page for an engine's workers (`Engine.status`), with their rings and processes.

    Args:
      statuses: of the workers.
      timings: the engine's (`Engine.timings`), as histograms; None for a page without them.
      without_slot: the engine's `ended_without_slot`; they are counted among the finished requests,
        with no process rank.

    Raises:
      ModuleNotFoundError: as `prometheus_text`.
    """
    families: list[MetricFamily] = []
    for status in statuses:
        delivered = _delivery(status.statistics, status.processor, status.request_ids)
        families += _of_rank(status.process_rank, [*delivered, *_transport(status)])
    if without_slot:
        families += _of_rank("", [_finished(without_slot)])
    return _page(families) + ("" if timings is None else timings_text(timings))


def build_text(*, model: str) -> str:
    """A page that says what runs: versions, and the model's name, as labels of a gauge of 1.

    Raises:
      ModuleNotFoundError: as `prometheus_text`.
    """
    labels = {"version": _version(), "python": platform.python_version(), "model": model}
    meaning = "What runs here: versions and the model's name; always 1."
    return _page([MetricFamily("gauge", "build_info", meaning, [(labels, 1)])])


def _version() -> str:
    """Of the installed package; "unknown" in a checkout that is not installed."""
    from importlib import metadata

    try:
        return metadata.version("jax-specdec")
    except metadata.PackageNotFoundError:
        return "unknown"


def timings_text(timings: Timings) -> str:
    """A page of an engine's histograms alone.

    Raises:
      ModuleNotFoundError: as `prometheus_text`.
    """
    client = _client()
    metrics = []
    for name, meaning, histogram in (
        ("queue", "From a request's submission to its first slot.", timings.queue),
        ("first_token", "From a request's submission to its first token.", timings.first_token),
        ("between_tokens", "Between two tokens of a request.", timings.between_tokens),
        ("ring_latency", "From a message's commit to the engine's copy.", timings.ring),
        ("step", "Between two messages of a busy worker.", timings.step),
    ):
        full = f"{_PREFIX}{name}_seconds"
        metric = client.Metric(full, meaning, "histogram")
        counts = histogram.counts.cumsum().tolist()
        bounds = [*map(repr, BOUNDS), "+Inf"]
        for bound, count in zip(bounds, counts, strict=True):
            metric.add_sample(f"{full}_bucket", {"le": bound}, count)
        metric.add_sample(f"{full}_count", {}, counts[-1])
        metric.add_sample(f"{full}_sum", {}, histogram.total)
        metrics.append(metric)
    return _text(client, metrics)


def http_text(
    answers: Mapping[tuple[str, int], int],
    ended: Mapping[str, int],
    num_open: int,
    num_connections: int,
    num_waiting: int,
) -> str:
    """A page of a server's requests and connections.

    Args:
      answers: how many there were, by path and status.
      ended: connections that the server ended, by its reason.
      num_open: requests that are answered now.
      num_connections: connections that are open.
      num_waiting: requests that wait for a slot (`Engine.num_waiting`).

    Raises:
      ModuleNotFoundError: as `prometheus_text`.
    """
    answered = [({"path": path, "status": str(status)}, count)
                for (path, status), count in sorted(answers.items())]  # fmt: skip
    closed = [({"reason": reason}, count) for reason, count in sorted(ended.items())]
    families = [
        MetricFamily("counter", "http_requests", "Requests by path and status.", answered),
        MetricFamily(
            "counter", "http_ended_connections", "Connections that the server ended.", closed
        ),
    ]
    for name, meaning, count in (
        ("waiting_requests", "Requests that wait for a slot.", num_waiting),
        ("http_open_requests", "Requests that are answered now.", num_open),
        ("http_connections", "Connections that are open.", num_connections),
    ):
        families.append(MetricFamily("gauge", name, meaning, [({}, count)]))
    return _page(families)


def _page(families: Iterable[MetricFamily]) -> str:
    """The text of some families: those of one name once, with the samples of all."""
    client = _client()
    metrics: dict[str, Metric] = {}
    for kind, name, meaning, samples in families:
        full = _PREFIX + name
        metric = metrics.setdefault(full, client.Metric(full, meaning, kind))
        for labels, value in samples:
            if value is not None:
                metric.add_sample(full + ("_total" if kind == "counter" else ""), labels, value)
    return _text(client, metrics.values())


def _of_rank(process_rank: int | str, families: Iterable[MetricFamily]) -> Iterator[MetricFamily]:
    """The families with the label of a process rank on each sample."""
    rank = {"process_rank": str(process_rank)}
    for family in families:
        yield family._replace(samples=[(rank | labels, value) for labels, value in family.samples])


def _client() -> ModuleType:
    try:
        import prometheus_client
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Prometheus text needs prometheus_client: pip install 'prometheus_client>=0.20'",
            name=error.name,
        ) from error
    return prometheus_client


def _text(client: ModuleType, metrics: Iterable["Metric"]) -> str:
    page: str = client.generate_latest(SimpleNamespace(collect=lambda: metrics)).decode()
    return page


def _delivery(
    statistics: Statistics, counters: Counters, live: Sequence[str]
) -> Iterator[MetricFamily]:
    """Counts of what was delivered, of what was not, and of what speculation achieved."""
    for name, meaning, count in (
        ("steps", "Steps, counted once a request that had tokens in them.", statistics.steps),
        ("tokens", "Tokens delivered.", statistics.num_tokens),
        ("draft_tokens", "Drafts proposed.", statistics.num_drafts),
        ("accepted_tokens", "Drafts accepted.", statistics.num_accepted),
        ("cut_tokens", "Tokens behind a stop in the step that ended it.", counters.cut_tokens),
        ("surplus_tokens", "Tokens that came after the end.", counters.surplus_tokens),
        ("late_slots", "Slots of messages about an older generation.", counters.late_slots),
        ("late_drafts", "Slots with drafts that no waiting record took.", counters.late_drafts),
        ("preemptions", "Requests sent back to the scheduler.", counters.preempted),
    ):
        yield MetricFamily("counter", name, meaning, [({}, count)])
    for name, meaning, counts in (
        ("draft_tokens_at_position", "Drafts proposed at a position.", statistics.drafts_at),
        ("accepted_tokens_at_position", "Drafts accepted at a position.", statistics.accepted_at),
    ):
        samples = [({"position": str(at)}, count) for at, count in enumerate(counts)]
        yield MetricFamily("counter", name, meaning, samples)
    yield _finished(counters.finished)
    length = statistics.average_accepted_length
    for name, meaning, value in (
        ("accept_ratio", "Share of emitted tokens that were drafts.", statistics.accept_ratio),
        ("acceptance_rate", "Accepted over proposed drafts.", statistics.acceptance_rate),
        ("average_accepted_length", "Tokens that a step emits for a request.", length),
        ("live_requests", "Requests that can still deliver.", len(live)),
    ):
        yield MetricFamily("gauge", name, meaning, [({}, value)])


def _finished(counts: Sequence[int]) -> MetricFamily:
    """How many requests have ended for each reason."""
    samples = [
        ({"reason": reason.name.lower()}, count)
        for reason, count in zip(FinishReason, counts, strict=True)
    ]
    return MetricFamily("counter", "finished_requests", "Requests by finish reason.", samples)


def _transport(status: WorkerStatus) -> Iterator[MetricFamily]:
    """A worker, and the engine's side of the ring to it.

    The ring's numbers begin again with each worker: Prometheus takes a counter that falls for a
    restart.
    """
    ring = status.ring
    for kind, name, meaning, value in (
        ("gauge", "worker_up", "1 while the worker may still send.", int(status.alive)),
        ("gauge", "weights_version", "Of the weights in use.", status.weights_version),
        ("counter", "worker_restarts", "Workers started in place of a lost one.", status.restarts),
        ("counter", "ring_messages", "Messages received from the worker.", ring.messages),
        ("counter", "ring_payload_bytes", "Their bytes.", ring.payload_bytes),
        ("counter", "ring_waits", "Times that the ring was empty when asked.", ring.waits),
        ("counter", "ring_wait_seconds", "Time spent in those waits.", ring.wait_ns / 1e9),
        ("gauge", "ring_depth", "Messages in the ring now.", ring.depth),
        ("gauge", "ring_capacity", "Messages that the ring holds.", ring.capacity),
    ):
        yield MetricFamily(kind, name, meaning, [({}, value)])
