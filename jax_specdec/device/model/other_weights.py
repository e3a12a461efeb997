"""Other weights for a model that runs: read beside those in use, with the same shapes and types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jax_specdec.checkpoint.model_config import CheckpointError, ModelConfig
from jax_specdec.device.model.checkpoint import check_tensors, load_model, read_tensors
from jax_specdec.device.model.params import ModelParams, named_arrays


def other_weights(
    path: str | Path,
    current: ModelParams,
    config: ModelConfig,
    *,
    tell: Callable[[int, int], None] = lambda done, total: None,
    num_devices: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> ModelParams:
    """Other weights of the same decoder; a draft model beside it stays.

    Args:
      path: as that of `load_model`.
      current: the weights in use.
      config: what they are of.
      tell, num_devices, devices: as those of `load_model`.

    Raises:
      FileNotFoundError, CheckpointError, InsufficientMemory: as `load_model`.
      CheckpointError: the weights are those of another model.
    """
    params, other = load_model(
        path, dtype=config.dtype, tell=tell, num_devices=num_devices, devices=devices
    )
    if other != config:
        differ = [
            f"{field.name} is {getattr(other, field.name)!r} instead of "
            f"{getattr(config, field.name)!r}"
            for field in fields(config)
            if getattr(other, field.name) != getattr(config, field.name)
        ]
        raise CheckpointError(
            f"{path} is another model than the one that runs: {'; '.join(differ)}; start an engine "
            "with it"
        )
    return replace(params, draft=current.draft)


def own_weights(path: str | Path, current: Any) -> Any:
    """Other parameters for a model of your own, from a safetensors file.

    Args:
      path: the file; its tensors have the names of `named_arrays(current)`.
      current: the parameters in use, any tree of arrays.

    Raises:
      FileNotFoundError: no such file.
      CheckpointError: it is damaged, or its tensors are not those of the model, in name, shape or
        kind of type.
    """
    tensors, _ = read_tensors(path)
    expected = named_arrays(current)
    check_tensors(path, tensors, expected)
    leaves = []
    for name, old in expected.items():
        value = tensors[name].astype(old.dtype)
        # An array that was put on its device by name: programs were compiled for that.
        committed = isinstance(old, jax.Array) and old.committed
        leaves.append(jax.device_put(value, old.sharding) if committed else jnp.asarray(value))
    return jax.tree.unflatten(jax.tree.structure(current), leaves)
