"""One model over several devices: which device holds what, and calls on vocabulary shards.

Tensor parallelism by JAX's own means. The matrices of a layer are split by heads and by
feed-forward columns, and XLA's partitioner adds the two sums a layer that this needs. Embedding and
output head are split by token ids, so every device makes the logits of its own tokens. Functions
that read logits run under `jax.shard_map` on these shards, and no logits travel.

Source of the split: Shoeybi et al., Megatron-LM, https://arxiv.org/abs/1909.08053.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.device.model.params import named_arrays
from pallas_kernels import VocabShard

MODEL_AXIS = "model"

_Result = TypeVar("_Result")

# The split axis of each weight that has one, from its end; the others are whole on every device.
SPLIT_AXES = {
    "embedding": -2,  # [V, E]
    "head": -1,  # [E, V]
    "query": -1, "key": -1, "value": -1,  # [L, E, heads * Dh]
    "query_bias": -1, "key_bias": -1, "value_bias": -1,  # [L, heads * Dh]
    "output": -2,  # [L, heads * Dh, E]
    "gate": -1, "up": -1,  # [L, E, F]
    "down": -2,  # [L, F, E]
}  # fmt: skip


@dataclass(frozen=True)
class Parallel:
    """The devices that a model is spread over. Hashable; by default one device has everything."""

    mesh: Mesh | None = None  # with one axis, MODEL_AXIS
    vocab_size: int | None = None  # V where the last columns are padding; None: they are not

    @property
    def axis_name(self) -> str | None:
        return None if self.mesh is None else MODEL_AXIS

    @property
    def columns(self) -> dict[str, Any]:
        """How the vocabulary of logits is split, as `verify` and `draw` take it."""
        if self.mesh is None:
            return {"axis_name": ()}
        return {"mesh": self.mesh, "axis_name": MODEL_AXIS, "vocab_size": self.vocab_size}

    @property
    def vocabulary(self) -> dict[str, Any]:
        """The same, as `row_digests` takes it."""
        return {} if self.mesh is None else self.columns

    @property
    def num_shards(self) -> int:
        return 1 if self.mesh is None else self.mesh.size

    @property
    def num_local(self) -> int:
        """Devices of this process among them."""
        return 1 if self.mesh is None else self.mesh.local_mesh.size

    @property
    def everywhere(self) -> NamedSharding | None:
        """The sharding of an array that every device has whole; None on one device."""
        if self.mesh is None:
            return None
        return NamedSharding(self.mesh, PartitionSpec())

    def over_vocabulary(
        self,
        call: Callable[[VocabShard, Any, Any], _Result],
        columns: Any,
        by_row: Any,
        *,
        split_result: bool = False,
    ) -> _Result:
        """Run `call(shard, columns, whole)` on each device with its own columns.

        Args:
          call: its result must be the same on every shard.
          columns: arrays [..., V]; a device gets [..., V / shards].
          by_row: arrays that every device gets whole.
          split_result: the result is like `columns`, and split as they are.
        """
        if self.mesh is None:
            return call(VocabShard(), columns, by_row)
        shard = VocabShard(MODEL_AXIS, self.vocab_size)
        specs = jax.tree.map(lambda x: split(x.shape, -1, self.num_shards), columns)
        everywhere = PartitionSpec()
        mapped: Callable[[Any, Any], _Result] = jax.shard_map(
            lambda columns, by_row: call(shard, columns, by_row),
            mesh=self.mesh,
            in_specs=(specs, everywhere),
            out_specs=specs if split_result else everywhere,
        )
        return mapped(columns, by_row)

    def place(self, values: Any, specs: Any) -> Any:
        """Put each value where its spec says; on one device they stay as they are."""
        if self.mesh is None:
            return values
        shardings = self.shardings(specs)
        if not self.mesh.is_multi_process:
            return jax.device_put(values, shardings)

        # Each process has all values, and puts its own part on its own devices: nothing travels.
        def part(value: Any, sharding: NamedSharding) -> jax.Array:
            if isinstance(value, jax.Array) and value.sharding == sharding:
                return value
            host = np.asarray(value)
            return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

        return jax.tree.map(part, values, shardings)

    def shardings(self, specs: Any) -> Any:
        """The specs as shardings of the mesh."""
        assert self.mesh is not None
        mesh = self.mesh
        is_spec = {"is_leaf": lambda x: isinstance(x, PartitionSpec)}
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, **is_spec)


ONE_DEVICE = Parallel()


def tensor_parallel(
    config: ModelConfig, count: int, devices: Sequence[jax.Device] | None = None
) -> Parallel:
    """Spread a model over the first `count` devices.

    Args:
      config: of the model. Its vocabulary, with its padding, must divide evenly among the devices
        (see `padded`). Heads or columns that do not divide stay whole on every device.
      count: 1 for one device.
      devices: to choose from; None for all that JAX knows.

    Raises:
      ValueError: too few devices, or a size that does not divide.
    """
    if count == 1:
        return ONE_DEVICE
    devices = jax.devices() if devices is None else devices
    if not 1 <= count <= len(devices):
        raise ValueError(
            f"tensor parallelism over {count} devices, but JAX has {len(devices)}: choose fewer, "
            "or on a CPU make N of them with XLA_FLAGS=--xla_force_host_platform_device_count=N"
        )
    if config.num_columns % count:
        raise ValueError(
            f"a vocabulary of {config.num_columns} tokens does not divide among {count} devices: "
            f"load the model for {count} devices, which pads it, or choose a number of devices "
            f"that divides {config.num_columns}"
        )
    mesh = Mesh(np.array(devices[:count]), (MODEL_AXIS,), axis_types=(AxisType.Auto,))
    return Parallel(mesh, config.vocab_size if config.vocab_padding else None)


def padded(config: ModelConfig, count: int) -> ModelConfig:
    """The configuration with as much padding as lets `count` devices share the vocabulary."""
    return replace(config, vocab_padding=-config.vocab_size % count)


def params_specs(params: Any, num_shards: int) -> Any:
    """A tree like `params` that says how each weight is split, as a `PartitionSpec`."""
    specs = [
        split(value.shape, SPLIT_AXES.get(name.rpartition(".")[2]), num_shards)
        for name, value in named_arrays(params).items()
    ]
    return jax.tree.unflatten(jax.tree.structure(params), specs)


def split(shape: tuple[int, ...], axis: int | None, num_shards: int) -> PartitionSpec:
    """Split `axis` over MODEL_AXIS where that divides evenly; otherwise, and for None, nothing."""
    names: list[str | None] = [None] * len(shape)
    if axis is not None and shape[axis] % num_shards == 0:
        names[axis] = MODEL_AXIS
    return PartitionSpec(*names)
