"""Streams under any sequence of events, compared with a model.

The model knows which requests are open, which of them were asked to end and why, and all tokens of
an undisturbed run. What a stream delivers is a beginning of these, or all of them.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jax_specdec.engine.errors import EngineClosed, EngineFull
from jax_specdec.records.batch import FinishReason
from tests.support.requests import request as request_of
from tests.support.scripted_worker import continuation
from tests.support.streaming import StreamingScene

MAX_WAITING = 4
NATURAL = {FinishReason.LENGTH, FinishReason.STOP_TOKEN}
OF_LOSSES = {FinishReason.WORKER_LOST, FinishReason.ATTEMPTS_EXHAUSTED}


def check_end(scene, name, allowed):
    """Check a stream that is over: its reason, its tokens, and that nothing comes after its end."""
    stream, records = scene.streams[name], scene.read[name]
    assert list(stream) == []
    ends = [record.finish_reason for record in records if record.finish_reason is not None]
    assert ends == [stream.finish_reason] == [records[-1].finish_reason]
    assert stream.finish_reason in allowed
    tokens, logprobs = continuation(stream.request)
    got = scene.tokens(name)
    assert got == (tokens if stream.finish_reason in NATURAL else tokens[: len(got)])
    rows = [x for r in records if r.num_tokens for x in r.logprobs[:, 0].tolist()]
    assert rows == logprobs[: len(got)]


class StreamMachine(RuleBasedStateMachine):
    """Submit, abort, preempt, loss, deadline, drain and reads, in any order."""

    def __init__(self):
        super().__init__()
        self.scene = StreamingScene(
            num_slots=2,
            num_ranks=2,
            max_waiting=MAX_WAITING,
            max_backlog=64,
            on_worker_loss="restart",
            resume_lost=True,
            restart_delay=0.01,
            max_restarts=10_000,
            max_attempts=3,
        )
        self.allowed = {}  # the reasons for which each request may end
        self.killed = self.draining = False

    @property
    def open(self):
        return set(self.scene.open_streams.open_ids)

    @rule(
        max_tokens=st.sampled_from((1, 2, 20)),
        priority=st.integers(-1, 1),
        deadline=st.sampled_from((None, None, 0.05, 5.0)),
        stops=st.booleans(),
    )
    def submit(self, max_tokens, priority, deadline, stops):
        name = f"r{len(self.allowed)}"
        ends = {"max_tokens": max_tokens, "stop_token_ids": (7,) if stops else ()}
        request = request_of(name, (len(name), max_tokens), logprobs=0, **ends)
        waiting = len(self.open) - len(self.scene.engine.running)
        try:
            self.scene.submit(request, priority=priority, deadline=deadline)
        except EngineFull as error:
            said = str(error)
            assert waiting >= MAX_WAITING
            assert f"{MAX_WAITING} requests wait for a slot, as many as may" in said
        except EngineClosed:
            assert self.draining
        else:
            assert not self.draining
            assert waiting < MAX_WAITING
            self.allowed[name] = NATURAL | ({FinishReason.DEADLINE} if deadline else set())
            if self.killed:
                self.allowed[name] |= OF_LOSSES

    @precondition(lambda self: self.allowed)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.allowed)))
        assert self.scene.engine.abort(name) == (name in self.open)
        self.allowed[name] = self.allowed[name] | {FinishReason.ABORT}

    @precondition(lambda self: self.allowed)
    @rule(data=st.data(), reschedule=st.booleans())
    def preempt(self, data, reschedule):
        name = data.draw(st.sampled_from(sorted(self.allowed)))
        holds = self.scene.engine.preempt(name, reschedule=reschedule)
        assert holds == (name in self.scene.engine.running)
        if not reschedule:
            self.allowed[name] = self.allowed[name] | {FinishReason.RECOVERY_ERROR}

    @rule(rank=st.integers(0, 1))
    def lose(self, rank):
        worker = self.scene.engine.sessions[rank].worker
        if not worker.stopped:
            worker.dies_after = worker.sent  # before its next message
        self.killed = True
        self.allowed = {name: reasons | OF_LOSSES for name, reasons in self.allowed.items()}

    @rule(count=st.integers(1, 8))
    def serve(self, count):
        self.scene.round(count)

    @rule(seconds=st.sampled_from((0.02, 1.0)))
    def time_passes(self, seconds):
        self.scene.clock.time += seconds

    @precondition(lambda self: self.allowed)
    @rule(data=st.data())
    def read(self, data):
        self.scene.take(data.draw(st.sampled_from(sorted(self.allowed))))

    @precondition(lambda self: len(self.allowed) > 6)
    @rule()
    def drain(self):
        assert self.scene.engine.drain(0) == (not self.open)
        self.draining = True

    @invariant()
    def slots_are_those_of_open_requests(self):
        engine = self.scene.engine
        assert len(set(engine.running)) == len(engine.running)
        assert set(engine.running) <= self.open
        for session in engine.sessions:
            assert session.num_free + len(session.request_ids) == 2

    def teardown(self):
        self.scene.finish()
        for name, allowed in self.allowed.items():
            check_end(self.scene, name, allowed)
        engine = self.scene.engine
        assert not engine.running
        assert engine.num_waiting == 0
        assert engine.drain(0)
        engine.close()


TestStreams = StreamMachine.TestCase
TestStreams.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
