"""A Hugging Face checkpoint's tensors, read one by one into the decoder's stacked arrays.

Only one tensor is in memory beside the arrays. It is written in place into its leaf, which is
donated, and its file is closed (and so unmapped) again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from safetensors import SafetensorError, safe_open

from jax_specdec.checkpoint.hf_files import ITEM_BYTES, StoredTensor
from jax_specdec.checkpoint.hf_names import HfModel, Source
from jax_specdec.checkpoint.model_config import CheckpointError, ModelConfig
from jax_specdec.device.model.memory import check_memory
from jax_specdec.device.model.params import ModelParams, init_params, named_arrays


def load_weights(
    model: HfModel,
    *,
    num_slots: int = 0,
    max_length: int = 0,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> ModelParams:
    """Read the weights, converted to the type that the model computes in.

    Args:
      model: from `hf_names.open_model`.
      num_slots, max_length: of the caches that will be made, counted in the check of the memory.
      tell: called before each tensor, and after the last, with how many were read, of how many.

    Raises:
      InsufficientMemory: weights and caches do not fit; nothing was read.
      CheckpointError: a file changed or is damaged, or two copies of a tensor differ.
    """
    config = model.config
    check_memory(needed_bytes(model, num_slots, max_length), str(model.directory), config.dtype)
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    wanted = named_arrays(shapes)
    leaves = _read_leaves(model, wanted, tell)
    _check_copies(model)
    assert leaves.keys() == wanted.keys()
    params: ModelParams = jax.tree.unflatten(
        jax.tree.structure(shapes), [leaves[name] for name in wanted]
    )
    return params


def _read_leaves(
    model: HfModel,
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    tell: Callable[[int, int], None],
) -> dict[str, jax.Array]:
    """Every weight by its path: one tensor, or a stack of one tensor a layer (and expert)."""
    leaves: dict[str, jax.Array] = {}
    for number, source in enumerate(model.sources):
        tell(number, len(model.sources))
        tensor = _read(model.stored[source.name])
        leaf = wanted[source.leaf]
        if source.layer is None:
            leaves[source.leaf] = _convert(tensor, source, leaf.dtype)
        else:
            if source.leaf not in leaves:
                leaves[source.leaf] = jnp.zeros(leaf.shape, leaf.dtype)
            place = [one for one in (source.layer, source.expert) if one is not None]
            leaves[source.leaf] = _place(
                leaves[source.leaf], tensor, np.array(place, np.int32), source.transposed
            )
    tell(len(model.sources), len(model.sources))
    return leaves


def _check_copies(model: HfModel) -> None:
    """Refuse a stored copy that differs from the tensor that this decoder has for both."""
    for copy, original in model.copies:
        if not np.array_equal(_read(model.stored[copy]), _read(model.stored[original])):
            raise CheckpointError(
                f"{model.stored[copy].file}: {copy} differs from {original}; this decoder has one "
                "tensor for both"
            )


def needed_bytes(model: HfModel, num_slots: int, max_length: int) -> int:
    """Bytes of the weights, the caches, and the largest tensor while it is copied."""
    config = model.config
    item = jnp.dtype(config.dtype).itemsize
    weights = item * config.num_parameters
    largest = max(
        ITEM_BYTES[model.stored[source.name].dtype] * math.prod(source.shape)
        for source in model.sources
    )
    return weights + cache_bytes(config, num_slots, max_length) + largest


def cache_bytes(config: ModelConfig, num_slots: int, max_length: int) -> int:
    """Bytes of the decoder's and the MTP head's keys and values."""
    layers = config.num_layers + config.num_mtp_layers
    entry = 2 * config.num_kv_heads * config.head_dim * jnp.dtype(config.dtype).itemsize
    return layers * num_slots * max_length * entry


def _read(tensor: StoredTensor) -> np.ndarray:
    """The tensor, in memory of its own."""
    try:
        with safe_open(tensor.file, framework="numpy") as file:
            value: np.ndarray = file.get_tensor(tensor.name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{tensor.file}: {tensor.name} {list(tensor.shape)} cannot be read: {error}"
        ) from error
    return value


def _convert(tensor: np.ndarray, source: Source, dtype: np.dtype) -> jax.Array:
    """A weight without layers, as the decoder lays it out."""
    value = tensor.T if source.transposed else tensor
    if source.swapped:
        first, second = np.split(value, 2, axis=0)
        value = np.concatenate([second, first], axis=0)
    return jnp.array(np.ascontiguousarray(value), dtype=dtype)


@functools.partial(jax.jit, donate_argnums=0, static_argnames="transposed")
def _place(stack: jax.Array, tensor: jax.Array, place: jax.Array, transposed: bool) -> jax.Array:
    """Write the tensor of one layer, or of one layer and expert, into its stack, in place."""
    value = (tensor.T if transposed else tensor).astype(stack.dtype)
    begin = [*place, *(0 for _ in range(value.ndim))]
    shape = (1,) * place.shape[0] + value.shape
    return lax.dynamic_update_slice(stack, value.reshape(shape), begin)
