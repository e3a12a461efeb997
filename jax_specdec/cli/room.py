"""The memory of an engine's workers, and what they hold, in one line."""

from dataclasses import replace
from pathlib import Path

from jax_specdec.checkpoint.hf_names import open_model
from jax_specdec.checkpoint.model_config import ModelConfig, cache_bytes
from jax_specdec.engine.config import EngineConfig
from jax_specdec.wording import pluralize

_GIB = 2**30
WORTH_SAYING = _GIB // 4  # bytes of caches


def line(config: EngineConfig, model: ModelConfig | None) -> str:
    """How many slots of how many tokens a worker has, its caches and weights, and who drafts.

    Args:
      config: of the engine.
      model: the sizes of the model; None for one of the user's own, whose caches nobody knows here.
    """
    slots = f"{pluralize(config.num_slots, 'slot')} of {config.max_length:,} tokens"
    return f"each worker: {slots}; {_memory(config, model)}; drafter: {_drafter(config)}"


def _memory(config: EngineConfig, model: ModelConfig | None) -> str:
    if model is None:
        return "caches and weights as the own model makes them"
    models = [model]
    if config.draft_model:
        small = open_model(Path(config.draft_model), dtype=model.dtype).config
        models.append(replace(small, dtype=model.dtype))
    caches = sum(cache_bytes(model, config.num_slots, config.max_length) for model in models)
    weights = sum(model.weight_bytes for model in models)
    shared = f" on {config.tensor_parallel} devices" if config.tensor_parallel > 1 else ""
    return (
        f"caches {caches / _GIB:.2f} GiB{_way_to_less(config, caches, weights)}, weights "
        f"{weights / _GIB:.2f} GiB in {model.dtype}{shared}"
    )


def _way_to_less(config: EngineConfig, caches: int, weights: int) -> str:
    """Which option makes caches smaller, and how much, where they are most of a start's memory."""
    if caches <= max(weights, WORTH_SAYING):
        return ""
    length = config.max_length // 4
    return f" (with --max-length {length} {caches * length / config.max_length / _GIB:.2f} GiB)"


def _drafter(config: EngineConfig) -> str:
    if config.drafter == "none" or not config.num_drafts:
        return "none"
    whose = f" ({Path(config.draft_model).name})" if config.draft_model else ""
    return f"{config.drafter}{whose}, up to {pluralize(config.num_drafts, 'draft')} a step"
