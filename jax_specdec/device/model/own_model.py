"""A model of your own in the loop and the worker: two functions, a cache, and two facts.

The loop asks its model for nothing else. `ModelConfig` stands for the decoder that comes along.
"""

from dataclasses import replace
from typing import Any, Protocol

import jax
from jaxtyping import Array, Float, Int32

from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.device.model import llama
from jax_specdec.device.model.params import KVCache, init_cache

CPU_ROWS = 8  # from so many rows to 32, a product on a CPU has the same bits


class OwnModel(Protocol):
    """A model as `LoopConfig.model`: a frozen, hashable value, static under jit.

    An attribute `row_tile` says that its rows have bits of their own, by tiles of so many
    (`over_rows`).

    Axes: B slots, S positions of a step, T positions of a slot, E hidden size, V vocabulary. In a
    prefill chunk B is 1 and S the chunk.
    """

    @property
    def vocab_size(self) -> int:
        """V."""
        ...

    @property
    def dtype(self) -> str:
        """The type of the logits: "float32", "bfloat16" or "float16"."""
        ...

    def init_cache(self, num_slots: int, length: int) -> KVCache:
        """An empty cache: two arrays, whose axes 1 and 2 are slots and positions.

        The loop copies slots of it (axis 1), and looks at nothing else.
        """
        ...

    def forward(
        self,
        params: Any,
        tokens: Int32[Array, "B S"],
        positions: Int32[Array, "B S"],
        cache: KVCache,
    ) -> tuple[Float[Array, "B S E"], KVCache]:
        """Run one step; returns hidden states for `logits` (and for drafters), and the cache.

        Row (b, s) may depend on the entries 0..positions[b, s] of slot b and on nothing else. It
        writes its own entry, in place of what a rejected draft or an earlier request left there. A
        row whose position is < 0 or >= T is padding: it writes nothing and changes no other row.
        """
        ...

    def logits(self, params: Any, hidden: Float[Array, "*rows E"]) -> Float[Array, "*rows V"]:
        """The head: logits of hidden states, in `dtype`."""
        ...


Model = ModelConfig | OwnModel


def run_model(
    params: Any,
    model: Model,
    tokens: Int32[Array, "B S"],
    positions: Int32[Array, "B S"],
    cache: KVCache,
) -> tuple[Float[Array, "B S E"], KVCache]:
    """`forward` of either kind of model."""
    if isinstance(model, ModelConfig):
        return llama.forward(params, model, tokens, positions, cache)
    return model.forward(params, tokens, positions, cache)


def head(params: Any, model: Model, hidden: Float[Array, "*rows E"]) -> Float[Array, "*rows V"]:
    """`logits` of either kind of model."""
    if isinstance(model, ModelConfig):
        return llama.logits(params, model, hidden)
    return model.logits(params, hidden)


def row_tile(model: Model) -> int | None:
    """The model's `row_tile`, which one of your own may have as well; None where it has none."""
    tile: int | None = getattr(model, "row_tile", None)
    return tile


def in_tiles(model: ModelConfig, tile: int) -> ModelConfig:
    """The decoder with products of so many rows, and of fewer where this process's device may."""
    step = CPU_ROWS if jax.default_backend() == "cpu" else None
    return replace(model, row_tile=tile, row_step=step)


def head_columns(model: Model) -> int:
    """The columns of `head`: V, and the padding behind it."""
    return model.num_columns if isinstance(model, ModelConfig) else model.vocab_size


def empty_cache(model: Model, num_slots: int, length: int) -> KVCache:
    """`init_cache` of either kind of model."""
    if isinstance(model, ModelConfig):
        return init_cache(model, num_slots, length)
    return model.init_cache(num_slots, length)
