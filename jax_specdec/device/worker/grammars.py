"""The masks of slots whose requests have grammars, made while the model's forward pass runs.

Axes: B slots, S = D + 1 positions, D drafts, V vocabulary, W words of a bit mask of it.
"""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from jax_specdec.device.loop.host_slots import Slot
from jax_specdec.device.loop.state import LoopConfig
from jax_specdec.device.messages.logit_changes import GrammarMasks
from jax_specdec.requests import Request, RequestError
from jax_specdec.structured.checks import EXAMPLE
from jax_specdec.structured.matcher import EVERY, Matcher
from jax_specdec.structured.vocabulary import MASK_WORD, Vocabulary

TOGETHER = 4  # grammars that are compiled at a time
_LESS = 10  # priority of their threads


class Grammars:
    """Follows the texts of slots through their grammars, on the host."""

    def __init__(
        self,
        config: LoopConfig,
        vocabulary: Callable[[], Vocabulary] | None,
        *,
        at_once: bool,
        wake: Callable[[], object] | None = None,
    ) -> None:
        """Begin with none.

        Args:
          config: of the loop.
          vocabulary: reads the model's tokens, once a request has a grammar; None: none may have.
          at_once: grammars are compiled while everything waits, and not beside the steps.
          wake: called in another thread when one was compiled; None: nobody wants to know.
        """
        self._config, self._at_once = config, at_once
        self._read_vocabulary = vocabulary or _no_vocabulary
        self._vocabulary: Vocabulary | None = None
        self._reading = threading.Lock()
        self._wake = wake
        # They start with the first grammars. A large one holds no other up.
        self._threads = ThreadPoolExecutor(TOGETHER, "grammars", initializer=_give_way)

    def prepare(self) -> Future[Matcher]:
        """Read the model's tokens, and compile a first grammar; what cannot be served fails later.

        Ask for the `exception` of the result to wait for it.
        """
        return self._threads.submit(lambda: Matcher(self._tokens(), EXAMPLE, (0,)))

    def begin(self, request: Request) -> Future[Matcher] | None:
        """Compile a request's grammar, and go on behind what was emitted; None where it has none.

        The result raises `RequestError` where it cannot be served.
        """
        params, emitted = request.params, request.num_emitted
        if params.structured is None:
            return None
        structured = params.structured
        text = request.prompt_token_ids[-emitted:] if emitted else ()
        made = self._threads.submit(
            lambda: Matcher(self._tokens(), structured, params.stop_token_ids, text)
        )
        if self._wake is not None:
            made.add_done_callback(lambda _, wake=self._wake: wake())  # type: ignore[misc]
        if self._at_once:
            wait([made])
        return made

    def _tokens(self) -> Vocabulary:
        """The model's tokens, read once."""
        with self._reading:
            if self._vocabulary is None:
                self._vocabulary = self._read_vocabulary()
            return self._vocabulary

    def masks(
        self, slots: Sequence[Slot], seen: np.ndarray
    ) -> tuple[GrammarMasks, dict[int, RequestError]]:
        """Masks of the next step, and why some slots' requests cannot go on.

        Args:
          slots: [B].
          seen: [B, 3 + S + D], what the device knows of them (`loop.step.seen`).
        """
        masks = no_masks(self._config)
        allowed: Any = masks.allowed
        num_legal: Any = masks.num_legal
        errors: dict[int, RequestError] = {}
        drafts_at = 3 + self._config.num_positions
        for index, slot in enumerate(slots):
            length, decodes, num_drafts = seen[index, :3].tolist()
            if slot.grammar is None or not (slot.decoding and decodes):
                continue
            row, text = seen[index].tolist(), slot.grammar.result()
            new = length - (slot.prompt_length - slot.num_emitted) - text.num_tokens
            try:
                text.take(row[drafts_at - new : drafts_at])
                drafts = row[drafts_at : drafts_at + num_drafts]
                num_legal[index] = text.fill(allowed[index], drafts)
            except RequestError as error:
                errors[index] = error
                allowed[index] = EVERY
        return GrammarMasks(allowed, num_legal), errors


def _give_way() -> None:
    """Let the steps of the device's host come first."""
    if sys.platform == "linux":  # where a thread has a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LESS)


def no_masks(config: LoopConfig) -> GrammarMasks:
    """Masks that forbid nothing, on the host."""
    batch, num_positions = config.num_slots, config.num_positions
    words = -(-config.model.vocab_size // MASK_WORD)
    allowed: Any = np.full((batch, num_positions, words), EVERY)
    num_legal: Any = np.full(batch, num_positions - 1, np.int32)
    return GrammarMasks(allowed, num_legal)


def _no_vocabulary() -> Vocabulary:
    raise RequestError(
        "structured answers need the bytes of the model's tokens: give the worker its vocabulary"
    )
