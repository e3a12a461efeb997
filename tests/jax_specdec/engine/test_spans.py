"""Spans of requests: each life is whole, its parts follow each other, all by one clock."""

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from jax_specdec.engine.worker_client import WorkerFailed
from jax_specdec.requests import Request, SamplingParams
from tests.support.scene import Scene, long_requests


class Traced:
    """A tracer, and the spans that ended."""

    def __init__(self):
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = provider.get_tracer("test")

    def lives(self):
        """By request id: its span, and its parts in the order of their begin."""
        spans = self.exporter.get_finished_spans()
        roots = {one.context.span_id: one for one in spans if one.name == "jax_specdec.request"}
        lives = {one.attributes["jax_specdec.request_id"]: (one, []) for one in roots.values()}
        assert len(lives) == len(roots)
        for one in sorted(spans, key=lambda one: one.start_time):
            if one.name != "jax_specdec.request" and one.name.startswith("jax_specdec."):
                whole = roots[one.parent.span_id]
                lives[whole.attributes["jax_specdec.request_id"]][1].append(one)
        return lives

    def ends(self):
        """Why requests' spans ended."""
        wholes = [whole for whole, _ in self.lives().values()]
        return [whole.attributes["gen_ai.response.finish_reasons"][0] for whole in wholes]


def parts_of(spans):
    return " ".join(one.name.removeprefix("jax_specdec.") for one in spans)


def run(requests, meddle=lambda scene, n: None, **config):
    traced = Traced()
    scene = Scene(tracer=traced.tracer, **config)
    with traced.tracer.start_as_current_span("the caller's") as caller:
        scene.run(requests, meddle)
    lives = traced.lives()
    assert sorted(lives) == sorted(request.id for request in requests)
    for whole, parts in lives.values():
        assert whole.parent.span_id == caller.get_span_context().span_id
        moments = [moment for one in parts for moment in (one.start_time, one.end_time)]
        assert moments[0] == whole.start_time
        assert moments[-1] == whole.end_time
        assert moments == sorted(moments)
        assert moments[1:-1:2] == moments[2::2]  # no gap between two parts
    return scene, lives


def test_a_request_waits_prefills_and_decodes():
    scene, lives = run(long_requests(4), num_slots=2)
    for name, (whole, parts) in lives.items():
        assert parts_of(parts) == "queue prefill decode"
        assert dict(whole.attributes) == {
            "jax_specdec.request_id": name,
            "gen_ai.usage.input_tokens": 1,
            "gen_ai.usage.output_tokens": 20,
            "gen_ai.request.max_tokens": 20,
            "gen_ai.request.temperature": 0.0,
            "gen_ai.response.finish_reasons": ("length",),
        }
        assert whole.status.status_code is StatusCode.UNSET
        assert parts[1].attributes["jax_specdec.process_rank"] == 0
    waits = [parts[0].end_time - parts[0].start_time for _, parts in lives.values()]
    assert max(waits) > 5 * min(waits)  # two of them had to wait for a slot
    total = sum(waits) * 1e-9
    assert scene.engine.timings.queue.total == pytest.approx(total, abs=0.05)


def test_a_preempted_request_and_one_that_is_handed_over_wait_again():
    def meddle(scene, n):
        if n == 6:
            assert scene.engine.preempt("r0")

    _, lives = run(long_requests(2), meddle)
    assert parts_of(lives["r0"][1]) == "queue prefill decode queue prefill decode"
    assert parts_of(lives["r1"][1]) == "queue prefill decode"
    _, lives = run(long_requests(2), num_prefill_ranks=1)
    _, parts = lives["r0"]
    assert parts_of(parts) == "queue prefill queue prefill decode"
    ranks = [one.attributes.get("jax_specdec.process_rank") for one in parts]
    assert ranks == [None, 1, None, 0, 0]


def test_lost_workers_are_events_and_what_ends_by_them_is_an_error():
    config = {"on_worker_loss": "restart", "faults": {0: [4, 4]}, "max_restarts": 2}
    _, lives = run(long_requests(1), **config, resume_lost=True)
    whole, parts = lives["r0"]
    assert parts_of(parts) == "queue prefill decode queue prefill decode"
    assert [event.name for event in whole.events] == ["a worker was lost"]
    assert whole.attributes["gen_ai.response.finish_reasons"] == ("attempts_exhausted",)
    assert whole.status.status_code is StatusCode.ERROR


def test_every_span_ends_where_the_engine_stops_or_is_left():
    traced = Traced()
    scene = Scene(tracer=traced.tracer, num_slots=1, faults={0: [4]})
    with pytest.raises(WorkerFailed):
        scene.run(long_requests(3))
    assert traced.ends() == ["worker_lost"] * 3

    traced = Traced()
    scene = Scene(tracer=traced.tracer, num_slots=1)
    stream = scene.generate(long_requests(3))
    next(stream)
    stream.close()
    assert traced.ends() == ["abort"] * 3


def test_an_id_that_is_no_text_is_written_as_one():
    traced = Traced()
    scene = Scene(tracer=traced.tracer)
    asked = Request(id="\udc80", prompt_token_ids=(1,), params=SamplingParams(max_tokens=2))
    scene.run([asked])
    assert list(traced.lives()) == [r"\udc80"]
