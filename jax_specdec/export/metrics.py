"""The numbers of processors and engines as Prometheus text (exposition format 0.0.4). Never jax.

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from jax_specdec.engine.worker_session import WorkerStatus
from jax_specdec.records.batch import FinishReason
from jax_specdec.records.processor_state import ProcessorState
from jax_specdec.records.statistics import Counters, Statistics

_PREFIX = "jax_specdec"
Samples = list[tuple[dict[str, str], float | None]]  # labels and value; None is left out
Family = tuple[str, str, str, Samples]  # type, name, meaning, samples


def prometheus_text(*states: ProcessorState) -> str:
    """One page for all `states`, told apart by the label `process_rank`.

    Counters end in `_total`; gauges that have no value yet (a ratio before the first draft) are
    left out. Nothing is kept between calls: the page is a function of the states.
    """
    return _page(
        (state.process_rank, _delivery(state.statistics, state.counters, state.live_request_ids))
        for state in states
    )


def status_text(ranks: Iterable[WorkerStatus]) -> str:
    """The same of an engine's ranks (`Engine.status`), with their rings and workers."""
    return _page(
        (
            rank.process_rank,
            chain(
                _delivery(rank.statistics, rank.processor, rank.request_ids),
                _transport(rank),
            ),
        )
        for rank in ranks
    )


def _page(sources: Iterable[tuple[int, Iterable[Family]]]) -> str:
    """The families of all process ranks, each family once; every rank has the same ones."""
    ranks, families = [], []
    for rank, each in sources:
        ranks.append(rank)
        families.append(list(each))
    lines = []
    for same in zip(*families, strict=True):
        kind, name, meaning, _ = same[0]
        lines.append(f"# HELP {_PREFIX}_{name} {meaning}")
        lines.append(f"# TYPE {_PREFIX}_{name} {kind}")
        for rank, (_, _, _, samples) in zip(ranks, same, strict=True):
            for labels, value in samples:
                if value is not None:
                    labels = {"process_rank": str(rank), **labels}
                    text = ",".join(f'{key}="{label}"' for key, label in labels.items())
                    lines.append(f"{_PREFIX}_{name}{{{text}}} {value}")
    return "\n".join(lines) + "\n" if lines else ""


def _delivery(statistics: Statistics, counters: Counters, live: Sequence[str]) -> Iterator[Family]:
    """What was delivered, what was not, and what speculation achieved."""
    for name, meaning, value in (
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
        yield "counter", f"{name}_total", meaning, [({}, value)]
    for name, meaning, values in (
        ("draft_tokens_at_position", "Drafts proposed at a position.", statistics.drafts_at),
        ("accepted_tokens_at_position", "Drafts accepted at a position.", statistics.accepted_at),
    ):
        samples: Samples = [({"position": str(at)}, value) for at, value in enumerate(values)]
        yield "counter", f"{name}_total", meaning, samples
    finished: Samples = [
        ({"reason": reason.name.lower()}, count)
        for reason, count in zip(FinishReason, counters.finished, strict=True)
    ]
    yield "counter", "finished_requests_total", "Requests by finish reason.", finished
    for name, meaning, ratio in (
        ("accept_ratio", "Share of emitted tokens that were drafts.", statistics.accept_ratio),
        ("acceptance_rate", "Accepted over proposed drafts.", statistics.acceptance_rate),
        (
            "average_accepted_length",
            "Tokens that a step emits for a request.",
            statistics.average_accepted_length,
        ),
        ("live_requests", "Requests that can still deliver.", len(live)),
    ):
        yield "gauge", name, meaning, [({}, ratio)]


def _transport(rank: WorkerStatus) -> Iterator[Family]:
    """A rank's worker, and the engine's side of the ring to it."""
    ring = rank.ring
    yield "gauge", "worker_up", "1 while the worker may still send.", [({}, int(rank.alive))]
    yield (
        "counter",
        "worker_restarts_total",
        "Workers started in place of a lost one.",
        [({}, rank.restarts)],
    )
    # These begin anew with each worker: Prometheus takes a counter that falls for a restart.
    for name, meaning, value in (
        ("ring_messages", "Messages received from the worker.", ring.messages),
        ("ring_payload_bytes", "Their bytes.", ring.payload_bytes),
        ("ring_waits", "Times that the ring was empty when asked.", ring.waits),
        ("ring_wait_seconds", "Time spent in those waits.", ring.wait_ns / 1e9),
    ):
        yield "counter", f"{name}_total", meaning, [({}, value)]
    yield "gauge", "ring_depth", "Messages in the ring now.", [({}, ring.depth)]
    yield "gauge", "ring_capacity", "Messages that the ring holds.", [({}, ring.capacity)]
