"""Weights in a safetensors file, with the configuration in its metadata.

Tensors are named by their path in `ModelParams`, for example `layers.query` or
`mtp.layers.gate`. The metadata holds `format`, `config` (JSON) and the entries that the writer
adds. The file may hold another float type than the model computes in: the shipped weights are
stored in 16 bits and computed in 32.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jax_specdec.checkpoint.gguf_file import is_gguf
from jax_specdec.checkpoint.hf_names import open_model
from jax_specdec.checkpoint.model_config import CheckpointError, ModelConfig, cache_bytes
from jax_specdec.checkpoint.shipped import tiny_weights_path
from jax_specdec.device.model.hf_weights import load_weights
from jax_specdec.device.model.memory import available_bytes, check_memory
from jax_specdec.device.model.params import ModelParams, init_params, named_arrays
from jax_specdec.device.model.sharding import padded, tensor_parallel

FORMAT = "jax-specdec-1"


def save_checkpoint(
    path: str | Path,
    params: ModelParams,
    config: ModelConfig,
    *,
    storage_dtype: str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write params and config to a safetensors file.

    Args:
      path: file to write; replaced if it exists.
      params, config: the model.
      storage_dtype: float type in the file; None keeps `config.dtype`.
      metadata: more text entries, under names other than `format` and `config`.

    Raises:
      ValueError: a reserved metadata key.
    """
    extra = dict(metadata or {})
    if taken := {"format", "config"} & extra.keys():
        raise ValueError(f"metadata keys {sorted(taken)} are written by save_checkpoint itself")
    dtype = jnp.dtype(storage_dtype or config.dtype)
    tensors = {
        name: np.ascontiguousarray(np.asarray(value).astype(dtype))
        for name, value in named_arrays(params).items()
    }
    save_file(tensors, path, {"format": FORMAT, "config": json.dumps(config.to_dict()), **extra})


def load_checkpoint(
    path: str | Path,
    *,
    dtype: str | None = None,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[ModelParams, ModelConfig, dict[str, str]]:
    """Read a file that `save_checkpoint` wrote.

    Args:
      path: the file.
      dtype: compute in this float type instead of the configuration's.
      tell: called before each tensor, and after the last, with how many are there, of how many.

    Returns:
      The converted weights, the configuration and the metadata.

    Raises:
      FileNotFoundError: no such file.
      CheckpointError: the file is no checkpoint or truncated, or its tensors are not those of its
        configuration, in name or shape.
    """
    tensors, metadata = read_tensors(path)
    config = _config(path, metadata)
    config = replace(config, dtype=dtype or config.dtype)
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    expected = named_arrays(shapes)
    check_tensors(path, tensors, expected)
    leaves = []
    for number, name in enumerate(expected):
        tell(number, len(expected))
        leaves.append(jnp.asarray(tensors[name].astype(jnp.dtype(config.dtype))))
    tell(len(expected), len(expected))
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves), config, metadata


def read_tensors(path: str | Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The tensors of a safetensors file by name, and its metadata.

    Raises:
      FileNotFoundError: no such file.
      CheckpointError: it is damaged.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    try:
        with safe_open(path, framework="numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, dict(file.metadata() or {})
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged or no safetensors file: {error}") from error


def _config(path: str | Path, metadata: Mapping[str, str]) -> ModelConfig:
    if metadata.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {metadata.get('format')!r}, not {FORMAT!r}: it was not written "
            "by save_checkpoint"
        )
    try:
        return ModelConfig.from_dict(json.loads(metadata["config"]))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{path} has no valid configuration: {error}") from error


def check_tensors(
    path: str | Path, tensors: Mapping[str, np.ndarray], expected: Mapping[str, Any]
) -> None:
    """Refuse tensors that are not those of the configuration.

    Args:
      path: their file, for the error.
      tensors: by name.
      expected: arrays, or their shapes and types, by name. A float type is as good as any other; an
        integer has to be of the same type.

    Raises:
      CheckpointError: a name, a shape or a type is wrong.
    """
    if expected.keys() != tensors.keys():
        raise CheckpointError(
            f"{path} does not fit its configuration: it lacks "
            f"{sorted(expected.keys() - tensors.keys())} and has besides "
            f"{sorted(tensors.keys() - expected.keys())}"
        )
    for name, value in expected.items():
        if tensors[name].shape != value.shape:
            raise CheckpointError(
                f"{path}: {name} has shape {tensors[name].shape}, its configuration wants "
                f"{value.shape}"
            )
        dtype, floating = tensors[name].dtype, jnp.issubdtype(value.dtype, jnp.floating)
        if dtype != value.dtype and not (floating and jnp.issubdtype(dtype, jnp.floating)):
            raise CheckpointError(
                f"{path}: {name} is stored as {dtype}, and "
                f"{'a float type' if floating else value.dtype} is needed"
            )


def load_model(
    path: str | Path = "",
    *,
    dtype: str = "",
    num_slots: int = 0,
    max_length: int = 0,
    tell: Callable[[int, int], None] = lambda done, total: None,
    num_devices: int = 1,
    devices: Sequence[jax.Device] | None = None,
    reserved: int = 0,
) -> tuple[ModelParams, ModelConfig]:
    """Load the model that `path` names.

    Args:
      path: a directory in Hugging Face layout (see `hf_files.py`), a GGUF file, or a file that
        `save_checkpoint` wrote; empty for the weights that come with the package.
      dtype: the type to compute in; empty for that of the checkpoint.
      num_slots, max_length: of the caches that will be made, counted in the check of the memory.
      tell: called with how many of how many tensors are there, as they are read.
      num_devices: that share the model: the first of `devices`, or of all. A directory's weights go
        to them as they are read; a file's are for the caller to place.
      reserved: bytes on each device that the check of the memory leaves to others.

    Returns:
      The weights, and the configuration, with padding where the vocabulary does not divide.

    Raises:
      FileNotFoundError: there is no such path, or a file of the directory is missing.
      CheckpointError: the model is damaged or not supported, or its tensors do not fit.
      InsufficientMemory: weights and caches do not fit.
    """
    if path and (Path(path).is_dir() or is_gguf(path)):
        model = open_model(path, dtype=dtype)
        model = replace(model, config=padded(model.config, num_devices))
        parallel = tensor_parallel(model.config, num_devices, devices)
        params = load_weights(
            model, num_slots=num_slots, max_length=max_length, tell=tell, parallel=parallel,
            reserved=reserved,
        )  # fmt: skip
        return params, model.config
    file = path or tiny_weights_path()
    params, config, _ = load_checkpoint(file, dtype=dtype or None, tell=tell)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    needed = weights + cache_bytes(config, num_slots, max_length) + reserved
    check_memory(needed, str(file), config.dtype, available=available_bytes() + weights)
    config = padded(config, num_devices)
    return _with_padding(params, config), config


def _with_padding(params: ModelParams, config: ModelConfig) -> ModelParams:
    """Weights of a vocabulary without padding, with that of the configuration."""
    if not config.vocab_padding:
        return params
    more = (0, config.vocab_padding)
    head = None if params.head is None else jnp.pad(params.head, ((0, 0), more))
    return replace(params, embedding=jnp.pad(params.embedding, (more, (0, 0))), head=head)
