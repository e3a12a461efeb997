"""The statistics of processors as Prometheus text (exposition format 0.0.4). Never jax.

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from collections.abc import Iterator

from jax_specdec.processor_state import ProcessorState
from jax_specdec.record_batch import FinishReason

_PREFIX = "jax_specdec"
Samples = list[tuple[dict[str, str], float | None]]  # labels and value; None is left out


def prometheus_text(*states: ProcessorState) -> str:
    """One page for all `states`, told apart by the label `process_rank`.

    Counters end in `_total`; gauges that have no value yet (a ratio before the first draft) are
    left out. Nothing is kept between calls: the page is a function of the states.
    """
    lines = []
    families = [list(_families(state)) for state in states]
    for same in zip(*families, strict=True):
        kind, name, meaning, _ = same[0]
        lines.append(f"# HELP {_PREFIX}_{name} {meaning}")
        lines.append(f"# TYPE {_PREFIX}_{name} {kind}")
        for state, (_, _, _, samples) in zip(states, same, strict=True):
            for labels, value in samples:
                if value is not None:
                    labels = {"process_rank": str(state.process_rank), **labels}
                    text = ",".join(f'{key}="{label}"' for key, label in labels.items())
                    lines.append(f"{_PREFIX}_{name}{{{text}}} {value}")
    return "\n".join(lines) + "\n" if lines else ""


def _families(state: ProcessorState) -> Iterator[tuple[str, str, str, Samples]]:
    """Type, name, meaning and samples of each metric; the same metrics for every state."""
    statistics, counters = state.statistics, state.counters
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
        ("live_requests", "Requests that can still deliver.", len(state.live_request_ids)),
    ):
        yield "gauge", name, meaning, [({}, ratio)]
