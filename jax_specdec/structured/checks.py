"""Requests whose structures cannot be served are refused before a worker gets them."""

from __future__ import annotations

import contextlib
import importlib.util
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jax_specdec.requests import Request, RequestError, Structured
from jax_specdec.structured.grammar import grammar_of
from jax_specdec.structured.limits import GrammarLimits

if TYPE_CHECKING:
    from concurrent.futures import Future

    from jax_specdec.structured.gate import GrammarGate


EXAMPLE = Structured("regex", "a")


class StructureChecks:
    """Looks at structures, and has them compiled in a process of its own (`gate.py`)."""

    def __init__(self, texts: str, vocab_size: int, limits: GrammarLimits | None = None) -> None:
        """Start nothing yet; arguments as of `GrammarGate`."""
        self._arguments = texts, vocab_size, limits
        self._lock = threading.Lock()
        self._made: GrammarGate | None = None

    def begin(self) -> None:
        """Start the process: the first structure then takes no longer than others; does not wait.

        Where its library is not installed, each request with a structure is told so.
        """
        if importlib.util.find_spec("llguidance") is not None:
            self._gate.ask(EXAMPLE, (0,))

    def check(self, request: Request) -> None:
        """Refuse a request whose structure cannot be compiled, or allows no text; any thread may.

        Raises:
          RequestError: says why.
          GateFull: too many structures wait to be compiled.
        """
        with _named(request):
            if (answer := self._ask(request)) is not None:
                _decide(answer if isinstance(answer, str) else answer.result())

    async def check_async(self, request: Request) -> None:
        """The same in a program with an event loop; cancelled, it ends the compilation.

        Unless others wait for it.
        """
        import asyncio

        with _named(request):
            if (answer := self._ask(request)) is not None:
                _decide(answer if isinstance(answer, str) else await asyncio.wrap_future(answer))

    def close(self) -> None:
        """End the process."""
        if self._made is not None:
            self._made.close()

    @property
    def _gate(self) -> GrammarGate:
        """Made with the first structure: few users of an engine need what it imports."""
        from jax_specdec.structured.gate import GrammarGate

        with self._lock:
            if self._made is None:
                self._made = GrammarGate(*self._arguments)
            return self._made

    def _ask(self, request: Request) -> str | Future[str] | None:
        """The answer about a request's structure, now or later; None where it has none."""
        structured, stops = request.params.structured, request.params.stop_token_ids
        if structured is None:
            return None
        if (answer := self._gate.past_answer(structured, stops)) is not None:
            return answer
        grammar_of(structured)  # most mistakes need no compiler to be found
        return self._gate.ask(structured, stops)


def _decide(why: str) -> None:
    if why:
        raise RequestError(why)


@contextlib.contextmanager
def _named(request: Request) -> Iterator[None]:
    try:
        yield
    except RequestError as error:
        raise RequestError(f"request {request.id!r}: {error}") from error
