"""Block verification beside drafts that are accepted one by one: tokens a step, and time a token.

The model is the tiny one that comes with the package, with its own MTP head as the drafter. The
prompts are Python's standard library. Both rules follow the same law; seeds are equal, tokens are
not. A step costs both the same: the rule reads no row again where q is compact.
"""

import sysconfig
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.timing import Comparison, Target, from_samples, rotated, rounds_of
from jax_specdec.device import Compiled, LoopConfig, Worker
from jax_specdec.device.drafting import MtpDrafter
from jax_specdec.device.model import load_model
from jax_specdec.engine import Request, SamplingParams, byte_tokens, control, decode
from jax_specdec.engine import output_processor as processor
from pallas_kernels.sampling.verification import accepted_by_ratio

ONE_BY_ONE, TOGETHER = "one by one", "together"
SLOTS, PROMPT, TOKENS = 16, 60, 180
FILES = ("abc", "copy", "glob", "gzip", "functools", "keyword", "colorsys", "bisect")
CASES = ((3, 0.7), (3, 1.0), (3, 1.3), (7, 0.7), (7, 1.0), (7, 1.3))  # drafts, temperature


class Outbox(list[Any]):
    """A list in place of a ring."""

    send = list.append


def run(quick: bool = False) -> Iterator[Comparison]:
    """Both rules at each number of drafts and temperature; `quick`: at two of them.

    A rate is off by about half a percent: the rules draw other tokens.
    """
    params, model = load_model()
    prompts = prompts_of_library()
    for num_drafts, temperature in ((3, 1.0), (7, 1.0)) if quick else CASES:
        config = LoopConfig(
            model, MtpDrafter(model, num_drafts), num_slots=SLOTS, max_length=PROMPT + TOKENS + 16
        )
        loops = {ONE_BY_ONE: replace(config, accept=accepted_by_ratio), TOGETHER: config}
        programs = {name: Compiled(loop) for name, loop in loops.items()}
        counts: dict[str, list[int]] = {name: [] for name in loops}
        seconds: dict[str, list[float]] = {name: [] for name in loops}
        title = f"{num_drafts} drafts of the MTP head, temperature {temperature}"
        for name, loop in loops.items():
            decoded(loop, params, programs[name], prompts, temperature, seed=0)  # compiles
        for turn in rounds_of(title, 4 if quick else 12):
            for name in rotated(list(loops), turn):
                begin = time.process_time()
                lengths = decoded(
                    loops[name], params, programs[name], prompts, temperature, seed=1 + turn
                )
                seconds[name].append((time.process_time() - begin) / sum(lengths))
                counts[name] += lengths
        rates = {name: sum(lengths) / len(lengths) for name, lengths in counts.items()}
        gain = rates[TOGETHER] / rates[ONE_BY_ONE]
        found = from_samples(
            title, seconds, settings={"drafts": num_drafts, "temperature": temperature}
        )
        target = Target("tokens a step, over one by one", 0.99, gain, "x", at_least=True)
        figures = {name: {"tokens a step": rate} for name, rate in rates.items()}
        yield replace(found, figures=figures, targets=(target,))


def prompts_of_library() -> list[tuple[int, ...]]:
    """The beginnings of two places of each file."""
    library, prompts = Path(sysconfig.get_paths()["stdlib"]), []
    for name in FILES:
        text = (library / f"{name}.py").read_text(encoding="utf-8")
        for start in (0, len(text) // 2):
            ids = byte_tokens.encode(text[start : start + PROMPT], start_document=True)
            prompts.append(tuple(ids[:PROMPT].tolist()))
    return prompts[:SLOTS]


def decoded(
    config: LoopConfig,
    params: object,
    compiled: Compiled,
    prompts: list[tuple[int, ...]],
    temperature: float,
    seed: int,
) -> list[int]:
    """How many tokens each step of each request emitted."""
    outbox = Outbox()
    worker = Worker(config, params, outbox, compiled=compiled)
    state, lengths = processor.ProcessorState.empty(num_slots=SLOTS), []
    for slot, prompt in enumerate(prompts):
        request = Request(
            id=str(slot), prompt_token_ids=prompt,
            params=SamplingParams(
                max_tokens=TOKENS, temperature=temperature, seed=seed * SLOTS + slot
            ),
        )  # fmt: skip
        worker.apply(control.Admit(slot=slot, generation=1, request=request))
        state = processor.admit(state, slot=slot, generation=1, request=request)
    while worker.busy:
        worker.advance()
        for words in outbox:
            state, records = processor.step(state, decode(words.tobytes()))
            lengths += [len(record.token_ids) for record in records]
        outbox.clear()
    return lengths
