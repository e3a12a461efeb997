"""Where the constants of `StepWidths` come from: tokens in a time, as each is halved and doubled.

No model runs. Texts are two states, one in which a draft is mostly right and one in which it is
not, which change in the course of a text as the code, the quotes and the prose of a real one do.
Steps take a time by their width, with the noise of a shared machine and, now and then, a stall.
A figure is the tokens in a time of the adaptive width over those of the better of the two fixed
ones: 1 is no loss, and above 1 the width follows the text. A constant is right where its figure is
as good as that of its half and its double: it stands on a plateau, and its value matters little.

python -m bench widths
"""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np

from bench.comparison import from_samples
from bench.timing import Comparison
from jax_specdec.device.loop.host_slots import Slot
from jax_specdec.device.loop.kinds import StepKind
from jax_specdec.device.worker import step_widths
from jax_specdec.device.worker.step_widths import StepWidths

DRAFTS = 3
FULL, NONE = StepKind(), StepKind(num_drafts=0)
CONSTANTS = ("LEAST_CHANGES", "UNSEEN", "RATE", "MOST_ERROR", "LATEST", "BETTER")
STANDS = "as it is"


@dataclass(frozen=True)
class Scene:
    """What is generated, on which machine."""

    slots: int
    full_over_none: float  # the time of a full step over that of one without drafts
    right: tuple[float, float]  # the probability of a right draft behind a right one: code, prose
    wrong: tuple[float, float]  # behind a wrong one
    length: int = 150  # tokens of a stretch of one kind
    tokens: int = 1500  # of a text, of which each slot has one after the other


SCENES = {
    "chat, one slot": Scene(1, 1.25, (0.75, 0.4), (0.12, 0.02)),
    "chat, eight slots": Scene(8, 1.6, (0.75, 0.4), (0.12, 0.02)),
    "repetitive, one slot": Scene(1, 1.25, (0.95, 0.8), (0.4, 0.1)),
    "repetitive, eight slots": Scene(8, 1.6, (0.95, 0.8), (0.4, 0.1)),
    "drafts are dear": Scene(8, 2.5, (0.9, 0.4), (0.3, 0.02)),
    "drafts are nearly free": Scene(1, 1.04, (0.75, 0.4), (0.12, 0.02)),
    "short answers": Scene(8, 1.6, (0.9, 0.4), (0.3, 0.02), tokens=120),
}


class Texts:
    """The slots' texts: whether each slot's next drafts are right."""

    def __init__(self, scene: Scene, rng: random.Random) -> None:
        self._scene, self._rng = scene, rng
        self._at = [0] * scene.slots
        self._is_right = [False] * scene.slots
        self.generations = [1] * scene.slots

    def step(self, slot: int, width: int) -> tuple[int, int]:
        """The tokens that a slot emits in a step, and the fate of its drafts."""
        fate, judged = 0, min(width + 1, DRAFTS)
        for _ in range(judged):
            right = self._is_next_right(slot)
            self._see(slot, right)
            if not right:
                return min(fate, width) + 1, ~fate
            fate += 1
        return min(fate, width) + 1, fate

    def _is_next_right(self, slot: int) -> bool:
        kind = self._at[slot] // self._scene.length % 2
        odds = self._scene.right if self._is_right[slot] else self._scene.wrong
        return self._rng.random() < odds[kind]

    def _see(self, slot: int, right: bool) -> None:
        self._is_right[slot] = right
        self._at[slot] += 1
        if self._at[slot] >= self._scene.tokens:
            self._at[slot], self._is_right[slot] = 0, False
            self.generations[slot] += 1


def pace(scene: Scene, seed: int, steps: int, fixed: StepKind | None = None) -> float:
    """Tokens in a time (that of a step without drafts), by adaptive widths or a fixed one."""
    rng = random.Random(seed)
    texts, widths = Texts(scene, rng), StepWidths(DRAFTS, certain=True)
    times = {NONE: 1.0, FULL: scene.full_over_none}
    total = seconds = 0.0
    for _ in range(steps):
        slots = [Slot(generation=n, most_tokens=DRAFTS + 1) for n in texts.generations]
        kind = fixed or widths.choose(FULL, slots, [NONE])
        taken = times[kind] * rng.lognormvariate(0, 0.05) * (3 if rng.random() < 0.01 else 1)
        width = DRAFTS if kind == FULL else 0
        emitted = [texts.step(slot, width) for slot in range(scene.slots)]
        if fixed is None:
            widths.took(kind, taken)
            widths.saw([slot.generation for slot in slots], [fate for _, fate in emitted])
        total += sum(count for count, _ in emitted)
        seconds += taken
    return total / seconds


@contextmanager
def changed(name: str, factor: float) -> Iterator[None]:
    """The constant times a factor; of `BETTER`, its distance from 1."""
    value = getattr(step_widths, name)
    new = 1 + (value - 1) * factor if name == "BETTER" else value * factor
    new = max(1, round(new)) if isinstance(value, int) else new
    with mock.patch.object(step_widths, name, new):
        yield


def run(quick: bool) -> list[Comparison]:
    """Every constant, halved and doubled, in every scene."""
    steps, seeds = (600, range(2)) if quick else (4000, range(4))
    best = {
        name: [max(pace(scene, seed, steps, kind) for kind in (NONE, FULL)) for seed in seeds]
        for name, scene in SCENES.items()
    }

    def figures() -> dict[str, float]:
        return {
            name: float(np.mean([
                pace(scene, seed, steps) / best[name][seed] for seed in seeds
            ]))
            for name, scene in SCENES.items()
        }  # fmt: skip

    rows: dict[str, Mapping[str, float]] = {STANDS: figures()}
    for name in CONSTANTS:
        for factor in (0.5, 2.0):
            with changed(name, factor):
                rows[f"{name} x {factor:g}"] = figures()
    worst = {name: [float(np.mean([*row.values()]))] for name, row in rows.items()}
    made = from_samples(
        "tokens in a time over the better fixed width, by constants of StepWidths", worst,
        settings={"drafts": DRAFTS, "steps": steps, "seeds": len(seeds), "is a": "simulation"},
    )  # fmt: skip
    return [replace(made, figures=rows)]
