"""The models that the end-to-end benchmark decodes with, chosen by the device."""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.checkpoint.shipped import tiny_weights_path
from jax_specdec.device.drafting.by_name import make_drafter
from jax_specdec.device.loop.state import LoopConfig
from jax_specdec.device.model.checkpoint import load_checkpoint
from jax_specdec.device.model.params import init_params

REQUESTS = 64
DRAFTS = 2
PROMPT = 16  # tokens
PEAKED = 1.4  # of the deviation where a softmax of normal logits becomes peaked


@dataclass(frozen=True)
class Setup:
    """One configuration of the loop, and how long it is measured."""

    name: str
    load: Callable[[], tuple[Any, ModelConfig]]  # makes the weights and their configuration
    steps: int  # in a round, as a server runs them
    apart: int  # steps taken apart, after them; with none there are no times of parts
    rounds: int
    targets: bool = False  # whether the targets for an H100 apply
    requests: int = REQUESTS  # at once, a slot each
    draws: int = 1  # how often the contenders are made in a run

    @property
    def max_length(self) -> int:
        """The positions that a request needs if every step emits as many tokens as it can."""
        return PROMPT + (DRAFTS + 1) * (self.steps + self.apart + 18)

    def loop_config(self, model: ModelConfig) -> LoopConfig:
        """The loop's configuration for this model."""
        return LoopConfig(
            model=model,
            drafter=make_drafter("mtp", DRAFTS, model),
            num_slots=self.requests,
            max_length=self.max_length,
        )

    def prompts(self, model: ModelConfig) -> list[list[int]]:
        """Random prompts, one for each request: their meaning does not matter."""
        rng = np.random.default_rng(0)
        limit = min(model.vocab_size, 256)
        return [rng.integers(1, limit, PROMPT).tolist() for _ in range(self.requests)]


def shipped() -> tuple[Any, ModelConfig]:
    """The byte-level model that comes with the package."""
    return load_checkpoint(tiny_weights_path())[:2]


def random(config: ModelConfig) -> tuple[Any, ModelConfig]:
    """Random weights, whose logits are as peaked as those of a trained model.

    Logits of neutral norms are nearly equal: a nucleus of them is most of the vocabulary. Normal
    ones have a softmax that few tokens hold where their deviation is beyond the square root of
    2 log V (the random energy model: Derrida, Physical Review B 24, 1981).
    """
    params = init_params(config, jax.random.key(0))
    spread = PEAKED * math.sqrt(2 * math.log(config.vocab_size))  # of logits: it was 1
    assert params.mtp is not None
    mtp = dataclasses.replace(params.mtp, final_norm=params.mtp.final_norm * spread)
    norm = params.final_norm * spread
    return dataclasses.replace(params, final_norm=norm, mtp=mtp), config


WIDE = ModelConfig.tiny(  # its vocabulary outweighs its layers: the GPU's setup in small
    vocab_size=16_384, hidden_size=64, head_dim=16, intermediate_size=128, num_mtp_layers=1
)


def setups(quick: bool) -> list[Setup]:
    """The setups that this machine measures; the promises are made for that of a GPU."""
    if jax.devices()[0].platform == "gpu":
        # Of Llama 3.2 1B's sizes with an MTP head; random weights, as only time counts.
        sizes = (128_256, 2048, 16, 32, 8, 64, 8192)
        config = ModelConfig(*sizes, rope_theta=5e5, num_mtp_layers=1, dtype="bfloat16")
        load = functools.partial(random, config)
        steps, rounds = (20, 3) if quick else (50, 11)
        name = "1B-class model, V = 128256, bfloat16"
        return [Setup(name, load, steps, 20, rounds, targets=True)]
    if quick:
        return [Setup("tiny model, V = 264", shipped, 8, 4, 3)]
    return [
        Setup("tiny model, V = 264", shipped, 30, 20, 7),
        Setup("random model, V = 16384", functools.partial(random, WIDE), 12, 6, 7),
    ]
