"""A worker without a model: all slots emit in every step.

`python -m jax_specdec.child tests.support.emitting_worker` is commanded as the real one is.
A message is made again where slots have changed, otherwise the last one with another step's tokens.
`BENCH_RAY_PACE` has the microseconds of a step; 0: as fast as the reader takes them.
"""

import os
import time
from typing import Any

import numpy as np

from ipc import wire
from ipc.wire import Kind, SlotState
from jax_specdec.child import Child
from jax_specdec.control import Admit, Release, Shutdown
from jax_specdec.records.encode import SlotContents, encode

TOKENS = 2  # of a slot and step
PACE = "BENCH_RAY_PACE"


class Slots:
    """The slots' requests, and the message that all of them make."""

    def __init__(self, count: int, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._requests: list[tuple[int, int, int] | None] = [None] * count  # generation, K, first
        self._begun: dict[int, int] = {}  # the first step of a slot's request
        self._left = np.zeros(count, np.int64)
        self._template: Any = None
        self._tokens = slice(0, 0)
        self._offsets = np.zeros(0, np.int64)

    @property
    def busy(self) -> bool:
        return bool(self._left.any())

    def apply(self, command: object) -> bool:
        """Carry a command out; False at the end."""
        if isinstance(command, Admit):
            params = command.request.params
            k = -1 if params.logprobs is None else params.logprobs
            first = command.request.prompt_token_ids[0] + command.request.num_emitted
            self._requests[command.slot] = command.generation, k, first
            self._left[command.slot] = params.max_tokens
            self._begun.pop(command.slot, None)
        elif isinstance(command, Release):
            found = self._requests[command.slot]
            if found is not None and found[0] == command.generation:
                self._requests[command.slot], self._left[command.slot] = None, 0
        else:
            return not isinstance(command, Shutdown)
        self._template = None
        return True

    def message(self, step: int) -> Any:
        """The next step of all slots."""
        if self._template is None:
            self._make(step)
        words = self._template
        words[wire.HEADER["step_low"].word] = step
        words[self._tokens] = (self._offsets + TOKENS * step) % self._vocabulary
        self._left = np.maximum(self._left - TOKENS, 0)
        if not self._left[self._live].all():
            for slot in np.flatnonzero(self._left == 0).tolist():
                self._requests[slot] = None
            self._template = None
        return words

    def _make(self, step: int) -> None:
        contents, offsets = [], []
        self._live = [slot for slot, found in enumerate(self._requests) if found is not None]
        for slot, (found, left) in enumerate(zip(self._requests, self._left.tolist(), strict=True)):
            if found is None:
                contents.append(SlotContents(state=SlotState.STOPPED))
                continue
            generation, k, first = found
            n = min(TOKENS, left)
            begin = self._begun.setdefault(slot, step)
            offsets += [first - TOKENS * begin + at for at in range(n)]
            contents.append(
                SlotContents(
                    generation=generation,
                    token_ids=range(n),
                    num_drafts=TOKENS - 1,
                    columns=k + 1,
                    logprobs=np.tile(-np.arange(1, k + 2, dtype=np.float32), n) if k >= 0 else (),
                    token_ranks=[1] * n if k >= 0 else (),
                    topk_ids=np.tile(np.arange(k), n) if k > 0 else (),
                )
            )
        self._template = np.frombuffer(encode(Kind.TARGET, step, contents), np.uint32).copy()
        start = wire.HEADER_WORDS + wire.SLOT_WORDS * len(contents)
        self._tokens = slice(start, start + len(offsets))
        self._offsets = np.array(offsets, np.int64)


def main(child: Child) -> int:
    """Entry point, as of the real worker."""
    pace = int(os.environ.get(PACE, 0)) * 1e-6
    slots = Slots(child.start.config.num_slots, child.start.config.vocab_size)
    child.stats.be_ready(("bench",))
    step, due = 0, 0.0
    assert child.ring is not None
    with child.ring as ring:
        while True:
            while not (child.commands.empty() and slots.busy):
                if not slots.apply(child.commands.get()):
                    return 0
            if pace:
                due = max(due + pace, time.monotonic() - pace)
                time.sleep(max(due - time.monotonic(), 0))
            child.stats.advance()
            ring.send(slots.message(step))
            step += 1
