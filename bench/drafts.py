"""Drafts that never cost: tokens a second with a drafter, over those without, in one run.

Two kinds of text: chat, which hardly repeats itself and is sampled, and texts that can be guessed
from their prompts, greedy: code that is repeated, edited or extracted from. The code is Python's
standard library, which every machine with this program has.

The rate is that while all slots decode; beside it stands the makespan, the time until the last of
the requests has ended, when fewer and fewer decode.

Each contender is an engine of its own, which waits while another one's turn is. All answer the same
prompts, more than they have slots, with the same number of tokens. First each answers them once.
"""

import contextlib
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.timing import BenchError, Comparison, Target, from_samples, rotated, rounds_of
from jax_specdec.checkpoint.hf_names import open_model
from jax_specdec.declaration import Serves
from jax_specdec.engine.config import EngineConfig
from jax_specdec.engine.engine import Engine
from jax_specdec.requests import Request, SamplingParams
from jax_specdec.text.tokenizer import Tokenizer

NONE, DRAFTERS = "no drafter", ("ngram", "suffix")
LIMITS = {"chat": 0.97, "guessable": 1.5}  # tokens/s over those without a drafter, at least
SLOTS = (1, 8)
LENGTH = 768  # tokens of a slot
CODE = 700  # characters of a file
QUESTIONS = (
    "Why is the sky blue?", "Give me three ideas for a birthday party.",
    "What is the difference between a lake and a sea?", "Write a short poem about rain.",
    "How do I make good coffee at home?", "Explain to a child what money is.",
    "What should I see in Rome in two days?", "My cat does not eat. What can I do?",
)  # fmt: skip
# Such as SmolLM2-135M does repeat: 3.4 tokens a step and more with all of 3 n-gram drafts.
FILES = ("abc", "glob", "copy", "io", "gzip", "functools", "keyword", "colorsys")


def run(quick: bool = False, model: Path | None = None) -> Iterator[Comparison]:
    """Measure both kinds of text at one slot and at eight; `quick` takes fewer tokens and rounds.

    Args:
      quick: a minute to four a table, for a look.
      model: a checkpoint in Hugging Face's layout that can chat.

    Raises:
      BenchError: no model is named, or an engine answers with another number of tokens.
    """
    if model is None:
        raise BenchError("name a checkpoint that can chat: --model DIR")
    vocab_size = open_model(model).config.vocab_size
    tokenizer = Tokenizer(model, vocab_size)
    texts = {"chat": chat(tokenizer), "guessable": guessable(tokenizer)}
    for slots in SLOTS:
        with contextlib.ExitStack() as stack:
            engines = {
                name: stack.enter_context(Engine(configuration(model, vocab_size, name, slots)))
                for name in (NONE, *DRAFTERS)
            }
            for kind, prompts in texts.items():
                yield measure(engines, kind, prompts[: 2 if slots == 1 else 8], slots, quick)


def configuration(model: Path, vocab_size: int, drafter: str, slots: int) -> EngineConfig:
    """One contender's."""
    return EngineConfig(
        weights=str(model),
        vocab_size=vocab_size,
        drafter="none" if drafter == NONE else drafter,
        num_drafts=0 if drafter == NONE else EngineConfig.num_drafts,
        num_slots=slots,
        max_length=LENGTH,
        serves=Serves(max_logprobs=None, max_logprobs_of_prompts=None, max_changed_ids=0,
                      penalties=False, grammars=False),
    )  # fmt: skip


def chat(tokenizer: Tokenizer) -> list[Request]:
    """Questions, whose answers are sampled."""
    prompts = [tokenizer.encode_chat([{"role": "user", "content": one}]) for one in QUESTIONS]
    params = SamplingParams(temperature=0.7, top_p=0.95)
    return [
        Request(id=str(n), prompt_token_ids=prompt, params=replace(params, seed=n))
        for n, prompt in enumerate(prompts)
    ]


def guessable(tokenizer: Tokenizer) -> list[Request]:
    """Code, what became of it once before, and the first lines of that again.

    A small model goes on with what it has seen; it would not do a task that a chat names.
    """
    library, requests = Path(sysconfig.get_paths()["stdlib"]), []
    for n, name in enumerate(FILES):
        code = (library / f"{name}.py").read_text(encoding="utf-8")[:CODE].rsplit("\n", 1)[0]
        lines = code.split("\n")
        tasks = (
            ("Again:", code),
            (f"With {name} renamed to {name}2:", code.replace(name, f"{name}2")),
            ("The second half:", "\n".join(lines[len(lines) // 2 :])),
        )
        task, answer = tasks[n % len(tasks)]
        begun = "\n".join(answer.split("\n")[:2])
        text = f"# {name}.py\n{code}\n\n# {task}\n{answer}\n\n# {task}\n{begun}\n"
        prompt = tokenizer.encode(text)
        greedy = SamplingParams(temperature=0.0)
        requests.append(Request(id=name, prompt_token_ids=prompt, params=greedy))
    return requests


def measure(
    engines: dict[str, Engine], kind: str, requests: Sequence[Request], slots: int, quick: bool
) -> Comparison:
    """Compare the drafters on one kind of text, by the time a token while all slots decode.

    A drafter does not help all requests alike: those that end early make room for others. What
    that leaves of a rate, once nobody waits, the makespans tell.
    """
    tokens, rounds = (64, 3) if quick else (128, 5)
    asked = [
        replace(one, id=f"{turn} {one.id}", params=replace(one.params, max_tokens=tokens))
        for turn in range(2)
        for one in requests
    ]
    for engine in engines.values():
        for _ in engine.generate(asked):
            pass  # times of steps are learned
    title = f"{kind} text, {slots} slot{'s' * (slots > 1)}"
    paces: dict[str, list[Pace]] = {name: [] for name in engines}
    for index in rounds_of(title, rounds):
        for name in rotated(list(engines), index):
            paces[name].append(pace(engines[name], asked, tokens, slots))
    samples = {name: [one.seconds_a_token for one in of] for name, of in paces.items()}
    found = from_samples(title, samples, settings={"kind": kind, "slots": slots, "tokens": tokens})
    base = found[NONE].median
    targets = tuple(
        Target(f"{name}: tokens/s over those without", LIMITS[kind], base / found[name].median,
               "x", at_least=True)
        for name in DRAFTERS
    )  # fmt: skip
    makespans = {name: median(one.makespan for one in of) for name, of in paces.items()}
    figures = {
        name: {
            "tokens/s": 1 / found[name].median,
            "makespan, s": makespan,
            f"makespan of {NONE} over it": makespans[NONE] / makespan,
        }
        for name, makespan in makespans.items()
    }
    return replace(found, targets=targets, figures=figures)


class Pace(NamedTuple):
    """How fast an engine answered a list of requests."""

    seconds_a_token: float  # until fewer requests were left than slots
    makespan: float  # seconds until the last one had ended


def pace(engine: Engine, asked: Sequence[Request], tokens: int, slots: int) -> Pace:
    """The pace of an engine that has all requests at once.

    Raises:
      BenchError: it answers with another number of tokens.
    """
    began, count, left, seconds = time.perf_counter(), 0, len(asked), 0.0
    for update in engine.generate(asked):
        count += sum(record.num_tokens for record in update.records)
        left -= sum(bool(record.finish_reason) for record in update.records)
        if left < slots and not seconds:
            seconds = (time.perf_counter() - began) / count
    makespan = time.perf_counter() - began
    if count != tokens * len(asked):
        raise BenchError(f"{count} tokens, where {tokens * len(asked)} were asked for")
    return Pace(seconds, makespan)
