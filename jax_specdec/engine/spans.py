"""A request's life as OpenTelemetry spans, from the times that the engine takes anyway.

    jax_specdec.request        from its submission to its last record
      jax_specdec.queue        until it gets a slot; again after a preemption, hand-over or loss
      jax_specdec.prefill      until its first token there
      jax_specdec.decode       until it leaves the slot

The tracer is the caller's (the extra `otel`); who gives none imports nothing of OpenTelemetry.
Names of attributes: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jax_specdec.engine.clock import Clock
from jax_specdec.engine.queued_request import QueuedRequest
from jax_specdec.engine.updates import Update
from jax_specdec.records.batch import FinishReason

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

_FAILURES = (FinishReason.RECOVERY_ERROR, FinishReason.WORKER_LOST, FinishReason.ATTEMPTS_EXHAUSTED)


@dataclass
class _Life:
    """The open spans of a request: its whole life, and the part that it is in."""

    whole: "Span"
    context: Any
    part: "Span"


class Spans:
    """Makes the spans of an engine's requests."""

    def __init__(self, tracer: "Tracer", clock: Clock) -> None:
        """Make spans by `tracer`, whose times are those of `clock`."""
        from opentelemetry import trace

        self._trace, self._tracer = trace, tracer
        # The spans' times are of the wall clock, in ns, and they differ as the engine's times do.
        self._zero_ns = time.time_ns() - int(clock.now() * 1e9)
        self._lives: dict[str, _Life] = {}
        self._prefilling: set[str] = set()  # ids of requests in that part

    def here(self) -> Any:
        """What is current in this thread, for a request that another one will queue."""
        from opentelemetry import context

        return context.get_current()

    def queued(self, queued: QueuedRequest, now: float, context: Any = None) -> None:
        """A request waits for a slot: a new one, or one that had a slot before.

        Args:
          context: what a new one's spans belong to; None for what is current.
        """
        request = queued.request
        life = self._lives.get(request.id)
        if life is None:
            params = request.params
            attributes = {
                "jax_specdec.request_id": _legal(request.id),
                "gen_ai.usage.input_tokens": len(request.packed_prompt) // 4,
                "gen_ai.request.max_tokens": params.max_tokens,
                "gen_ai.request.temperature": params.temperature,
            }
            whole = self._start("request", now, context, attributes)
            inside = self._trace.set_span_in_context(whole, context)
            life = _Life(whole, inside, self._start("queue", now, inside))
            self._lives[request.id] = life
        else:
            if queued.losses:
                said = {"jax_specdec.attempts": len(queued.losses)}
                life.whole.add_event("a worker was lost", said, self._ns(now))
            self._enter(request.id, "queue", now)

    def placed(self, queued: QueuedRequest, process_rank: int, now: float) -> None:
        """A request got a slot of a worker."""
        self._enter(queued.request.id, "prefill", now, {"jax_specdec.process_rank": process_rank})

    def saw(self, update: Update, now: float) -> None:
        """An update is given to the user: first tokens, and ends."""
        if self._prefilling:
            for record in update.records:
                if record.num_tokens and record.request_id in self._prefilling:
                    rank = {"jax_specdec.process_rank": update.process_rank}
                    self._enter(record.request_id, "decode", now, rank)
        for record in update.records.events():
            if record.finish_reason is not None and record.statistics is not None:
                tokens = record.statistics.num_tokens
                self._end(record.request_id, record.finish_reason, tokens, now)

    def _enter(self, name: str, part: str, now: float, attributes: Any = None) -> None:
        if (life := self._lives.get(name)) is None:
            return
        life.part.end(self._ns(now))
        life.part = self._start(part, now, life.context, attributes)
        (self._prefilling.add if part == "prefill" else self._prefilling.discard)(name)

    def _end(self, name: str, reason: FinishReason, tokens: int, now: float) -> None:
        self._prefilling.discard(name)
        if (life := self._lives.pop(name, None)) is None:
            return
        ended = reason.name.lower()
        life.whole.set_attribute("gen_ai.response.finish_reasons", [ended])
        life.whole.set_attribute("gen_ai.usage.output_tokens", tokens)
        if reason in _FAILURES:
            life.whole.set_status(self._trace.StatusCode.ERROR, ended)
        life.part.end(self._ns(now))
        life.whole.end(self._ns(now))

    def _start(
        self, name: str, now: float, context: Any, attributes: Mapping[str, Any] | None = None
    ) -> "Span":
        # Without a context the span belongs to what is current: the caller's own span.
        return self._tracer.start_span(
            f"jax_specdec.{name}", context, attributes=attributes, start_time=self._ns(now)
        )

    def _ns(self, now: float) -> int:
        return self._zero_ns + int(now * 1e9)


def _legal(text: str) -> str:
    """The text as every exporter can write it: ids may hold lone surrogates."""
    return text.encode(errors="backslashreplace").decode()
