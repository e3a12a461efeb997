"""A request's choices in the engine, and the answer that they make, whole or as events.

Each choice is a stream of the engine. Whoever waits for an answer and leaves ends its choices.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, NamedTuple

from jax_specdec.engine import Engine, FinishReason, Stream, errors
from jax_specdec.export import openai
from jax_specdec.export.delivery import Delivery, DeliveryPart
from jax_specdec.export.openai import DONE, server_sent_event
from jax_specdec.records.record import Record
from jax_specdec.serve.choices import Choice, finish_word, stop_reason
from jax_specdec.serve.errors import ApiError
from jax_specdec.serve.model import ServedModel
from jax_specdec.serve.parse_request import ParsedRequest

_Json = dict[str, Any]

PART = 1 << 16  # bytes that a client must read in its time


class ChoiceChunk(NamedTuple):
    """A part of a choice that one or several records let be sent.

    Attributes:
      choice: the choice.
      parts: what is sent.
      finish: why it ended, in the API's word; None while it goes on.
      reason: the string or the token id that ended it, where one did.
    """

    choice: Choice
    parts: Sequence[DeliveryPart]
    finish: str | None
    reason: int | str | None

    @property
    def json(self) -> _Json:
        return self.choice.json(self.parts, self.finish, self.reason)


class Run:
    """The choices of one HTTP request, submitted; leave the block, and those that run are ended."""

    def __init__(
        self, engine: Engine, model: ServedModel, parsed: ParsedRequest, *, timeout: float | None
    ) -> None:
        """Submit every choice, or none.

        Args:
          engine: runs them.
          model: what they are written with.
          parsed: the request.
          timeout: seconds until they are ended; None: never.

        Raises:
          ApiError: the engine takes no more requests now.
        """
        self._model, self._asked, self._timeout = model, parsed, timeout
        self._streams: list[Stream] = []
        self._choices = [
            Choice(index, request, parsed, model) for index, request in enumerate(parsed.requests)
        ]
        self._created = int(time.time())
        try:
            for request in parsed.requests:
                self._streams.append(
                    engine.submit(
                        request,
                        priority=parsed.body.priority,
                        deadline=timeout,
                        group=parsed.id if len(parsed.requests) > 1 else "",
                    )
                )
        except Exception as error:
            self.end()
            raise _refused(error) from error

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End the choices that still run."""
        for stream in self._streams:
            stream.abort()

    async def answer(self) -> _Json:
        """The whole answer, made in a thread.

        Raises:
          ApiError: a choice ended early.
        """
        answers = await asyncio.gather(
            *(self._whole(*pair) for pair in zip(self._choices, self._streams, strict=True))
        )
        return await asyncio.to_thread(self._answer, answers)

    def _answer(self, answers: Sequence[ChoiceChunk]) -> _Json:
        choices = [of_choice.json for of_choice in answers]
        answer = self._header("chat.completion" if self._asked.chat else "text_completion")
        answer |= {"choices": choices, "usage": self._usage}
        if self._asked.chat and self._asked.prompt_logprobs:
            for choice in reversed(choices):
                answer |= _about_prompt(choice)  # where vLLM has it
        return answer

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events; an error is the last one except for the end."""
        kind = "chat.completion.chunk" if self._asked.chat else "text_completion"
        header = self._header(kind)
        no_usage = {"usage": None} if self._asked.include_usage else {}

        def event(chunk: ChoiceChunk) -> bytes:
            choice = chunk.json
            made = header | {"choices": [choice]} | no_usage
            if self._asked.chat:
                made |= _about_prompt(choice)
            return server_sent_event(made)

        try:
            async for chunk in self._chunks():
                large = chunk.choice.large
                async for part in in_parts(
                    await asyncio.to_thread(event, chunk) if large else event(chunk)
                ):
                    yield part
            if self._asked.include_usage:
                yield server_sent_event(header | {"choices": [], "usage": self._usage})
        except ApiError as error:
            yield server_sent_event(error.body)
            self.end()
        yield DONE

    async def _chunks(self) -> AsyncIterator[ChoiceChunk]:
        """The chunks of all choices, as they come."""
        pairs = list(zip(self._choices, self._streams, strict=True))
        if len(pairs) == 1:
            async with contextlib.aclosing(self._parts(*pairs[0])) as parts:
                async for chunk in parts:
                    yield chunk
            return
        queue: asyncio.Queue[ChoiceChunk | ApiError | None] = asyncio.Queue(len(pairs))

        async def pump(choice: Choice, stream: Stream) -> None:
            try:
                async with contextlib.aclosing(self._parts(choice, stream)) as parts:
                    async for chunk in parts:
                        await queue.put(chunk)
                await queue.put(None)
            except ApiError as error:
                await queue.put(error)

        tasks = [asyncio.create_task(pump(*pair)) for pair in pairs]
        try:
            num_open = len(tasks)
            while num_open:
                brought = await queue.get()
                if isinstance(brought, ApiError):
                    raise brought
                if brought is None:
                    num_open -= 1
                else:
                    yield brought
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _whole(self, choice: Choice, stream: Stream) -> ChoiceChunk:
        all_parts: list[DeliveryPart] = []
        word, why = None, None
        async for _, some, finish, reason in self._parts(choice, stream):
            all_parts += some
            word, why = finish or word, reason if finish else why
        return ChoiceChunk(choice, all_parts, word, why)

    async def _parts(self, choice: Choice, stream: Stream) -> AsyncGenerator[ChoiceChunk]:
        """The parts that records let be sent; the last one comes with the reason of the end.

        Raises:
          ApiError: the request ended early.
        """
        parsed, table = self._asked, self._model.table
        keep = parsed.body.include_stop_str_in_output
        delivery = Delivery(table, parsed.stops, keep=keep, min_tokens=choice.min_tokens)
        try:
            async for record in stream:
                if record.prompt is not None:
                    choice.add_prompt(record.prompt)
                    continue
                if record.finish_reason is not None and finish_word(record) is None:
                    self._complain(choice, record)
                parts = [
                    part for part in delivery.push(record) if part.text or part.record.num_tokens
                ]
                if parsed.score_only:
                    yield ChoiceChunk(choice, (), "length", None)
                    return
                if delivery.stop_text is not None:
                    stream.abort(FinishReason.STOP_STRING)
                    yield ChoiceChunk(choice, parts, "stop", delivery.stop_text)
                    return
                finish = finish_word(record)
                if parts or finish:
                    yield ChoiceChunk(
                        choice, parts, finish, stop_reason(record, self._model.eos_token_ids)
                    )
        except (errors.EngineClosed, errors.StreamBehind, errors.WorkerFailed) as error:
            raise _refused(error) from error

    def _complain(self, choice: Choice, record: Record) -> None:
        """Raise the error of a request that ended early."""
        reason = record.finish_reason
        assert reason is not None
        if reason is FinishReason.DEADLINE:
            raise ApiError(
                504,
                f"the answer was not complete after {self._timeout:g} seconds (--timeout): ask for "
                "fewer tokens",
                code="timeout",
            )
        if reason is FinishReason.RECOVERY_ERROR and choice.structured:
            raise ApiError(
                400,
                "the text cannot go on as the request says it must: no token fits, or finding one "
                "takes too long; the server's log says more. Ask for a simpler structure",
                code="structure_ended",
            )
        raise ApiError(503, f"the request ended early: {reason.name.lower()}", code="ended_early")

    @property
    def _usage(self) -> dict[str, int]:
        parsed = self._asked
        num_choices = len(parsed.requests) // parsed.prompts  # choices of a prompt
        prompt = sum(len(request.packed_prompt) // 4 for request in parsed.requests[::num_choices])
        return openai.usage(prompt, sum(choice.num_tokens for choice in self._choices))

    def _header(self, kind: str) -> _Json:
        return openai.header_of(self._asked.id, kind, self._model.name, self._created)


async def in_parts(text: bytes) -> AsyncIterator[bytes]:
    """The text in parts of PART bytes, except for the last one."""
    for begin in range(0, len(text), PART):
        yield text[begin : begin + PART]


def _about_prompt(choice: _Json) -> _Json:
    """The fields of a choice on its prompt, taken out of it."""
    names = "prompt_logprobs", "prompt_logprobs_start", "prompt_chosen_logprobs"
    return {name: choice.pop(name) for name in names if name in choice}


def _refused(error: Exception) -> Exception:
    """The answer to a request that the engine did not take, or did not finish."""
    if isinstance(error, errors.RequestError):
        return ApiError(400, str(error))
    if isinstance(error, errors.EngineFull):
        return ApiError(429, str(error), code="engine_full")
    if isinstance(error, errors.WorkerFailed):  # what it says has paths and tracebacks
        return ApiError(
            503, "the engine has stopped: the server's log says why", code="unavailable"
        )
    if isinstance(error, errors.EngineClosed | errors.StreamBehind):
        return ApiError(503, str(error), code="unavailable")
    return error
