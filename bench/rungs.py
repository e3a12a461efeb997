"""What a batch pays for what others may ask: the rung that serves it, over its cheapest program.

An engine compiles a ladder of few programs for all that it serves (`Serves`). A worker without one
compiles for each batch the cheapest program that serves it, as it comes: that is the other
contender. Steps of eight slots of SmolLM2-135M-Instruct with n-gram drafts, in turn, by the CPU
time of the process, in this process.
"""

import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from bench.real import weights_path
from bench.timing import BenchError, Comparison, Target, compare
from jax_specdec.control import Admit
from jax_specdec.declaration import USUAL, Serves
from jax_specdec.device.drafting.drafters import NgramDrafter, NoDrafter
from jax_specdec.device.loop.programs import Compiled, cuts_messages
from jax_specdec.device.loop.state import LoopConfig
from jax_specdec.device.model import load_model
from jax_specdec.device.worker.worker import Worker
from jax_specdec.requests import Request, SamplingParams, Structured
from jax_specdec.structured.vocabulary import read_vocabulary

SLOTS, LENGTH, DRAFTS = 8, 512, 3
LIMIT = 0.97  # tokens in a time on the rung, over those of the cheapest program, at least
CHEAPEST, RUNG = "its cheapest program", "the rung that serves it"
BATCHES: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "greedy, K = 5": {"logprobs": 5},
    "T = 0.8": {"temperature": 0.8},
    "T = 0.8, K = 5": {"temperature": 0.8, "logprobs": 5},
}
END = 2  # <|im_end|>
BESIDE: Mapping[str, Mapping[str, Any]] = {
    "": {},
    ", one with a penalty": {"presence_penalty": 0.3},
    ", one with a grammar": {
        "structured": Structured("regex", r"([^\n]|\n)*"), "stop_token_ids": (END,),
    },
}  # fmt: skip


class Silent:
    """The sender of workers whose messages nobody reads."""

    def send(self, data: np.ndarray, /) -> None:
        """Drop a message."""


class Batch:
    """A worker whose slots are always taken, by requests that ask the same."""

    def __init__(
        self, params: Any, compiled: Compiled, serves: Serves | None, asked: list[SamplingParams]
    ) -> None:
        """Put the requests into the slots; each comes again once it has ended."""
        config = compiled.config
        read = partial(read_vocabulary, str(weights_path()), config.model.vocab_size)
        self.worker = Worker(
            config, params, Silent(), compiled=compiled, serves=serves, vocabulary=read
        )
        self._asked, self._count = asked, 0

    def step(self) -> None:
        """Make a step, and wait for it: none runs in another contender's time."""
        for index, slot in enumerate(self.worker.slots):
            if not slot.occupied:
                self._count += 1
                prompt = np.random.default_rng(index).integers(100, 40_000, 40).tolist()
                params = replace(self._asked[index], seed=index)
                request = Request(id=str(index), prompt_token_ids=prompt, params=params)
                self.worker.apply(Admit(slot=index, generation=self._count, request=request))
        self.worker.advance()
        self.worker.finish()

    def tokens(self, steps: int) -> np.ndarray:
        """All tokens after so many steps."""
        for _ in range(steps):
            self.step()
        return np.asarray(self.worker.state.tokens)


def run(quick: bool = False) -> Iterator[Comparison]:
    """Measure batches alike, and with one request that changes logits; `quick`: fewer rounds.

    Raises:
      BenchError: the two make other tokens, or the model's package is not installed.
    """
    weights, model = load_model(weights_path())
    for width in (0, DRAFTS):
        drafter = NgramDrafter(width) if width else NoDrafter(0)
        config = LoopConfig(model, drafter, num_slots=SLOTS, max_length=LENGTH)
        compiled = Compiled(config, cuts=cuts_messages(config))
        for batch, beside in ((a, b) for a in BATCHES for b in BESIDE):
            asked = [SamplingParams(max_tokens=400, **BATCHES[batch])] * SLOTS
            asked[0] = replace(asked[0], **BESIDE[beside])
            title = f"8 requests, {batch}{beside}, {width} drafts"
            yield _compared(title, weights, compiled, asked, quick=quick)


def _compared(
    title: str, weights: Any, compiled: Compiled, asked: list[SamplingParams], *, quick: bool
) -> Comparison:
    serves = {CHEAPEST: None, RUNG: USUAL}
    batches = {name: Batch(weights, compiled, one, asked) for name, one in serves.items()}
    first, second = (one.tokens(12) for one in batches.values())
    if not np.array_equal(first, second):
        raise BenchError(f"{title}: the two make other tokens")
    made = compare(
        title, {name: one.step for name, one in batches.items()}, check=None,
        rounds=5 if quick else 31, min_seconds=0.4, clock=time.process_time,
    )  # fmt: skip
    # Of two steps in a row: what this machine does meanwhile changes from minute to minute.
    pairs = zip(made[CHEAPEST].rounds, made[RUNG].rounds, strict=True)
    ratio = statistics.median(cheapest / rung for cheapest, rung in pairs)
    target = Target(title, LIMIT, ratio, "x of its cheapest program's tokens/s", at_least=True)
    return replace(made, targets=(target,))
