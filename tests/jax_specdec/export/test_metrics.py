"""The Prometheus text: its names, labels and values, as its own parser reads them."""

import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jax_specdec.export import arrow
from jax_specdec.export.column_builder import ColumnBuilder
from jax_specdec.export.metrics import prometheus_text, status_text
from jax_specdec.records.output_processor import ProcessorState, abort, step
from tests.support.processor_messages import all_admitted, request, target, tokens
from tests.support.scene import Scene, long_requests


def samples_of(text):
    """A map from name and labels, without the process rank, to {process rank: value}."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            process_rank = labels.pop("process_rank")
            key = sample.name.removeprefix("jax_specdec_"), *sorted(labels.items())
            found.setdefault(key, {})[process_rank] = sample.value
    return found


def test_prometheus_text():
    asked = {"stop_token_ids": (9,), "max_tokens": 50}
    state = all_admitted([request(name, **asked) for name in "01"])
    state, _ = step(state, target(0, tokens(1, 2, drafts=3), tokens(9, 4, drafts=1)))
    state, _ = abort(state, "0")
    text = prometheus_text(state)
    samples = samples_of(text)
    expected = {"steps_total": 2, "tokens_total": 3, "cut_tokens_total": 1, "draft_tokens_total": 4,
                "accepted_tokens_total": 2, "accept_ratio": 0.5, "live_requests": 0}  # fmt: skip
    expected = {(name,): value for name, value in expected.items()}
    expected["draft_tokens_at_position_total", ("position", "2")] = 1
    expected["accepted_tokens_at_position_total", ("position", "0")] = 2
    for reason, count in (("stop_token", 1), ("abort", 1), ("length", 0)):
        expected["finished_requests_total", ("reason", reason)] = count
    assert {key: samples[key] for key in expected} == {k: {"0": n} for k, n in expected.items()}
    lines = text.splitlines()
    for name in {line.split()[2] for line in lines if line.startswith("#")}:
        assert sum(line.startswith(f"# TYPE {name} ") for line in lines) == 1


def test_prometheus_text_of_several_rings_and_of_none():
    states = [ProcessorState.empty(1, process_rank=rank) for rank in (0, 3)]
    text = prometheus_text(*states)
    assert text.count("# TYPE jax_specdec_steps_total counter\n") == 1
    assert samples_of(text)[("steps_total",)] == {"0": 0, "3": 0}
    assert "jax_specdec_accept_ratio{" not in text  # no value yet
    assert prometheus_text() == ""


def test_every_rank_has_its_numbers():
    texts = []
    scene = Scene(num_ranks=2, num_prefill_ranks=1, faults={1: [3]}, on_worker_loss="restart",
                  resume_lost=True, restart_delay=0)  # fmt: skip
    scene.run(long_requests(), lambda scene, n: texts.append(status_text(scene.engine.status)))
    samples = samples_of(status_text(scene.engine.status))
    sent = [scene.workers[place].sent for place in (0, 3, 2)]  # 3 took the place of 1
    for name, values in (
        ("worker_up", [1, 1, 1]),
        ("worker_restarts_total", [0, 1, 0]),
        ("ring_messages_total", sent),
        ("live_requests", [0, 0, 0]),
    ):
        assert samples[(name,)] == {str(rank): value for rank, value in enumerate(values)}
    assert samples["finished_requests_total", ("reason", "prefill_handover")]["2"] == 6
    delivered = samples[("tokens_total",)]
    assert delivered["2"] == 6
    assert sum(delivered.values()) == 6 * 20
    assert any(samples_of(text)[("live_requests",)]["0"] == 2 for text in texts)


def test_names_and_labels_are_those_that_dashboards_use():
    """A changed name would break dashboards and alerts."""
    scene = Scene().run(long_requests(1))
    families = text_string_to_metric_families(status_text(scene.engine.status))
    named = {family.name: (family.type, {*family.samples[0].labels}) for family in families}
    rank, gauges = {"process_rank"}, {"accept_ratio", "acceptance_rate", "live_requests",
        "average_accepted_length", "worker_up", "ring_depth", "ring_capacity",
        "weights_version"}  # fmt: skip
    counters = {"steps", "tokens", "draft_tokens", "accepted_tokens", "cut_tokens",
        "surplus_tokens", "late_slots", "late_drafts", "preemptions", "worker_restarts",
        "ring_messages", "ring_payload_bytes", "ring_waits", "ring_wait_seconds"}  # fmt: skip
    assert named == {
        **{f"jax_specdec_{name}": ("gauge", rank) for name in gauges},
        **{f"jax_specdec_{name}": ("counter", rank) for name in counters},
        "jax_specdec_draft_tokens_at_position": ("counter", rank | {"position"}),
        "jax_specdec_accepted_tokens_at_position": ("counter", rank | {"position"}),
        "jax_specdec_finished_requests": ("counter", rank | {"reason"}),
    }


@pytest.mark.parametrize(
    ("module", "call", "version"),
    [
        ("prometheus_client", prometheus_text, "0.20"),
        ("pyarrow", lambda: arrow.tokens_table(ColumnBuilder().columns()), "16"),
    ],
)
def test_without_an_extra_the_way_to_install_it_is_named(module, call, version, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=f"pip install '{module}>={version}'"):
        call()
