"""A Hugging Face checkpoint's tensors, read one by one into the decoder's stacked arrays.

Only one tensor is in memory beside the arrays. It is written in place into its leaf, and its file
is closed (and so unmapped) again. A leaf of a CPU is host memory, which jax takes over as it is;
another device's is donated to a program that writes into it. Where devices share the model, each
device only ever has its own part of a leaf.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from safetensors import SafetensorError, safe_open

from jax_specdec.checkpoint.gguf_file import read_tensor
from jax_specdec.checkpoint.hf_files import ITEM_BYTES, StoredTensor
from jax_specdec.checkpoint.hf_names import HfModel, TensorSource
from jax_specdec.checkpoint.model_config import CheckpointError, ModelConfig, cache_bytes
from jax_specdec.device.model.memory import check_memory
from jax_specdec.device.model.params import ModelParams, init_params, named_arrays
from jax_specdec.device.model.sharding import ONE_DEVICE, Parallel, params_specs

ALIGNMENT = 64  # bytes, which XLA's CPU device asks of memory that it takes over


def load_weights(
    model: HfModel,
    *,
    num_slots: int = 0,
    max_length: int = 0,
    tell: Callable[[int, int], None] = lambda done, total: None,
    parallel: Parallel = ONE_DEVICE,
    reserved: int = 0,
) -> ModelParams:
    """Read the weights, converted to the type that the model computes in.

    Args:
      model: from `hf_names.open_model`; its configuration may have padding of the vocabulary.
      parallel: the devices that share the weights.
      reserved: bytes on each device that the check of the memory leaves to others.
      num_slots, max_length: of the caches that will be made, counted in the check of the memory.
      tell: called before each tensor, and after the last, with how many were read, of how many.

    Raises:
      InsufficientMemory: weights and caches do not fit; nothing was read.
      CheckpointError: a file changed or is damaged, or two copies of a tensor differ.
    """
    config = model.config
    needed = reserved + needed_bytes(model, num_slots, max_length, parallel.num_shards)
    check_memory(needed, str(model.directory), config.dtype, num_devices=parallel.num_local)
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    specs = named_arrays(params_specs(shapes, parallel.num_shards))
    expected = named_arrays(shapes)
    leaves = _read_leaves(model, expected, tell, parallel, specs)
    for copy, original in model.copies:
        if not np.array_equal(
            tensor_array(model.stored[copy]), tensor_array(model.stored[original])
        ):
            raise CheckpointError(
                f"{model.stored[copy].file}: {copy} differs from {original}; this decoder has one "
                "tensor for both"
            )
    assert leaves.keys() == expected.keys()
    params: ModelParams = jax.tree.unflatten(
        jax.tree.structure(shapes), [leaves[name] for name in expected]
    )
    return params


def _read_leaves(
    model: HfModel,
    expected: Mapping[str, jax.ShapeDtypeStruct],
    tell: Callable[[int, int], None],
    parallel: Parallel,
    specs: Mapping[str, PartitionSpec],
) -> dict[str, jax.Array]:
    """Every weight by its path: one tensor, or a stack of one tensor a layer (and expert)."""
    shardings = None if parallel.mesh is None else parallel.shardings(specs)
    leaves: dict[str, jax.Array] = {}
    stacks: dict[str, np.ndarray] = {}  # in host memory
    in_host = shardings is None and jax.default_backend() == "cpu"
    for number, source in enumerate(model.sources):
        tell(number, len(model.sources))
        tensor = tensor_array(model.stored[source.name])
        leaf = expected[source.leaf]
        sharding = None if shardings is None else shardings[source.leaf]
        if source.layer is None:
            host = _convert(tensor, source, leaf)
            leaves[source.leaf] = (
                jax.device_put(host)
                if sharding is None
                else jax.make_array_from_callback(leaf.shape, sharding, host.__getitem__)
            )
            continue
        place = tuple(index for index in (source.layer, source.expert) if index is not None)
        if in_host:
            if source.leaf not in stacks:
                stacks[source.leaf] = aligned_zeros(leaf.shape, leaf.dtype)
            stacks[source.leaf][place] = tensor.T if source.transposed else tensor
        else:
            if source.leaf not in leaves:
                leaves[source.leaf] = jnp.zeros(leaf.shape, leaf.dtype, device=sharding)
            leaves[source.leaf] = _placing(sharding)(
                leaves[source.leaf], tensor, np.array(place, np.int32), source.transposed
            )
    tell(len(model.sources), len(model.sources))
    return leaves | {name: jax.device_put(stack) for name, stack in stacks.items()}


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Zeros in host memory that jax's CPU device takes over without a copy."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    return memory[begin : begin + size].view(dtype).reshape(shape)


def needed_bytes(model: HfModel, num_slots: int, max_length: int, num_shards: int = 1) -> int:
    """Bytes of the weights, the caches, and the largest tensor while it is copied.

    All of it on one device; of the weights and caches, each of `num_shards` devices has its part.
    """
    config = model.config
    weights = weight_bytes(config, num_shards)
    largest = max(
        ITEM_BYTES[model.stored[source.name].dtype] * math.prod(source.shape)
        for source in model.sources
    )
    return weights + cache_bytes(config, num_slots, max_length, num_shards) + largest


def weight_bytes(config: ModelConfig, num_shards: int = 1) -> int:
    """Bytes of the weights on each of the devices that share them."""
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    specs = named_arrays(params_specs(shapes, num_shards))
    parts = {name: num_shards if any(spec) else 1 for name, spec in specs.items()}
    arrays = named_arrays(shapes).items()
    return sum(x.size * x.dtype.itemsize // parts[name] for name, x in arrays)


def tensor_array(tensor: StoredTensor) -> np.ndarray:
    """The tensor, in memory of its own."""
    if tensor.packed is not None:
        return _in_order(read_tensor(tensor.file, tensor.packed), tensor.permuted)
    try:
        with safe_open(tensor.file, framework="numpy") as file:
            value: np.ndarray = file.get_tensor(tensor.name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{tensor.file}: {tensor.name} {list(tensor.shape)} cannot be read: {error}"
        ) from error
    return value


def _in_order(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys, which a GGUF file has pair by pair, as halves of their heads."""
    if not heads:
        return rows
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def _convert(tensor: np.ndarray, source: TensorSource, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
    """A weight without layers, as the decoder lays it out; padding of the vocabulary is 0."""
    value = tensor.T if source.transposed else tensor
    if source.swapped:
        first, second = np.split(value, 2, axis=0)
        value = np.concatenate([second, first], axis=0)
    padding = [(0, want - have) for want, have in zip(leaf.shape, value.shape, strict=True)]
    return np.ascontiguousarray(np.pad(value, padding) if np.any(padding) else value, leaf.dtype)


@functools.cache
def _placing(sharding: NamedSharding | None) -> Callable[..., jax.Array]:
    """`_place` for a stack that is split so: the result replaces it, on the same devices."""
    return jax.jit(_place, donate_argnums=0, static_argnames="transposed", out_shardings=sharding)


def _place(stack: jax.Array, tensor: jax.Array, place: jax.Array, transposed: bool) -> jax.Array:
    """Write the tensor of one layer, or of one layer and expert, into its stack, in place."""
    value = (tensor.T if transposed else tensor).astype(stack.dtype)
    begin = [*place, *(0 for _ in range(value.ndim))]
    shape = (1,) * place.shape[0] + value.shape
    return lax.dynamic_update_slice(stack, value.reshape(shape), begin)
